"""From an env, a policy and where they run to the parts that the engine steps: decided once, before the first batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict.nn import InteractionType

from rlcli.collectors.devices import Placement
from rlcli.collectors.keep import ALWAYS, keeper
from rlcli.collectors.policies import on_device, on_tensordicts
from rlcli.collectors.programs import Program, RandomProgram, lower
from rlcli.collectors.recurrent_wiring import missing_transforms
from rlcli.collectors.tensordict_lanes import TensorDictLanes, array_face
from rlcli.collectors.weights import FollowedWeights
from rlcli.envs import EnvBase, TransformedEnv
from rlcli.envs.intervals import Interval
from rlcli.envs.lanes import Lanes
from rlcli.errors import ArgumentError
from rlcli.keys import POLICY_VERSION, REWARD, Key, as_tuple, under_next, unravel
from rlcli.transforms import Faces, NextObservationDelta, StepCounter, Transform, choose_faces
from rlcli.transforms.delta_codec import delta_key, kept_key, scale_key

EnvMaker = EnvBase | Callable[[], EnvBase]


@dataclass(frozen=True)
class Wired:
    """What one collector steps.

    Attributes
    ----------
    lanes : Lanes
        The env's array face, which steps the inner ones of `transforms` itself where one of them has no columns;
        `faces` says how each of the others is run.
    policy : callable or None
        What acts: the very object that was given, or a copy on its device (`is_copy`); `program` runs it.
    stored : callable
        Whether a key goes to the consumer.
    """

    lanes: Lanes
    transforms: list[Transform]
    faces: Faces
    policy: Any
    is_copy: bool
    weights: FollowedWeights
    program: Program
    random: RandomProgram
    stored: Callable[[Key], bool]


def make_env(create_env_fn: EnvMaker, kwargs: dict[str, Any] | None) -> EnvBase:
    """The env that was given, or one that is made.

    Raises
    ------
    ArgumentError
        Several envs.
    """
    if isinstance(create_env_fn, list | tuple):
        raise ArgumentError(
            f"a Collector steps one env, and got a list of {len(create_env_fn)}",
            fix="Put them together: SerialEnv(n, [make_env, ...]).",
        )
    return create_env_fn if isinstance(create_env_fn, EnvBase) else create_env_fn(**(kwargs or {}))


def with_transforms(env: EnvBase, policy: Any, max_frames_per_traj: int | None, auto: bool) -> EnvBase:
    """The env with the transforms that options and policy ask for.

    Raises
    ------
    ArgumentError
        A limit below 1.
    """
    if max_frames_per_traj is not None and max_frames_per_traj < 1:
        raise ArgumentError("max_frames_per_traj must be at least 1", why=f"got {max_frames_per_traj}")
    counted = isinstance(env, TransformedEnv) and any(isinstance(t, StepCounter) for t in env.transforms)
    extra: list[Transform] = [] if max_frames_per_traj is None or counted else [StepCounter()]
    if auto and policy is not None:
        extra += missing_transforms(env, policy)
    for transform in extra:
        env = TransformedEnv(env, transform)
    return env


def with_delta(
    env: EnvBase, mode: str, dtype: torch.dtype, on_overflow: str = "raise"
) -> tuple[EnvBase, NextObservationDelta | None]:
    """The env with its `NextObservationDelta`: its own, or in `delta` a new one on the outside; None in other modes."""
    own = delta_of(env)
    if own is not None or mode != "delta":
        return env, own
    added = NextObservationDelta(delta_dtype=dtype, on_overflow=on_overflow)
    return TransformedEnv(env, added), added


def delta_of(env: EnvBase) -> NextObservationDelta | None:
    """The `NextObservationDelta` among an env's transforms."""
    transforms = env.transforms if isinstance(env, TransformedEnv) else []
    return next((t for t in transforms if isinstance(t, NextObservationDelta)), None)


def wire(
    env: EnvBase,
    policy: Any,
    placement: Placement,
    *,
    exploration_type: InteractionType | None,
    keep_keys: Sequence[Key] | None,
    max_frames_per_traj: int | None,
) -> Wired:
    """See `Wired`.

    Raises
    ------
    ArgumentError
        The policy does not fit the env, or `keep_keys` names what no batch will hold.
    """
    lanes, transforms = array_face(env)
    if isinstance(lanes, TensorDictLanes) and placement.env not in (None, lanes.env.device or torch.device("cpu")):
        lanes.env.to(placement.env)
    lanes.limit_frames(max_frames_per_traj)  # may refuse; the engine gives it only to the episodes that it begins
    lanes.limit_frames(None)
    reward = {REWARD: ((1,), np.dtype(np.float32))}
    schema = dict(lanes.schema)
    for transform in transforms:
        schema |= transform.plan({**schema, **reward})
    random = RandomProgram(lanes.actions)
    program: Program = random
    used, is_copy, own = None, False, None
    if policy is not None:
        called = on_tensordicts(policy, list(schema))
        used, is_copy = on_device(called, placement.policy)
        own = used if called is policy else used.module  # type: ignore[union-attr]
        legal = partial(_legal, env, lanes.bounds.intervals)
        program = lower(used, lanes.actions, schema, env.batch_size, placement, exploration_type, legal)
        random = RandomProgram(lanes.actions, program.log_prob_key, program.log_prob_shape)
    faces = choose_faces(transforms, {**lanes.schema, **reward}, program.reads)
    if isinstance(lanes, TensorDictLanes) and lanes.rewards is not None:
        faces.needs.add(REWARD)
    known = [*schema, *map(under_next, schema), *program.live, *program.once, *random.once, *ALWAYS, POLICY_VERSION]
    own_delta = delta_of(env)
    parts = (delta_key, scale_key, kept_key)
    coded = {} if own_delta is None else {part(key): under_next(key) for key in own_delta.keys for part in parts}
    kept = None if keep_keys is None else [coded.get(as_tuple(key), key) for key in keep_keys]
    stored = keeper(kept, list(schema), known, program.states)
    weights = FollowedWeights(policy, own)
    everything = env.transforms if isinstance(env, TransformedEnv) else []
    return Wired(lanes, everything, faces, used, is_copy, weights, program, random, stored)


def _legal(env: EnvBase, intervals: dict[Key, Interval], key: Key, values: np.ndarray) -> np.ndarray:
    """`values` `[*batch, *shape]` if the env may show them under `key`, otherwise others that it may.

    Specs say what is legal; where one says nothing, the bounds that the env declares.
    """
    specs = {
        unravel(k): spec
        for full in (env.full_state_spec, env.full_observation_spec)
        for k, spec in full.items(True, True)
    }
    spec = specs[key].to("cpu") if key in specs else None
    given = torch.from_numpy(values)
    if spec is not None and tuple(spec.shape) == values.shape and not spec.is_in(given.to(spec.dtype)):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            return spec.rand().to(given.dtype).numpy()
    interval = intervals.get(key)
    if interval is not None and interval.shape == values.shape[len(env.batch_size) :] and not interval.holds(values):
        above = values + np.where(np.isfinite(interval.low), interval.low, 0)
        return np.clip(above, interval.low, interval.high).astype(values.dtype)
    return values
