"""`python -m tests.bench actors`: collecting with other policies and envs than `rlcli bench collect` does.

A recurrent actor, any tensordict policy, bookkeeping, dict observations, and envs of envpool; the hand-written loops
stand below.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict
from torch import nn
from torch.distributions import Categorical, Distribution, Normal

from rlcli.bench.collect import MODES, Case, Sides, check, check_spaces, pair_of
from rlcli.bench.collect_loops import Stored, drawn, empty
from rlcli.bench.harness import Report
from rlcli.config.installed import has, install
from rlcli.envs import NativeEnv, TransformedEnv, make_native
from rlcli.errors import NumericsError
from rlcli.modules import build_actor_critic
from rlcli.modules.recurrent.modules import STATE, Recurrence
from rlcli.transforms import Compose, RewardSum, RunningNorm, StepCounter
from rlcli.vec_envs.make import GymRecipe
from rlcli.vec_envs.vector_backends import EnvpoolEngine
from tests.bench.peers.collecting import torchrl_recurrent_collector

UNITS = 64  # of the recurrent actor


def measure(settings: dict[str, Any]) -> Report:
    """Run all comparisons in turn; within each the sides take turns."""
    report = Report("actors", settings, unit="frame")
    if settings["envpool"] and has("envpool"):
        engine = EnvpoolEngine(settings["envpool"], 1)
        spaces = engine.observation_space, engine.action_space
        engine.close()
        check_spaces("envpool", settings["envpool"], *spaces, gym.spaces.Discrete)
    _recurrent(report, settings["env.id"])
    if settings["envpool"]:
        _against_hand_on_envpool(report, settings["envpool"])
    _faces(report, settings["env.id"])
    return report


def _against_hand_on_envpool(report: Report, env_id: str) -> None:
    """Count as a frame a step that an action took: rows that envpool's own face spends on resets are not."""
    if not has("envpool"):
        report.notes.append(f"envpool={env_id} is left out: it is not installed ({install('envpool')})")
        return
    for lanes in (8, 64, 512):
        case = Case(report, GymRecipe(env_id).make, f"{env_id} of envpool x{lanes}", lanes, least=64)
        pair = pair_of(NativeEnv(EnvpoolEngine(env_id, lanes), categorical_action_encoding=True))
        counted: list[torch.Tensor] = []
        hand = pooled(env_id, lanes, case.steps, pair.actor.module[0].module)

        def collect(hand=hand, counted=counted) -> None:
            counted.append(hand()["counted"])

        sides: Sides = {"hand-written": collect}
        sides |= case.modes(pair, partial(make_native, env_id, lanes, pool=True))
        check(report, case.label, pair, sides["rlcli full"](), hand())
        by_loop, *_ = case.time(sides)
        by_loop.per = round(float(torch.stack(counted).sum((1, 2)).double().mean()))
        for mode in MODES:
            case.ratio("hand-written", f"rlcli {mode}", ">= 1.0")


def _recurrent(report: Report, env_id: str) -> None:
    case = Case(report, GymRecipe(env_id).make, f"{env_id} x8, a GRU of {UNITS}", 8)
    env = case.env()
    pair = build_actor_critic(
        env.observation_spec, env.action_spec, hidden=(UNITS,), activation="tanh", shared=True, generator=0,
        recurrence=Recurrence("gru", UNITS),
    )  # fmt: skip
    trunk, head = pair.actor.module[:2]
    encoder, cells = trunk.module
    cell = nn.GRUCell(UNITS, UNITS)
    cell.load_state_dict({name.removesuffix("_l0"): weight for name, weight in cells.layers.state_dict().items()})
    hand = recurrent(case.make, 8, case.steps, encoder.module, cell, head.module)
    sides: Sides = {"hand-written": hand} | case.modes(pair, states=cells.state_keys)
    checked = check(report, case.label, pair, sides["rlcli full"](), hand(), also={"state": STATE})
    for name, side in checked.items():
        td = TensorDict({"observation": side["obs"], STATE: side["state"]}, side["obs"].shape[:2])
        with torch.no_grad():
            _check_states(report, f"{case.label}, {name}", pair.actor.module[0](td)["next", STATE], side)
    if side := report.peer("torchrl", torchrl_recurrent_collector, env_id, 8, case.steps, UNITS):
        sides["torchrl Collector"] = side
    case.time(sides)
    for other, bar in (("hand-written", ">= 1.0"), ("torchrl Collector", ">= 10")):
        for mode in MODES if other in sides else ():
            case.ratio(other, f"rlcli {mode}", bar)


def _faces(report: Report, env_id: str) -> None:
    case = Case(report, GymRecipe(env_id).make, f"{env_id} x8", 8)
    pair = pair_of(case.env())
    net = pair.actor.module[0].module
    env = TransformedEnv(case.env(), Compose(StepCounter(), RewardSum(), RunningNorm()))
    hand, ours, hand_kept, ours_kept = (
        "hand-written, again", "rlcli, any tensordict policy", "hand-written with bookkeeping", "rlcli with bookkeeping"
    )  # fmt: skip
    case.time({
        hand: drawn(case.make, 8, case.steps, lambda obs: Categorical(logits=net(obs))),
        # a closure hides the actor from us: it is called on a tensordict at every step
        ours: case.ours(pair, "full", policy=lambda td: pair.actor(td)),
        hand_kept: with_bookkeeping(case.make, 8, case.steps, net),
        ours_kept: case.ours(pair, "full", env),
    })  # fmt: skip
    case.ratio(hand, ours, ">= 0.6")
    case.ratio(hand_kept, ours_kept, ">= 0.9")
    case = Case(report, Point, "dict and box x8", 8)
    point = pair_of(case.env())
    mean, scale = (stage.module for stage in point.actor.module[0].module)
    names: list[Any] = list(point.actor.in_keys)  # in the order that the net takes them
    by_point = dict_and_box(Point, 8, case.steps, mean, scale.value().detach(), names)
    case.time({"hand-written": by_point, "rlcli": case.ours(point, "full")})
    case.ratio("hand-written", "rlcli", ">= 1.0")


def _check_states(report: Report, label: str, written: torch.Tensor, side: dict) -> None:
    """Check that each step's state is what the step before wrote, `[T, N, 1, H]`, or zero at starts."""
    expected = torch.where(side["over"][..., None, None], 0.0, written)[:-1]
    gap = float((expected - side["state"][1:]).abs().max())
    report.checks[f"{label}: stored states"] = f"largest difference {gap:.1e}"
    if gap > 1e-4:
        raise NumericsError("stored states do not follow each other", where=label, why=f"off by {gap:.1e}")


# ---- by hand ---------------------------------------------------------------------------------------------------------
def pooled(env_id: str, lanes: int, steps: int, net: nn.Module, seed: int = 0) -> Callable[[], Stored]:
    """Collect on envpool's public face, which spends a row on every reset: `counted` marks the others."""
    import envpool

    pool = envpool.make_gymnasium(env_id, num_envs=lanes, seed=seed)
    state = {"obs": torch.from_numpy(pool.reset()[0]), "over": torch.zeros(lanes, dtype=torch.bool)}
    width = pool.single_observation_space.shape

    def collect() -> Stored:
        rows = empty(steps, lanes, width)
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
    """Collect discrete actions with a memory: each step's state `[T, N, 1, H]`, zero where an episode begins."""
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
        return Stored(collect(), state=torch.stack(states).unsqueeze(2))

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
