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
    make: Callable[[], gym.Env], lanes: int, steps: int, law_of: Callable[[torch.Tensor], Distribution], seed: int = 0
) -> Callable[[], Stored]:
    """Collect on a SyncVectorEnv: one forward and one draw a step; box actions are clipped when executed."""
    envs: Any = SyncVectorEnv([make] * lanes, autoreset_mode=AutoresetMode.SAME_STEP)
    state = {"obs": torch.as_tensor(envs.reset(seed=seed)[0], dtype=torch.float32)}
    width, space = envs.single_observation_space.shape, envs.single_action_space
    box = isinstance(space, gym.spaces.Box)

    def collect() -> Stored:
        rows = _empty(steps, lanes, width, space.shape, torch.float32 if box else torch.int64)
        obs_rows, next_rows, actions, log_probs, rewards, terminated, truncated = rows.values()
        obs = state["obs"]
        for t in range(steps):
            with torch.no_grad():
                law = law_of(obs)
                action = law.sample()
                log_prob = law.log_prob(action)
                log_probs[t] = log_prob.sum(-1) if box else log_prob
            obs_rows[t] = obs
            actions[t] = action
            sent = np.clip(action.numpy(), space.low, space.high) if box else action.numpy()
            after, reward, term, trunc, infos = envs.step(sent)
            following = torch.as_tensor(after, dtype=torch.float32)
            next_rows[t] = following
            if "final_obs" in infos:
                for lane in np.flatnonzero(infos["_final_obs"]):
                    next_rows[t, lane] = torch.as_tensor(infos["final_obs"][lane])
            rewards[t] = torch.as_tensor(reward)
            terminated[t] = torch.as_tensor(term)
            truncated[t] = torch.as_tensor(trunc)
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
    make: Callable[[], gym.Env], lanes: int, steps: int, encoder: nn.Module, cell: nn.GRUCell, head: nn.Module,
    seed: int = 0,
) -> Callable[[], Stored]:  # fmt: skip
    """Collect discrete actions with a memory: each step's state is stored, zero at an episode's start."""
    envs: Any = SyncVectorEnv([make] * lanes, autoreset_mode=AutoresetMode.SAME_STEP)
    state = {"obs": torch.as_tensor(envs.reset(seed=seed)[0]), "h": torch.zeros(lanes, cell.hidden_size)}
    width = envs.single_observation_space.shape

    def collect() -> Stored:
        rows = _empty(steps, lanes, width)
        obs_rows, next_rows, actions, log_probs, rewards, terminated, truncated = rows.values()
        state_rows = torch.empty(steps, lanes, cell.hidden_size)
        obs, h = state["obs"], state["h"]
        for t in range(steps):
            state_rows[t] = h
            with torch.no_grad():
                h = cell(encoder(obs), h)
                law = Categorical(logits=head(h))
                action = law.sample()
                log_probs[t] = law.log_prob(action)
            obs_rows[t] = obs
            actions[t] = action
            after, reward, term, trunc, infos = envs.step(action.numpy())
            following = torch.as_tensor(after, dtype=torch.float32)
            next_rows[t] = following
            if "final_obs" in infos:
                over = np.flatnonzero(infos["_final_obs"])
                for lane in over:
                    next_rows[t, lane] = torch.as_tensor(infos["final_obs"][lane])
                h[over] = 0.0
            rewards[t] = torch.as_tensor(reward)
            terminated[t] = torch.as_tensor(term)
            truncated[t] = torch.as_tensor(trunc)
            obs = following
        state.update(obs=obs, h=h)
        return Stored(rows, state=state_rows)

    return collect


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
        return np.clip((x - self.mean) / np.sqrt(self.var + 1e-8), -10, 10).astype(np.float32)


def with_bookkeeping(make: Callable[[], gym.Env], lanes: int, steps: int, net: nn.Module):
    """Collect discrete actions with observation normalisation, a step counter and the return so far."""
    envs: Any = SyncVectorEnv([make] * lanes, autoreset_mode=AutoresetMode.SAME_STEP)
    norm = Normalised(envs.single_observation_space.shape)
    state = {"obs": torch.as_tensor(norm(envs.reset(seed=0)[0]))}
    width = envs.single_observation_space.shape
    counts, returns = torch.zeros(lanes, dtype=torch.int64), torch.zeros(lanes)

    def collect() -> Stored:
        rows = _empty(steps, lanes, width)
        obs_rows, next_rows, actions, log_probs, rewards, terminated, truncated = rows.values()
        step_count = torch.empty(steps, lanes, dtype=torch.int64)
        episode_reward = torch.empty(steps, lanes)
        obs = state["obs"]
        for t in range(steps):
            with torch.no_grad():
                law = Categorical(logits=net(obs))
                action = law.sample()
                log_probs[t] = law.log_prob(action)
            obs_rows[t] = obs
            actions[t] = action
            step_count[t] = counts
            after, reward, term, trunc, infos = envs.step(action.numpy())
            following = torch.as_tensor(norm(after))
            next_rows[t] = following
            if "final_obs" in infos:
                for lane in np.flatnonzero(infos["_final_obs"]):
                    final = np.clip((infos["final_obs"][lane] - norm.mean) / np.sqrt(norm.var + 1e-8), -10, 10)
                    next_rows[t, lane] = torch.as_tensor(final)
            rewards[t] = torch.as_tensor(reward)
            returns.add_(rewards[t])
            episode_reward[t] = returns
            terminated[t] = torch.as_tensor(term)
            truncated[t] = torch.as_tensor(trunc)
            over = terminated[t] | truncated[t]
            counts.add_(1)
            counts[over] = 0
            returns[over] = 0.0
            obs = following
        state["obs"] = obs
        return Stored(rows, step_count=step_count, episode_reward=episode_reward)

    return collect
