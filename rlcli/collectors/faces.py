"""Faces: which parts of a collector run on columns, which on TensorDicts, and why (`rlcli show --components`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlcli.collectors.actors.actor import FastActor, RandomActor
from rlcli.collectors.actors.tensordict import TensorDictActor
from rlcli.collectors.wiring import Wired, transforms_of
from rlcli.envs import EnvBase, TransformedEnv
from rlcli.envs.base import own_methods
from rlcli.envs.serial import BatchedEnv
from rlcli.keys import show
from rlcli.modules.head import StateIndependentScale
from rlcli.modules.masks import LogitMask
from rlcli.modules.stages import Stage
from rlcli.transforms import Transform

OURS = "stepped directly"
IN_STEP = "TensorDicts, in the env's own step"
TORCH = "the collector's torch stream, one for all envs"
LANES = "one stream per env, from the run's seed"


@dataclass(frozen=True)
class Face:
    """Describe how one `part` of a collector runs, and why."""

    part: str  # "env", "transform", "policy", "noise" or "update"
    name: str
    runs: str  # on columns or TensorDicts, and when; of noise, the stream it is drawn from
    why: str


def faces_of(env: EnvBase, wired: Wired) -> list[Face]:
    """Say how all parts run: env, transforms from the innermost on, the policy's stages, noise."""
    return [_env(env, wired), *_transforms(env, wired), *_policy(wired), *_noise(wired)]


def _env(env: EnvBase, wired: Wired) -> Face:
    base = env
    while isinstance(base, TransformedEnv) and not own_methods(base):
        base = base.base_env
    if not wired.vec_env.on_tensordicts:
        return Face("env", wired.vec_env.name, "columns", OURS)
    name = getattr(getattr(base, "vec_env", None), "name", type(base).__name__)
    return Face("env", name, "TensorDicts", _odd_env(base) or _odd_transform(env) or "it steps TensorDicts")


def _odd_env(env: EnvBase) -> str:
    """Say why an env has no array path; nothing where it has one."""
    vec_env = getattr(env, "vec_env", None)
    if isinstance(env, BatchedEnv) and vec_env is None:
        inner = env.envs[0]
        return _odd_env(inner) or f"its envs are of {type(inner).__name__}, each with what lies on it"
    if vec_env is None:
        return f"{type(env).__name__} steps TensorDicts"
    overrides = own_methods(env)
    return f"{type(env).__name__} has its own {', '.join(overrides)}" if overrides else ""


def _odd_transform(env: EnvBase) -> str:
    odd = list(dict.fromkeys(type(t).__name__ for t in transforms_of(env) if not t.has_columns))
    return f"{' and '.join(odd)} on it may read any key" if odd else ""


def _transforms(env: EnvBase, wired: Wired) -> Iterator[Face]:
    plan = wired.plan
    for transform in transforms_of(env):
        name = type(transform).__name__
        if transform in plan.inside:
            yield Face("transform", name, "columns, in the loop", _in_the_loop(transform))
        elif transform in plan.after:
            yield Face("transform", name, "columns, after the batch", "nothing in the loop uses what it writes")
        elif transform.has_columns:
            yield Face("transform", name, IN_STEP, "the env or another transform steps TensorDicts")
        else:
            overrides = ", ".join(transform.own_methods) or "part"
            yield Face("transform", name, IN_STEP, f"it overrides {overrides}")


def _in_the_loop(transform: Transform) -> str:
    if transform.ends_episodes:
        return "it ends episodes"
    if not transform.has_batch_pass:
        return "it has no pass over whole batches"
    return "the policy, or a transform in the loop, uses what it reads or writes"


def _policy(wired: Wired) -> Iterator[Face]:
    actor = wired.actor
    if isinstance(actor, TensorDictActor):
        yield Face("policy", _class(actor.policy), "TensorDicts, called every step", actor.why)
    elif isinstance(actor, FastActor):
        place = actor.setting.placement
        if place.policy_is_elsewhere:
            names = ", ".join(_stage(stage) for stage in actor.function.stages)
            yield Face("policy", names, f"columns, a graph a step on {place.policy}", "all that it calls is known")
        for stage, layers, cells in (
            () if place.policy_is_elsewhere else zip(actor.function.stages, actor.layers, actor.cells, strict=True)
        ):
            if cells is not None:
                yield Face("policy", _stage(stage), "columns, in numpy", "recurrent layers, one step in numpy")
            elif layers is not None:
                yield Face("policy", _stage(stage), "columns, in numpy", "plain layers, as numpy products")
            elif stage.is_plain(LogitMask) and not actor.calls:
                yield Face("policy", _stage(stage), "columns, in numpy", "an action mask")
            elif stage.is_plain(StateIndependentScale) and not actor.calls:
                yield Face("policy", _stage(stage), "columns, once per batch", "it is the same at every step")
            else:
                known = stage.layers or (stage.state_keys and stage.cells) or stage.only_reads
                why = f"{_class(stage.module)} is not a plain stack of layers, so it is not run in numpy"
                why = "a module of the policy is called, and so are all" if known and actor.calls else why
                yield Face("policy", _stage(stage), "columns, called every step", why)
        family = type(actor.function.family).__name__.removesuffix("Family")
        keys = ", ".join(map(show, actor.function.param_keys))
        drawn = "deterministic actions" if actor.mode else "drawn in numpy"
        yield Face("policy", f"{family} of {keys}", f"columns, {drawn}", "a known distribution")
    else:
        yield Face("policy", "random actions", "columns, for a batch at once", "there is no policy")


def _noise(wired: Wired) -> Iterator[Face]:
    """Say where random numbers come from, a line a stream."""
    actor = wired.actor
    unknown = ["the env"] if wired.vec_env.on_tensordicts else []
    if isinstance(actor, TensorDictActor):
        unknown.insert(0, "the policy")
    elif actor.calls:
        unknown.insert(0, "the policy's called stages")
    drawn = isinstance(actor, RandomActor) or (isinstance(actor, FastActor) and not actor.mode)
    if drawn:
        what = "random actions" if isinstance(actor, RandomActor) else "the policy's draws"
        yield Face("noise", what, LANES, "the number of draws is known")
    if unknown:
        yield Face("noise", " and ".join(unknown), TORCH, "the number of draws is not known")
    if not drawn and not unknown:
        yield Face("noise", "none", "none", "deterministic actions")


def _stage(stage: Stage) -> str:
    return f"{', '.join(map(show, stage.in_keys))} -> {', '.join(map(show, stage.out_keys))}"


def _class(part: object) -> str:
    return getattr(part, "__qualname__", None) or type(part).__name__
