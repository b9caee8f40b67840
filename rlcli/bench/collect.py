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

from rlcli.bench import collect_loops as by_hand
from rlcli.bench import peers
from rlcli.bench.bare_envs import bare
from rlcli.bench.harness import Report, interleave, ratio
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
        _against_hand(report, settings, settings["env.id"], lanes, bar)
    _against_bare_and_peers(report, settings)
    _recurrent(report, settings)
    if continuous and not problems:
        for lanes in (1, 8):
            _against_hand(report, settings, continuous, lanes, ">= 1.0")
    if settings["envpool"]:
        _against_hand_on_envpool(report, settings)
    if settings["faces"]:
        _faces(report, settings)
    return report


# ---- ours ------------------------------------------------------------------------------------------------------
def _ours(
    env: EnvBase, pair: ActorCritic, frames: int, mode: str, policy: Any = None, states: Sequence[Key] = ()
) -> Callable[[], TensorDictBase]:
    observed = list(env.full_observation_spec.keys(True, True))
    keep = [*observed, *map(under_next, observed), *states, "action", "sample_log_prob", *FLAGS]
    collector = Collector(
        env, policy or pair.actor, frames_per_batch=frames, next_obs=mode, keep_keys=keep, seed=0, track_traj_ids=False
    )
    return collector.rollout


def _modes(label: str, make: Callable[[], EnvBase], pair: ActorCritic, frames: int, **options: Any) -> Sides:
    return {f"{label}: rlcli {mode}": _ours(make(), pair, frames, mode, **options) for mode in MODES}


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


def _envs(make: Callable[[], gym.Env], lanes: int) -> EnvBase:
    return SerialEnv(lanes, lambda: GymEnv(make(), categorical_action_encoding=True, narrow=True))


def _pair(env: EnvBase) -> ActorCritic:
    return build_actor_critic(env.observation_spec, env.action_spec, hidden=(64, 64), activation="tanh", generator=0)


# ---- comparisons -----------------------------------------------------------------------------------------------
def _against_hand(report: Report, settings: dict[str, Any], env_id: str, lanes: int, bar: str) -> None:
    make = GymRecipe(env_id).make
    steps = settings["frames_per_batch"] // lanes
    env = _envs(make, lanes)
    pair = _pair(env)
    label = f"{env_id} x{lanes}"
    hand = _hand(make, lanes, steps, pair, env)
    sides: Sides = {f"{label}: hand-written": hand} | _modes(label, lambda: _envs(make, lanes), pair, lanes * steps)
    _check(report, label, pair, sides[f"{label}: rlcli full"](), hand())
    _time(report, settings, sides, lanes * steps)
    report.ratios += [ratio(report.sides, f"{label}: hand-written", f"{label}: rlcli {mode}", bar) for mode in MODES]


def _hand(make, lanes: int, steps: int, pair: ActorCritic, env: EnvBase):
    net = pair.actor.module[0].module
    if isinstance(make().action_space, gym.spaces.Discrete):
        return by_hand.discrete(make, lanes, steps, net)
    mean, scale = (stage.module for stage in net)
    return by_hand.continuous(make, lanes, steps, mean, scale.value().detach())


def _against_hand_on_envpool(report: Report, settings: dict[str, Any]) -> None:
    """Count as a frame a step that an action took: rows that envpool's own face spends on resets are not."""
    env_id = settings["envpool"]
    if not has("envpool"):
        report.notes.append(f"envpool={env_id} is left out: it is not installed ({install('envpool')})")
        return
    for lanes in (8, 64, 512):
        steps = max(settings["frames_per_batch"] // lanes, 64)
        engine = EnvpoolEngine(env_id, lanes)
        pair = _pair(NativeEnv(engine, categorical_action_encoding=True))
        label = f"{env_id} of envpool x{lanes}"
        counted: list[torch.Tensor] = []
        hand = by_hand.pooled(env_id, lanes, steps, pair.actor.module[0].module)

        def collect(hand=hand, counted=counted) -> None:
            counted.append(hand()["counted"])

        sides: Sides = {f"{label}: hand-written": collect}
        sides |= _modes(label, partial(make_native, env_id, lanes, pool=True), pair, lanes * steps)
        _check(report, label, pair, sides[f"{label}: rlcli full"](), hand())
        timed = interleave(sides, settings["rounds"], warmup=2, per=lanes * steps)
        timed[0].per = round(float(torch.stack(counted).sum((1, 2)).double().mean()))
        report.sides += timed
        report.ratios += [ratio(timed, f"{label}: hand-written", f"{label}: rlcli {mode}", ">= 1.0") for mode in MODES]


def _against_bare_and_peers(report: Report, settings: dict[str, Any]) -> None:
    env_id, lanes = settings["env.id"], 8
    steps = settings["frames_per_batch"] // lanes
    make = GymRecipe(env_id).make
    env = _envs(make, lanes)
    pair = _pair(env)
    label = f"{env_id} x{lanes}, CPU time"
    sides: Sides = {f"{label}: bare envs": partial(bare(make, lanes), steps)}
    sides |= _modes(label, lambda: _envs(make, lanes), pair, lanes * steps)
    _time(report, settings, sides, lanes * steps, time.process_time)
    report.ratios += [ratio(report.sides, f"{label}: rlcli {mode}", f"{label}: bare envs", "<= 1.6") for mode in MODES]
    if not settings["peers"]:
        return
    label = f"{env_id} x{lanes}"
    alone = _ours(_envs(make, lanes), pair, lanes * steps, "full")
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=pair.critic)
    with_values = _ours(_envs(make, lanes), pair, lanes * steps, "exact")
    sides = {f"{label}: rlcli": alone, f"{label}: rlcli with values and GAE": lambda: advantage(with_values())}
    ours, ours_with_values = sides
    bars = {}  # SB3 also computes values and advantages, so ours does
    for name, make_peer, beside, bar in (
        ("torchrl Collector", peers.torchrl_collector, ours, ">= 20"),
        ("SB3 collect_rollouts", peers.sb3_collector, ours_with_values, ">= 4"),
    ):
        if side := report.peer(name.split()[0], make_peer, env_id, lanes, steps):
            sides[f"{label}: {name}"] = side
            bars[f"{label}: {name}"] = beside, bar
    _time(report, settings, sides, lanes * steps)
    report.ratios += [ratio(report.sides, name, *beside_and_bar) for name, beside_and_bar in bars.items()]


def _recurrent(report: Report, settings: dict[str, Any]) -> None:
    env_id, lanes = settings["env.id"], 8
    steps = settings["frames_per_batch"] // lanes
    make = GymRecipe(env_id).make
    env = _envs(make, lanes)
    pair = build_actor_critic(
        env.observation_spec, env.action_spec, hidden=(UNITS,), activation="tanh", shared=True, generator=0,
        recurrence=Recurrence("gru", UNITS),
    )  # fmt: skip
    trunk, head = pair.actor.module[:2]
    encoder, cells = trunk.module
    cell = nn.GRUCell(UNITS, UNITS)
    cell.load_state_dict({name.removesuffix("_l0"): weight for name, weight in cells.layers.state_dict().items()})
    label = f"{env_id} x{lanes}, a GRU of {UNITS}"
    hand = by_hand.recurrent(make, lanes, steps, encoder.module, cell, head.module)
    sides: Sides = {f"{label}: hand-written": hand}
    sides |= _modes(label, lambda: _envs(make, lanes), pair, lanes * steps, states=cells.state_keys)
    _check(report, label, pair, sides[f"{label}: rlcli full"](), hand())
    if side := report.peer("torchrl", peers.torchrl_recurrent_collector, env_id, lanes, steps, UNITS):
        sides[f"{label}: torchrl Collector"] = side
    _time(report, settings, sides, lanes * steps)
    for other, bar in (("hand-written", ">= 1.0"), ("torchrl Collector", ">= 10")):
        if f"{label}: {other}" in sides:
            report.ratios += [ratio(report.sides, f"{label}: {other}", f"{label}: rlcli {mode}", bar) for mode in MODES]


def _faces(report: Report, settings: dict[str, Any]) -> None:
    env_id, lanes = settings["env.id"], 8
    steps = settings["frames_per_batch"] // lanes
    make = GymRecipe(env_id).make
    pair = _pair(_envs(make, lanes))
    net = pair.actor.module[0].module
    label = f"{env_id} x{lanes}"
    # a closure hides the actor from us: it is called on a tensordict at every step
    hidden = _ours(_envs(make, lanes), pair, lanes * steps, "full", policy=lambda td: pair.actor(td))
    env = TransformedEnv(_envs(make, lanes), Compose(StepCounter(), RewardSum(), RunningNorm()))
    sides = {
        f"{label}: hand-written, again": by_hand.discrete(make, lanes, steps, net),
        f"{label}: rlcli, any tensordict policy": hidden,
        f"{label}: hand-written with bookkeeping": by_hand.with_bookkeeping(make, lanes, steps, net),
        f"{label}: rlcli with bookkeeping": _ours(env, pair, lanes * steps, "full"),
    }
    _time(report, settings, sides, lanes * steps)
    hand, ours, hand_kept, ours_kept = sides
    report.ratios.append(ratio(report.sides, hand, ours, ">= 0.6"))
    report.ratios.append(ratio(report.sides, hand_kept, ours_kept, ">= 0.9"))
    point = _envs(by_hand.Point, lanes)
    pair = _pair(point)
    mean, scale = (stage.module for stage in pair.actor.module[0].module)
    names: list[Any] = list(pair.actor.in_keys)  # in the order that the net takes them
    sides = {
        f"dict and box x{lanes}: hand-written": by_hand.dict_and_box(
            by_hand.Point, lanes, steps, mean, scale.value().detach(), names
        ),
        f"dict and box x{lanes}: rlcli": _ours(point, pair, lanes * steps, "full"),
    }
    _time(report, settings, sides, lanes * steps)
    hand, ours = sides
    report.ratios.append(ratio(report.sides, hand, ours, ">= 1.0"))


def _time(report: Report, settings: dict[str, Any], sides: dict, frames: int, clock=time.perf_counter) -> None:
    report.sides += interleave(sides, settings["rounds"], warmup=2, per=frames, clock=clock)


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
