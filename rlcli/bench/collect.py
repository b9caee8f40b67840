"""`rlcli bench collect`: our collector against hand-written loops, bare envs and other frameworks' collectors.

Every comparison is between sides that do the same work on the same env engine; the hand-written ones are in
`collect_loops.py`.  What each side stored is checked before anything is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import torch
from tensordict import TensorDictBase
from torch import nn
from torch.distributions import Categorical, Normal

from rlcli.bench import collect_loops as by_hand
from rlcli.bench import peers
from rlcli.bench.bare_envs import bare
from rlcli.bench.harness import Report, Side, interleave, ratio
from rlcli.bench.settings import env_problems
from rlcli.collectors import Collector
from rlcli.config.installed import has, install
from rlcli.envs import EnvBase, GymEnv, NativeEnv, SerialEnv, TransformedEnv, make_native
from rlcli.errors import ConfigError, NumericsError
from rlcli.keys import DONE, REWARD, TERMINATED, TRUNCATED, Key, under_next
from rlcli.modules import ActorCritic, build_actor_critic
from rlcli.modules.recurrent.modules import STATE, Recurrence
from rlcli.objectives.value import GAE
from rlcli.transforms import Compose, RewardSum, RunningNorm, StepCounter
from rlcli.vec_envs.make import GymRecipe
from rlcli.vec_envs.vector_backends import EnvpoolEngine

BARS = {1: ">= 1.2", 8: ">= 1.5", 64: ">= 1.2"}
UNITS = 64  # of the recurrent actor
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
    if settings["envpool"] and has("envpool"):
        engine = EnvpoolEngine(settings["envpool"], 1)
        spaces = engine.observation_space, engine.action_space
        engine.close()
        _check_spaces("envpool", settings["envpool"], *spaces, gym.spaces.Discrete)
    for lanes, bar in BARS.items():
        _against_hand(report, settings["env.id"], lanes, bar)
    _against_bare_and_peers(report, settings["env.id"])
    _recurrent(report, settings["env.id"])
    if continuous and not problems:
        for lanes in (1, 8):
            _against_hand(report, continuous, lanes, ">= 1.0")
    if settings["envpool"]:
        _against_hand_on_envpool(report, settings["envpool"])
    if settings["faces"]:
        _faces(report, settings["env.id"])
    return report


def _check_env(key: str, env_id: str, action: type[gym.Space]) -> None:
    """Raise ConfigError: the hand-written loops are for vectors and one kind of action."""
    env = GymRecipe(env_id).make()
    env.close()
    _check_spaces(key, env_id, env.observation_space, env.action_space, action)


def _check_spaces(key: str, env_id: str, seen: gym.Space, acted: gym.Space, action: type[gym.Space]) -> None:
    if not (isinstance(seen, gym.spaces.Box) and len(seen.shape) == 1 and isinstance(acted, action)):
        raise ConfigError(
            f"this bench cannot measure {env_id}",
            where=key,
            why=f"it needs a vector observed and {action.__name__} actions, and finds {seen} and {acted}",
        )


class _Case:
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


def _pair(env: EnvBase) -> ActorCritic:
    return build_actor_critic(env.observation_spec, env.action_spec, hidden=(64, 64), activation="tanh", generator=0)


# ---- comparisons -----------------------------------------------------------------------------------------------
def _against_hand(report: Report, env_id: str, lanes: int, bar: str) -> None:
    case = _Case(report, GymRecipe(env_id).make, f"{env_id} x{lanes}", lanes)
    pair = _pair(case.env())
    net = pair.actor.module[0].module
    if isinstance(case.make().action_space, gym.spaces.Discrete):
        hand = by_hand.drawn(case.make, lanes, case.steps, lambda obs: Categorical(logits=net(obs)))
    else:
        mean, scale = (stage.module for stage in net)
        std = scale.value().detach()
        hand = by_hand.drawn(case.make, lanes, case.steps, lambda obs: Normal(mean(obs), std))
    sides: Sides = {"hand-written": hand} | case.modes(pair)
    _check(report, case.label, pair, sides["rlcli full"](), hand())
    case.time(sides)
    for mode in MODES:
        case.ratio("hand-written", f"rlcli {mode}", bar)


def _against_hand_on_envpool(report: Report, env_id: str) -> None:
    """Count as a frame a step that an action took: rows that envpool's own face spends on resets are not."""
    if not has("envpool"):
        report.notes.append(f"envpool={env_id} is left out: it is not installed ({install('envpool')})")
        return
    for lanes in (8, 64, 512):
        case = _Case(report, GymRecipe(env_id).make, f"{env_id} of envpool x{lanes}", lanes, least=64)
        pair = _pair(NativeEnv(EnvpoolEngine(env_id, lanes), categorical_action_encoding=True))
        counted: list[torch.Tensor] = []
        hand = by_hand.pooled(env_id, lanes, case.steps, pair.actor.module[0].module)

        def collect(hand=hand, counted=counted) -> None:
            counted.append(hand()["counted"])

        sides: Sides = {"hand-written": collect}
        sides |= case.modes(pair, partial(make_native, env_id, lanes, pool=True))
        _check(report, case.label, pair, sides["rlcli full"](), hand())
        by_loop, *_ = case.time(sides)
        by_loop.per = round(float(torch.stack(counted).sum((1, 2)).double().mean()))
        for mode in MODES:
            case.ratio("hand-written", f"rlcli {mode}", ">= 1.0")


def _against_bare_and_peers(report: Report, env_id: str) -> None:
    case = _Case(report, GymRecipe(env_id).make, f"{env_id} x8, CPU time", 8)
    pair = _pair(case.env())
    case.time({"bare envs": partial(bare(case.make, 8), case.steps)} | case.modes(pair), time.process_time)
    for mode in MODES:
        case.ratio(f"rlcli {mode}", "bare envs", "<= 1.6")
    if not report.settings["peers"]:
        return
    case = _Case(report, case.make, f"{env_id} x8", 8)
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


def _recurrent(report: Report, env_id: str) -> None:
    case = _Case(report, GymRecipe(env_id).make, f"{env_id} x8, a GRU of {UNITS}", 8)
    env = case.env()
    pair = build_actor_critic(
        env.observation_spec, env.action_spec, hidden=(UNITS,), activation="tanh", shared=True, generator=0,
        recurrence=Recurrence("gru", UNITS),
    )  # fmt: skip
    trunk, head = pair.actor.module[:2]
    encoder, cells = trunk.module
    cell = nn.GRUCell(UNITS, UNITS)
    cell.load_state_dict({name.removesuffix("_l0"): weight for name, weight in cells.layers.state_dict().items()})
    hand = by_hand.recurrent(case.make, 8, case.steps, encoder.module, cell, head.module)
    sides: Sides = {"hand-written": hand} | case.modes(pair, states=cells.state_keys)
    _check(report, case.label, pair, sides["rlcli full"](), hand())
    if side := report.peer("torchrl", peers.torchrl_recurrent_collector, env_id, 8, case.steps, UNITS):
        sides["torchrl Collector"] = side
    case.time(sides)
    for other, bar in (("hand-written", ">= 1.0"), ("torchrl Collector", ">= 10")):
        for mode in MODES if other in sides else ():
            case.ratio(other, f"rlcli {mode}", bar)


def _faces(report: Report, env_id: str) -> None:
    case = _Case(report, GymRecipe(env_id).make, f"{env_id} x8", 8)
    pair = _pair(case.env())
    net = pair.actor.module[0].module
    env = TransformedEnv(case.env(), Compose(StepCounter(), RewardSum(), RunningNorm()))
    hand, ours, hand_kept, ours_kept = (
        "hand-written, again", "rlcli, any tensordict policy", "hand-written with bookkeeping", "rlcli with bookkeeping"
    )  # fmt: skip
    case.time({
        hand: by_hand.drawn(case.make, 8, case.steps, lambda obs: Categorical(logits=net(obs))),
        # a closure hides the actor from us: it is called on a tensordict at every step
        ours: case.ours(pair, "full", policy=lambda td: pair.actor(td)),
        hand_kept: by_hand.with_bookkeeping(case.make, 8, case.steps, net),
        ours_kept: case.ours(pair, "full", env),
    })  # fmt: skip
    case.ratio(hand, ours, ">= 0.6")
    case.ratio(hand_kept, ours_kept, ">= 0.9")
    case = _Case(report, by_hand.Point, "dict and box x8", 8)
    point = _pair(case.env())
    mean, scale = (stage.module for stage in point.actor.module[0].module)
    names: list[Any] = list(point.actor.in_keys)  # in the order that the net takes them
    by_point = by_hand.dict_and_box(by_hand.Point, 8, case.steps, mean, scale.value().detach(), names)
    case.time({"hand-written": by_point, "rlcli": case.ours(point, "full")})
    case.ratio("hand-written", "rlcli", ">= 1.0")


# ---- what was stored is right ----------------------------------------------------------------------------------
def _check(report: Report, label: str, pair: ActorCritic, ours: TensorDictBase, hand: dict) -> None:
    """Check both sides: rows follow each other, log-probabilities are those of the stored actions."""
    stored = {
        "obs": ours["observation"].transpose(0, 1),
        "next_obs": ours["next", "observation"].transpose(0, 1),
        "action": ours["action"].transpose(0, 1),
        "log_prob": ours["sample_log_prob"].T,
        "over": ours["next", "done"].squeeze(-1).T,
    }
    if "state" in hand:
        stored["state"] = ours[STATE].squeeze(2).transpose(0, 1)
    by_loop = {**hand, "over": hand["terminated"] | hand["truncated"]}
    for name, side in (("rlcli", stored), ("hand-written", by_loop)):
        inside = ~side["over"][:-1]
        if not torch.equal(side["next_obs"][:-1][inside], side["obs"][1:][inside]):
            raise NumericsError(f"{name} stored rows that do not follow each other", where=label)
        with torch.no_grad():
            td = ours.select().reshape(-1)[:0].new_empty(side["obs"].shape[:2]).set("observation", side["obs"])
            if "state" in side:
                td.set(STATE, side["state"].unsqueeze(2))
                _check_states(report, f"{label}, {name}", pair.actor.module[0](td.copy())["next", STATE], side)
            law = pair.actor.get_dist(td)
            gap = float((law.log_prob(side["action"]) - side["log_prob"]).abs().max())
        report.checks[f"{label}, {name}: log-probabilities of the stored actions"] = f"largest difference {gap:.1e}"
        if gap > 1e-4:
            raise NumericsError(f"{name} stored wrong log-probabilities", where=label, why=f"off by {gap:.1e}")


def _check_states(report: Report, label: str, written: torch.Tensor, side: dict) -> None:
    """Check that each step's state is what the step before wrote, `[T, N, 1, H]`, or zero at starts."""
    expected = torch.where(side["over"][..., None], 0.0, written.squeeze(2))[:-1]
    gap = float((expected - side["state"][1:]).abs().max())
    report.checks[f"{label}: stored states"] = f"largest difference {gap:.1e}"
    if gap > 1e-4:
        raise NumericsError("stored states do not follow each other", where=label, why=f"off by {gap:.1e}")
