"""From an env, a policy and where they run to the parts that the engine steps: decided once, before the first batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from rlcli.arguments import refuse
from rlcli.collectors.actors.actor import ActorRunner, PolicyContext, RandomActor, States, no_place
from rlcli.collectors.actors.which_actor import choose_actor
from rlcli.collectors.devices import Placement, on_device, same_device
from rlcli.collectors.options import CollectorOptions
from rlcli.collectors.schema import ALWAYS, RowSchema, refuse_unknown, schema_of
from rlcli.data.next_obs.modes import KEEPS
from rlcli.envs import EnvBase, GymEnv, TransformedEnv
from rlcli.envs.base import own_methods
from rlcli.envs.mdp import on_tensordicts
from rlcli.envs.serial import BatchedEnv
from rlcli.envs.spaces import ACTIONS, action_format, drawn_alike, from_gym_space
from rlcli.envs.transformed import keys_of, transforms_on, with_policy_transforms, written_states
from rlcli.errors import ArgumentError
from rlcli.keys import IS_INIT, REWARD, Key, as_tuple, delta_key, kept_key, scale_key, show, under_next, unravel
from rlcli.modules.masks import mask_key_of
from rlcli.specs import Composite
from rlcli.specs.field import CODED, ROW, SPARSE, Field, Fields
from rlcli.transforms.base import Transform, planned
from rlcli.transforms.compose import Compose, Faces, choose_faces
from rlcli.transforms.primer import TensorDictPrimer, state_keys
from rlcli.vec_envs.actions import ActionFormat
from rlcli.vec_envs.vec_env import VecEnv

if TYPE_CHECKING:
    from rlcli.transforms.next_observation_delta import NextObservationDelta

EnvMaker = EnvBase | Callable[[], EnvBase] | str


@dataclass(frozen=True)
class Wired:
    env: EnvBase  # with all of its transforms
    vec_env: VecEnv
    transforms: list[Transform]
    plan: Faces
    policy: Any
    own: Any  # the part of `policy` of the kind that was given: the object, or a copy on its device
    actor: ActorRunner
    random: RandomActor
    mask_key: Key | None  # the observation that says which actions are allowed
    schema: RowSchema
    live: Fields  # what has a row at every step
    states: States


def make_env(create_env_fn: EnvMaker, kwargs: dict[str, Any] | None) -> EnvBase:
    """Return the env that was given, or one that is made; a name is gymnasium's."""
    if isinstance(create_env_fn, list | tuple):
        raise ArgumentError(
            f"a Collector steps one env, and got a list of {len(create_env_fn)}",
            fix="Put them together: SerialEnv(n, [make_env, ...]).",
        )
    if isinstance(create_env_fn, EnvBase):
        refuse(kwargs, "create_env_kwargs is for what makes an env, and create_env_fn is one already",
               why=f"it names {', '.join(kwargs or ())}",
               fix="Give a function or a name as create_env_fn.")  # fmt: skip
        return create_env_fn
    if isinstance(create_env_fn, str):
        return GymEnv(create_env_fn, **(kwargs or {}))
    made = create_env_fn(**(kwargs or {})) if callable(create_env_fn) else create_env_fn
    refuse(not isinstance(made, EnvBase), "create_env_fn gives no env of rlcli's",
           why=f"it gives a {type(made).__name__}",
           fix="Wrap a gymnasium env, GymEnv(env), or give its name.")  # fmt: skip
    return made


def with_transforms(
    env: EnvBase, policy: Any, options: CollectorOptions
) -> tuple[EnvBase, NextObservationDelta | None, str]:
    """Return the env with what options and policy ask for, its `NextObservationDelta`, and the mode of next values."""
    most = options.max_frames_per_traj
    if most is not None:
        from rlcli.transforms.counters import StepCounter

        if not any(isinstance(t, StepCounter) for t in transforms_of(env)):
            env = TransformedEnv(env, StepCounter())
    if policy is not None and options.auto_register_policy_transforms:
        env = with_policy_transforms(env, policy)
    delta, transforms = None, transforms_on(env)
    if transforms or KEEPS[options.next_obs_mode()] == CODED:
        from rlcli.transforms.next_observation_delta import NextObservationDelta

        delta = next((t for t in transforms if isinstance(t, NextObservationDelta)), None)
    mode = options.next_obs_mode(delta is not None)
    if delta is None and KEEPS[mode] == CODED:
        delta = NextObservationDelta(delta_dtype=options.delta_dtype, on_overflow=options.on_overflow)
        env = TransformedEnv(env, delta)
    return env, delta, mode


def transforms_of(env: EnvBase) -> Iterator[Transform]:
    """Iterate over the transforms of an env and of those inside it, innermost first."""
    if isinstance(env, TransformedEnv):
        yield from transforms_of(env.base_env)
        yield from env.transforms
    elif isinstance(env, BatchedEnv) and env.envs:
        yield from transforms_of(env.envs[0])


def array_path(env: EnvBase) -> tuple[VecEnv, list[Transform]]:
    """Return the env's `VecEnv`, and the transforms that still run on its rows, innermost first."""
    if not isinstance(env, TransformedEnv) or own_methods(env):
        vec_env = getattr(env, "vec_env", None)
        return (vec_env if isinstance(vec_env, VecEnv) and not own_methods(env) else _on_tensordicts(env)), []
    base, transforms = env.base_env, env.transforms
    if not isinstance(base, TransformedEnv) and all(t.has_columns for t in transforms):
        vec_env, _ = array_path(base)
        if not vec_env.on_tensordicts:
            return vec_env, transforms
    transforms, late = _apart(transforms)
    inside = next((at for at, t in enumerate(transforms) if t.outside_batches), len(transforms))
    for transform in transforms[inside:]:
        if not transform.has_columns:
            name = type(transforms[inside]).__name__
            refuse(transform is transforms[inside],
                   f"{name} has its own {', '.join(transform.own_methods)}, which a collector never calls",
                   why="it makes differences of whole columns",
                   fix="Override code for another difference.")  # fmt: skip
            raise ArgumentError(
                f"{name} lies inside {type(transform).__name__}",
                why="which is stepped on tensordicts, with all that lies below it", fix=f"Append {name} last.",
            )  # fmt: skip
    outside = [*transforms[inside:], *late]
    keeps_rewards = not any("reward" in transform.out_keys for transform in outside)
    return _on_tensordicts(TransformedEnv(base, Compose(*transforms[:inside])), keeps_rewards=keeps_rewards), outside


def _on_tensordicts(env: EnvBase, *, keeps_rewards: bool = True) -> VecEnv:
    from rlcli.envs.tensordict_vec_env import TensorDictVecEnv

    return TensorDictVecEnv(env, keeps_rewards=keeps_rewards)


def _apart(transforms: Sequence[Transform]) -> tuple[list[Transform], list[Transform]]:
    """Split off the transforms that can work on the rewards of whole batches in the end."""
    kept: list[Transform] = list(transforms)
    late: list[Transform] = []
    for at in range(len(transforms) - 1, -1, -1):
        transform = transforms[at]
        if transform.has_columns and transform.batch_only:
            late.insert(0, kept.pop(at))
        elif not transform.has_columns or "reward" in {*transform.in_keys, *transform.out_keys}:
            break
    for transform in kept:
        if transform.batch_only:
            warnings.warn(
                f"{type(transform).__name__} is stepped with what may read its rewards: each is scaled by those before "
                "it; put it on the outside to have it scale whole batches",
                stacklevel=2,
            )
    return kept, late


def wire(
    env: EnvBase, path: tuple[VecEnv, list[Transform]], policy: Any, placement: Placement, options: CollectorOptions,
    *, mode: str, delta: NextObservationDelta | None, random_frames: int,
) -> Wired:  # fmt: skip
    vec_env, transforms = path
    refuse(own_methods(env, ["maybe_reset"]),
           f"{type(env).__name__} has its own maybe_reset, which a collector never calls",
           why="the row that begins step t+1 is the one that step t showed, but where an episode ended",
           fix="Override _reset or reset for what is done at resets, _step or step for the rest.")  # fmt: skip
    asked, cpu = placement.env, torch.device("cpu")
    if vec_env.on_tensordicts and asked and not same_device(asked, vec_env.env.device or cpu):
        vec_env.env.to(asked)
    if options.max_frames_per_traj is not None:
        vec_env.limit_frames(options.max_frames_per_traj)  # may refuse
    vec_env.limit_frames(None)  # the engine limits only the episodes that it begins
    reward: Fields = {REWARD: Field((1,), np.dtype(np.float32))}
    shown = dict(vec_env.schema)
    for transform in transforms:
        shown |= planned(transform, {**shown, **reward})
    flags = getattr(vec_env, "flags", None)
    setting = PolicyContext(vec_env.actions, shown, env.batch_size, placement, options.exploration_type, flags)
    drawn = random_actions(env, vec_env)
    if random_frames and drawn is None:
        refuse_own_random(env)
    if policy is None:
        used, own, mask_key = None, None, options.random_mask_key
        actor = _without_policy(env, vec_env, setting, drawn, mask_key)
    else:
        used, own, actor = _with_policy(policy, env, vec_env, setting, random_frames > 0)
        mask_key = mask_key_of(policy)
        if mask_key not in shown or vec_env.actions.kind == "box":
            mask_key = None  # one that the policy makes is its own business
    random = RandomActor(drawn or vec_env.actions, actor.log_prob_key, actor.log_prob_shape, mask_key)
    plan = choose_faces(transforms, {**vec_env.schema, **reward}, actor.reads | random.reads)
    if vec_env.rewards is not None:
        plan.needs.add(REWARD)
    batches = schema_of(
        vec_env.n, plan, actor.live, {**random.once, **actor.once},
        *_kept(vec_env, shown, actor, random, delta, options.keep_keys),
        mode=mode, track_ids=options.track_traj_ids, track_version=bool(options.track_policy_version),
        states=actor.states, stride=options.recurrent_state_stride,
    )  # fmt: skip
    live = {key: field for key, field in batches.fields.items() if field.written in (ROW, SPARSE)}
    below = transforms_of(vec_env.env) if vec_env.on_tensordicts else ()
    states = States([*plan.inside, *plan.after], below, vec_env, live)
    if actor.states or states.primed:
        states.learn(actor.states, actor.rewrites)
    return Wired(
        env, vec_env, transforms_on(env), plan, used, own, actor, random, mask_key, batches, live, states
    )  # fmt: skip


def _without_policy(
    env: EnvBase, vec_env: VecEnv, setting: PolicyContext, drawn: ActionFormat | None, key: Key | None
) -> ActorRunner:
    """Return what draws random actions, among those that the mask `key` allows."""
    shown, actions = setting.inputs, vec_env.actions
    if key is not None:
        size = None if actions.kind == "box" else sum(actions.sizes)
        refuse(key not in shown or shown[key].size != size, f"{show(key)} is no mask of the env's actions",
               why=f"a mask has {size or 'no'} flags for them, the env shows {', '.join(map(show, shown))}",
               fix="Give RandomPolicy the action_mask_key of an observation with a flag for each action.")  # fmt: skip
    if drawn is not None:
        return RandomActor(drawn, mask_key=key)
    if not own_methods(env, ["rand_action"]) and isinstance(env.action_spec, Composite | None):
        action_format(env.action_spec, len(env.batch_size))  # refuses it
    from rlcli.collectors.actors.tensordict import TensorDictActor

    return TensorDictActor(env.rand_action, setting, why=f"the env has {_own_random(env)}")


def _with_policy(
    policy: Any, env: EnvBase, vec_env: VecEnv, setting: PolicyContext, early: bool
) -> tuple[Any, Any, ActorRunner]:
    """Return what acts, on tensordicts; the part of it that is of the kind that was given; and what runs it."""
    states, shown, device = state_keys(policy), setting.inputs, setting.placement.policy
    for key in [*states, *written_states(policy)]:
        if key not in shown:
            raise no_place(key, by_itself=key in states)
    if IS_INIT in keys_of(policy, "in_keys") and IS_INIT not in shown:
        raise ArgumentError(
            "the policy reads is_init, which the env does not offer",
            fix="Leave auto_register_policy_transforms=True, or use TransformedEnv(env, InitTracker()).",
        )
    called = on_tensordicts(policy, list(shown))
    used: Any = called if device is None else on_device(called, device)
    legal = partial(_legal, env)
    odd = bool(states) and any(  # modules begin at 0
        isinstance(t, TensorDictPrimer) and t.default_value != 0 and not {*states}.isdisjoint(t.out_keys)
        for t in transforms_of(env)
    )
    actor = choose_actor(used, setting, legal, whole=vec_env.on_tensordicts or odd, early=early)
    return used, used if called is policy else used.module, actor


def random_actions(env: EnvBase, vec_env: VecEnv) -> ActionFormat | None:
    """Return how random actions are drawn, by the env's `action_spec`; None where only the env can."""
    spec, actions = env.action_spec, vec_env.actions
    if own_methods(env, ["rand_action"]) or not isinstance(spec, ACTIONS) or own_methods(spec, spec.drawn_by):
        return None
    made = from_gym_space(actions.space, categorical=actions.categorical)
    if spec.to("cpu") == made.expand(*env.batch_size, *made.shape):
        return actions
    return drawn_alike(spec, actions, env.batch_size)


def _own_random(env: EnvBase) -> str:
    overrides = own_methods(env, ["rand_action"])
    return "its own rand_action" if overrides else f"an action_spec of its own, {type(env.action_spec).__name__}"


def refuse_own_random(env: EnvBase) -> NoReturn:
    """Raise: the env's random actions are not those that first frames take."""
    raise ArgumentError(
        "the first frames take uniform random actions", why=f"{type(env).__name__} has {_own_random(env)}",
        fix="Use init_random_frames=0, and collect the first frames with a collector without a policy.",
    )  # fmt: skip


def refuse_random_now(env: EnvBase, vec_env: VecEnv, actor: ActorRunner) -> None:
    """Raise where a collector that was made without random first frames cannot take some all the same."""
    if random_actions(env, vec_env) is None:
        refuse_own_random(env)
    refuse(actor.late is not None and actor.late.fields is None,
           "random frames cannot come before the policy has acted",
           why="its first step shows which columns batches have",
           fix="Give init_random_frames to the constructor.")  # fmt: skip


def _kept(
    vec_env: VecEnv, shown: Fields, actor: ActorRunner, random: ActorRunner, delta: NextObservationDelta | None,
    keep: Sequence[Key] | None,
) -> tuple[set[Key] | None, set[Key]]:  # fmt: skip
    """Return what `keep` asks for, and what of it only steps show; keys of differences stand for next observations."""
    if keep is None:
        return None, set()
    late = vec_env.on_tensordicts or (actor.late is not None and actor.late.fields is None)
    parts = delta_key, scale_key, kept_key
    coded = {} if delta is None else {part(key): under_next(key) for key in delta.keys for part in parts}
    kept = {unravel(coded.get(as_tuple(key), key)) for key in keep}
    fields = [*shown, *map(under_next, shown), *actor.live, *actor.once, *random.once, *ALWAYS]
    legal = {show(key) for key in map(unravel, fields)}
    awaited = {key for key in kept if show(key) not in legal}
    if awaited and not late:
        refuse_unknown(awaited, legal)
    for key in shown:
        if under_next(key) in kept and unravel(key) not in kept:
            raise ArgumentError(f"keep_keys names next.{show(key)} without {show(key)}", fix="Keep both, or neither.")
    unfollowed = {*actor.states, IS_INIT}  # false in every successor
    kept |= {under_next(key) for key in shown if unravel(key) in kept and key not in unfollowed}
    return kept, awaited


def _legal(env: EnvBase, key: Key, values: np.ndarray) -> np.ndarray:
    """Move values `[*batch, *shape]`, numbers from 0 on, to where the env may show them under `key`."""
    for full in (env.full_observation_spec, env.full_state_spec):
        for name, spec in full.items(True, True):
            if unravel(name) == key and spec.shape == values.shape:
                spec = spec.to("cpu")
                moved = spec.project(torch.from_numpy(values).to(spec.dtype))
                if not spec.is_in(moved):  # a user's, which only draws
                    with torch.random.fork_rng(devices=[]):
                        torch.default_generator.manual_seed(0)
                        moved = spec.rand()
                return moved.numpy().astype(values.dtype)
    return values
