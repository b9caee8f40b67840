"""The hand-written collectors of `rlcli bench collect`: what a good engineer writes with gymnasium and torch.

Each takes `steps` vector steps and returns what it stored, log-probabilities and true next observations included.
No framework, nothing hidden; read them before believing a ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn
from torch.distributions import Categorical, Distribution, Normal


class Stored(dict):
    """Key -> tensor `[T, N, *]`."""


def _empty(
    steps: int, lanes: int, seen: Sequence[int], acted: Sequence[int] = (), dtype: torch.dtype = torch.int64
) -> Stored:
    """Return rows that are still to be written."""
    return Stored(
        obs=torch.empty(steps, lanes, *seen), next_obs=torch.empty(steps, lanes, *seen),
        action=torch.empty(steps, lanes, *acted, dtype=dtype), log_prob=torch.empty(steps, lanes),
        reward=torch.empty(steps, lanes), terminated=torch.empty(steps, lanes, dtype=torch.bool),
        truncated=torch.empty(steps, lanes, dtype=torch.bool),
    )  # fmt: skip


def drawn(
    make: Callable[[], gym.Env], lanes: int, steps: int, law_of: Callable[[torch.Tensor], Distribution], *,
    after_step: Callable[[int, Stored], None] | None = None, norm: Normalised | None = None,
) -> Callable[[], Stored]:  # fmt: skip
    """Collect on a SyncVectorEnv: one forward and one draw a step; box actions are clipped when executed."""
    envs: Any = SyncVectorEnv([make] * lanes, autoreset_mode=AutoresetMode.SAME_STEP)
    seen = envs.reset(seed=0)[0]
    state = {"obs": torch.as_tensor(seen if norm is None else norm(seen), dtype=torch.float32)}
    width, space = envs.single_observation_space.shape, envs.single_action_space
    box = isinstance(space, gym.spaces.Box)

    def collect() -> Stored:
        rows = _empty(steps, lanes, width, space.shape, torch.float32 if box else torch.int64)
        obs_rows, next_rows, actions, log_probs, rewards, terminated, truncated = rows.values()
        obs = state["obs"]
        for t in range(steps):
            obs_rows[t] = obs
            with torch.no_grad():
                law = law_of(obs)
                action = law.sample()
                log_prob = law.log_prob(action)
                log_probs[t] = log_prob.sum(-1) if box else log_prob
            actions[t] = action
            sent = np.clip(action.numpy(), space.low, space.high) if box else action.numpy()
            after, reward, term, trunc, infos = envs.step(sent)
            following = torch.as_tensor(after if norm is None else norm(after), dtype=torch.float32)
            next_rows[t] = following
            if "final_obs" in infos:
                for lane in np.flatnonzero(infos["_final_obs"]):
                    final = infos["final_obs"][lane]
                    next_rows[t, lane] = torch.as_tensor(final if norm is None else norm.of(final))
            rewards[t] = torch.as_tensor(reward)
            terminated[t] = torch.as_tensor(term)
            truncated[t] = torch.as_tensor(trunc)
            if after_step is not None:
                after_step(t, rows)
            obs = following
        state["obs"] = obs
        return rows

    return collect


def pooled(env_id: str, lanes: int, steps: int, net: nn.Module, seed: int = 0) -> Callable[[], Stored]:
    """Collect on envpool's public face, which spends a row on every reset: `counted` marks the others."""
    import envpool

    pool = envpool.make_gymnasium(env_id, num_envs=lanes, seed=seed)
    state = {"obs": torch.from_numpy(pool.reset()[0]), "over": torch.zeros(lanes, dtype=torch.bool)}
    width = pool.single_observation_space.shape

    def collect() -> Stored:
        rows = _empty(steps, lanes, width)
        obs_rows, next_rows, actions, log_probs, rewards, terminated, truncated = rows.values()
        done = torch.empty(steps, lanes, dtype=torch.bool)
        counted = torch.empty(steps, lanes, dtype=torch.bool)
        obs, over = state["obs"], state["over"]
        with torch.inference_mode():
            for t in range(steps):
                log_p = net(obs).log_softmax(-1)  # a Categorical would take longer than the net
                drawn = torch.multinomial(log_p.exp(), 1)
                log_probs[t] = log_p.gather(1, drawn).squeeze(1)
                action = drawn.squeeze(1)
                obs_rows[t] = obs
                actions[t] = action
                counted[t] = ~over  # an env that had ended disregards its action and begins anew
                after, reward, term, trunc, _ = pool.step(action.numpy())
                obs = torch.from_numpy(after)
                next_rows[t] = obs
                rewards[t] = torch.from_numpy(reward)
                terminated[t] = torch.from_numpy(term)
                truncated[t] = torch.from_numpy(trunc)
                over = terminated[t] | truncated[t]
                done[t] = over
        state.update(obs=obs, over=over)
        return Stored(rows, done=done, counted=counted)

    return collect


def recurrent(
    make: Callable[[], gym.Env], lanes: int, steps: int, encoder: nn.Module, cell: nn.GRUCell, head: nn.Module
) -> Callable[[], Stored]:
    """Collect discrete actions with a memory: each step's state is stored, zero at an episode's start."""
    h, states = torch.zeros(lanes, cell.hidden_size), list[torch.Tensor]()

    def law_of(obs: torch.Tensor) -> Distribution:
        nonlocal h
        states.append(h)
        h = cell(encoder(obs), h)
        return Categorical(logits=head(h))

    def forget(t: int, rows: Stored) -> None:
        h[rows["terminated"][t] | rows["truncated"][t]] = 0.0

    collect = drawn(make, lanes, steps, law_of, after_step=forget)

    def collect_states() -> Stored:
        states.clear()
        return Stored(collect(), state=torch.stack(states))

    return collect_states


class Point(gym.Env):
    """A point that is pushed towards a goal: dict observations, box actions, one numpy operation a step."""

    def __init__(self) -> None:
        box = gym.spaces.Box
        self.observation_space = gym.spaces.Dict(
            {"place": box(-np.inf, np.inf, (4,), np.float32), "goal": box(-1.0, 1.0, (2,), np.float32)}
        )
        self.action_space = box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = np.zeros(4, np.float32)
        self.goal = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        self.clock = 0
        return {"place": self.place, "goal": self.goal}, {}

    def step(self, action):
        self.clock += 1
        self.place = self.place + 0.1 * np.concatenate((self.place[2:], action))
        gap = float(abs(self.place[0] - self.goal[0]) + abs(self.place[1] - self.goal[1]))
        return {"place": self.place, "goal": self.goal}, -gap, gap < 0.05, self.clock >= 200, {}


def dict_and_box(make: Callable[[], gym.Env], lanes: int, steps: int, net, std: torch.Tensor, names: list[str]):
    """Collect dict observations, given to the net in the order of `names`, and box actions."""
    envs: Any = SyncVectorEnv([make] * lanes, autoreset_mode=AutoresetMode.SAME_STEP)
    state = {name: torch.as_tensor(x) for name, x in envs.reset(seed=0)[0].items()}
    width = {name: envs.single_observation_space[name].shape for name in names}
    d = envs.single_action_space.shape
    low, high = envs.single_action_space.low, envs.single_action_space.high

    def collect() -> Stored:
        rows = {name: torch.empty(steps, lanes, *width[name]) for name in names}
        next_rows = {name: torch.empty(steps, lanes, *width[name]) for name in names}
        actions = torch.empty(steps, lanes, *d)
        log_probs, rewards = torch.empty(steps, lanes), torch.empty(steps, lanes)
        terminated = torch.empty(steps, lanes, dtype=torch.bool)
        truncated = torch.empty(steps, lanes, dtype=torch.bool)
        obs = dict(state)
        for t in range(steps):
            with torch.no_grad():
                law = Normal(net(*(obs[name] for name in names)), std)
                action = law.sample()
                log_probs[t] = law.log_prob(action).sum(-1)
            actions[t] = action
            after, reward, term, trunc, infos = envs.step(np.clip(action.numpy(), low, high))
            for name in names:
                rows[name][t] = obs[name]
                obs[name] = torch.as_tensor(after[name])
                next_rows[name][t] = obs[name]
            if "final_obs" in infos:
                for lane in np.flatnonzero(infos["_final_obs"]):
                    for name in names:
                        next_rows[name][t, lane] = torch.as_tensor(infos["final_obs"][lane][name])
            rewards[t] = torch.as_tensor(reward, dtype=torch.float32)
            terminated[t] = torch.as_tensor(term)
            truncated[t] = torch.as_tensor(trunc)
        state.update(obs)
        return Stored(
            obs=rows, next_obs=next_rows, action=actions, log_prob=log_probs, reward=rewards,
            terminated=terminated, truncated=truncated,
        )  # fmt: skip

    return collect


class Normalised:
    """Normalise by running mean and deviation, updated at every vector step (Chan et al.'s parallel update)."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.mean, self.var, self.count = np.zeros(shape), np.ones(shape), 1e-4

    def __call__(self, x: np.ndarray) -> np.ndarray:
        n = x.shape[0]
        mean, var = x.mean(0), x.var(0)
        total = self.count + n
        delta = mean - self.mean
        self.mean = self.mean + delta * n / total
        self.var = (self.var * self.count + var * n + delta**2 * self.count * n / total) / total
        self.count = total
        return self.of(x)

    def of(self, x: np.ndarray) -> np.ndarray:
        return np.clip((x - self.mean) / np.sqrt(self.var + 1e-8), -10, 10).astype(np.float32)


def with_bookkeeping(make: Callable[[], gym.Env], lanes: int, steps: int, net: nn.Module):
    """Collect discrete actions with observation normalisation, a step counter and the return so far."""
    counts, returns = torch.zeros(lanes, dtype=torch.int64), torch.zeros(lanes)

    step_count, episode_reward = torch.empty(0), torch.empty(0)

    def count(t: int, rows: Stored) -> None:
        step_count[t] = counts
        episode_reward[t] = returns.add_(rows["reward"][t])
        over = rows["terminated"][t] | rows["truncated"][t]
        counts.add_(1)
        counts[over] = 0
        returns[over] = 0.0

    norm = Normalised(make().observation_space.shape or ())
    collect = drawn(make, lanes, steps, lambda obs: Categorical(logits=net(obs)), after_step=count, norm=norm)

    def collect_counted() -> Stored:
        nonlocal step_count, episode_reward
        step_count, episode_reward = torch.empty(steps, lanes, dtype=torch.int64), torch.empty(steps, lanes)
        return Stored(collect(), step_count=step_count, episode_reward=episode_reward)

    return collect_counted
