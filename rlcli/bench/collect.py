"""`rlcli bench collect`: our collector against hand-written loops, bare envs and other frameworks' collectors.

Every comparison is between sides that do the same work on the same env engine; the hand-written ones are in
`collect_loops.py`.  What each side stored is checked before anything is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import gymnasium as gym
import torch
from tensordict import TensorDictBase
from torch.distributions import Categorical, Normal

from rlcli.bench import collect_loops as by_hand
from rlcli.bench import peers
from rlcli.bench.bare_envs import bare
from rlcli.bench.harness import Report, Side, interleave, ratio
from rlcli.bench.settings import env_problems
from rlcli.collectors import Collector
from rlcli.envs import EnvBase, GymEnv, SerialEnv
from rlcli.errors import ConfigError, NumericsError
from rlcli.keys import DONE, REWARD, TERMINATED, TRUNCATED, Key, under_next
from rlcli.modules import ActorCritic, build_actor_critic
from rlcli.objectives.value import GAE
from rlcli.vec_envs.make import GymRecipe

BARS = {1: ">= 1.2", 8: ">= 1.5", 64: ">= 1.2"}
FLAGS = [REWARD, DONE, TERMINATED, TRUNCATED]
MODES = ("full", "exact")
Sides = dict[str, Callable[[], Any]]


def measure(settings: dict[str, Any]) -> Report:
    """Run all comparisons in turn; within each the sides take turns."""
    report = Report("collect", settings, unit="frame")
    _check_env("env.id", settings["env.id"], gym.spaces.Discrete)
    continuous = settings["continuous"]
    if continuous and (problems := env_problems(continuous)):
        report.notes.append(f"continuous={continuous} is left out: {problems[0]}")
    elif continuous:
        _check_env("continuous", continuous, gym.spaces.Box)
    for lanes, bar in BARS.items():
        _against_hand(report, settings["env.id"], lanes, bar)
    _against_bare_and_peers(report, settings["env.id"])
    if continuous and not problems:
        for lanes in (1, 8):
            _against_hand(report, continuous, lanes, ">= 1.0")
    return report


def _check_env(key: str, env_id: str, action: type[gym.Space]) -> None:
    """Raise ConfigError: the hand-written loops are for vectors and one kind of action."""
    env = GymRecipe(env_id).make()
    env.close()
    check_spaces(key, env_id, env.observation_space, env.action_space, action)


def check_spaces(key: str, env_id: str, seen: gym.Space, acted: gym.Space, action: type[gym.Space]) -> None:
    if not (isinstance(seen, gym.spaces.Box) and len(seen.shape) == 1 and isinstance(acted, action)):
        raise ConfigError(
            f"this bench cannot measure {env_id}",
            where=key,
            why=f"it needs a vector observed and {action.__name__} actions, and finds {seen} and {acted}",
        )


class Case:
    """One kind of env, `lanes` of it stepped in this process by every side, whose names stand behind a label."""

    def __init__(self, report: Report, make: Callable[[], gym.Env], label: str, lanes: int, least: int = 1) -> None:
        self.report, self.make, self.label, self.lanes = report, make, label, lanes
        self.steps = max(report.settings["frames_per_batch"] // lanes, least)
        self.frames = lanes * self.steps

    def env(self) -> EnvBase:
        return SerialEnv(self.lanes, lambda: GymEnv(self.make(), categorical_action_encoding=True, narrow=True))

    def ours(
        self, pair: ActorCritic, mode: str, env: EnvBase | None = None, policy: Any = None, states: Sequence[Key] = ()
    ) -> Callable[[], TensorDictBase]:
        env = self.env() if env is None else env
        observed = list(env.full_observation_spec.keys(True, True))
        keep = [*observed, *map(under_next, observed), *states, "action", "sample_log_prob", *FLAGS]
        collector = Collector(
            env, policy or pair.actor, frames_per_batch=self.frames, next_obs=mode, keep_keys=keep, seed=0,
            track_traj_ids=False,
        )  # fmt: skip
        return collector.rollout

    def modes(self, pair: ActorCritic, make: Callable[[], EnvBase] | None = None, **options: Any) -> Sides:
        return {f"rlcli {mode}": self.ours(pair, mode, (make or self.env)(), **options) for mode in MODES}

    def time(self, sides: Sides, clock: Callable[[], float] = time.perf_counter) -> list[Side]:
        named = {f"{self.label}: {name}": side for name, side in sides.items()}
        timed = interleave(named, self.report.settings["rounds"], warmup=2, per=self.frames, clock=clock)
        self.report.sides += timed
        return timed

    def ratio(self, over: str, under: str, bar: str) -> None:
        measured = ratio(self.report.sides, f"{self.label}: {over}", f"{self.label}: {under}", bar)
        self.report.ratios.append(measured)


def pair_of(env: EnvBase) -> ActorCritic:
    return build_actor_critic(env.observation_spec, env.action_spec, hidden=(64, 64), activation="tanh", generator=0)


# ---- comparisons -----------------------------------------------------------------------------------------------
def _against_hand(report: Report, env_id: str, lanes: int, bar: str) -> None:
    case = Case(report, GymRecipe(env_id).make, f"{env_id} x{lanes}", lanes)
    pair = pair_of(case.env())
    net = pair.actor.module[0].module
    if isinstance(case.make().action_space, gym.spaces.Discrete):
        hand = by_hand.drawn(case.make, lanes, case.steps, lambda obs: Categorical(logits=net(obs)))
    else:
        mean, scale = (stage.module for stage in net)
        std = scale.value().detach()
        hand = by_hand.drawn(case.make, lanes, case.steps, lambda obs: Normal(mean(obs), std))
    sides: Sides = {"hand-written": hand} | case.modes(pair)
    check(report, case.label, pair, sides["rlcli full"](), hand())
    case.time(sides)
    for mode in MODES:
        case.ratio("hand-written", f"rlcli {mode}", bar)


def _against_bare_and_peers(report: Report, env_id: str) -> None:
    case = Case(report, GymRecipe(env_id).make, f"{env_id} x8, CPU time", 8)
    pair = pair_of(case.env())
    case.time({"bare envs": partial(bare(case.make, 8), case.steps)} | case.modes(pair), time.process_time)
    for mode in MODES:
        case.ratio(f"rlcli {mode}", "bare envs", "<= 1.6")
    if not report.settings["peers"]:
        return
    case = Case(report, case.make, f"{env_id} x8", 8)
    ours, ours_with_values = "rlcli", "rlcli with values and GAE"
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=pair.critic)
    alone, with_values = case.ours(pair, "full"), case.ours(pair, "exact")
    sides: Sides = {ours: alone, ours_with_values: lambda: advantage(with_values())}
    others = {  # SB3 also computes values and advantages, so ours does
        "torchrl Collector": (peers.torchrl_collector, ours, ">= 20"),
        "SB3 collect_rollouts": (peers.sb3_collector, ours_with_values, ">= 4"),
    }
    for name, (make, _, _) in others.items():
        if side := report.peer(name.split()[0], make, env_id, 8, case.steps):
            sides[name] = side
    case.time(sides)
    for name in (name for name in others if name in sides):
        case.ratio(name, *others[name][1:])


# ---- what was stored is right ----------------------------------------------------------------------------------
def check(
    report: Report,
    label: str,
    pair: ActorCritic,
    ours: TensorDictBase,
    hand: dict,
    also: Mapping[str, Key] = MappingProxyType({}),
) -> dict[str, dict]:
    """Check both sides: rows follow each other, log-probabilities are those of the stored actions; return them.

    `also`: what the actor reads beside observations, by its name in `hand`.
    """
    stored = {
        "obs": ours["observation"].transpose(0, 1),
        "next_obs": ours["next", "observation"].transpose(0, 1),
        "action": ours["action"].transpose(0, 1),
        "log_prob": ours["sample_log_prob"].T,
        "over": ours["next", "done"].squeeze(-1).T,
        **{name: ours[key].transpose(0, 1) for name, key in also.items()},
    }
    by_loop = {**hand, "over": hand["terminated"] | hand["truncated"]}
    sides = {"rlcli": stored, "hand-written": by_loop}
    for name, side in sides.items():
        inside = ~side["over"][:-1]
        if not torch.equal(side["next_obs"][:-1][inside], side["obs"][1:][inside]):
            raise NumericsError(f"{name} stored rows that do not follow each other", where=label)
        with torch.no_grad():
            td = ours.select().reshape(-1)[:0].new_empty(side["obs"].shape[:2]).set("observation", side["obs"])
            for key_here, key in also.items():
                td.set(key, side[key_here])
            law = pair.actor.get_dist(td)
            gap = float((law.log_prob(side["action"]) - side["log_prob"]).abs().max())
        report.checks[f"{label}, {name}: log-probabilities of the stored actions"] = f"largest difference {gap:.1e}"
        if gap > 1e-4:
            raise NumericsError(f"{name} stored wrong log-probabilities", where=label, why=f"off by {gap:.1e}")
    return sides
