"""`TransformedEnv`: an env with transforms on what goes in and what comes out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlcli.arguments import refuse
from rlcli.envs.base import EnvBase, next_of, own_methods, root_of
from rlcli.envs.mdp import complete_flags
from rlcli.errors import ArgumentError
from rlcli.keys import END_FLAGS, IS_INIT, NEXT, RESET, Key, as_tuple, show, under_next, unravel
from rlcli.transforms.base import Transform
from rlcli.transforms.compose import Compose, parts_of
from rlcli.transforms.primer import recurrent_parts

# of each transform the env below it: not an attribute, which copies of the transform would have too
_OWNERS: WeakKeyDictionary[Transform, ref[EnvBase]] = WeakKeyDictionary()


def _check_owner(base: EnvBase, transforms: Sequence[Transform]) -> None:
    """Raise ArgumentError for a transform in two places: what it keeps from step to step would be that of both."""
    seen: set[Transform] = set()
    for transform in _all_of(transforms):
        owner = _OWNERS[transform]() if transform in _OWNERS else None
        twice = transform in seen
        seen.add(transform)
        if twice:
            why = "it is among the transforms of this env twice"
        elif owner is not None and owner is not base and not owner.is_closed:
            why = f"it is on another env already, {owner!r}"
        else:
            continue
        raise ArgumentError(
            f"one {type(transform).__name__} cannot be in two places", why=why,
            fix="Make a new one for each, or close that env first; other.adopt(transform.state_dict()) hands on what "
            "one has learned.",
        )  # fmt: skip


def transforms_on(env: EnvBase) -> list[Transform]:
    """Return the transforms that an env is seen through, innermost first."""
    return env.transforms if isinstance(env, TransformedEnv) else []


def _all_of(transforms: Sequence[Transform]) -> list[Transform]:
    return [part for transform in transforms for part in transform.modules() if isinstance(part, Transform)]


class TransformedEnv(EnvBase):
    """`base_env` seen through a transform.

    Parameters
    ----------
    base_env : EnvBase
        The env below; a TransformedEnv is flattened into this one, unless it is of a class of its own.
    transform : Transform, optional
        One transform or a `Compose`; more can be appended with `append_transform`.

    Notes
    -----
    The collector takes `base_env` and `transforms` apart and runs the transforms' column faces on its own rows; it
    steps this object where a transform has none, or where a subclass steps otherwise.

    Attributes
    ----------
    own_reward : Tensor or None
        What `base_env` gave in the last step, before any transform.
    """

    own_reward: Tensor | None = None

    def __init__(self, base_env: EnvBase, transform: Transform | None = None) -> None:
        refuse(
            not isinstance(base_env, EnvBase), "transforms are put around an env of rlcli's",
            why=f"got a {type(base_env).__name__}", fix="Wrap a gymnasium env first: TransformedEnv(GymEnv(env), ...).",
        )  # fmt: skip
        below: list[Transform] = []
        while type(base_env) is TransformedEnv and not own_methods(base_env):
            below = [*base_env.transforms, *below]
            base_env = base_env.base_env
        super().__init__(batch_size=base_env.batch_size, device=base_env.device)
        self.base_env: EnvBase = base_env
        self.transform = Compose(*below, *(() if transform is None else [transform]))
        self._refresh()

    @property
    def transforms(self) -> list[Transform]:
        """The transforms in order, innermost first."""
        return parts_of(self.transform)

    @property
    def _times_called(self) -> int:  # type: ignore[override]
        """Count on the env below: several may be put around it, and each of them steps it."""
        return self.base_env._times_called

    @_times_called.setter
    def _times_called(self, times: int) -> None:
        self.base_env._times_called = times

    @property
    def out_of_bounds(self) -> str:
        return self.base_env.out_of_bounds

    def append_transform(self, transform: Transform) -> TransformedEnv:
        """Add a transform on the outside."""
        before, self.transform = self.transform, Compose(self.transform, transform)
        try:
            self._refresh()
        except BaseException:  # as it was before
            self.transform = before
            raise
        return self

    def _move_specs(self, device: torch.device) -> None:
        self.base_env.to(device)
        self._refresh()

    def _refresh(self) -> None:
        """Set specs and owner of the transforms; nothing is changed where they do not fit."""
        base, t, transforms = self.base_env, self.transform, self.transforms
        _check_owner(base, transforms)
        specs = (
            t.transform_observation_spec(base.observation_spec.clone()),
            t.transform_state_spec(base.state_spec.clone()),
            t.transform_reward_spec(base.reward_spec.clone()),
            t.transform_action_spec(base.action_spec.clone()),
        )
        for i, transform in enumerate(transforms, 1):
            transform.check_later(transforms[i:])
        self.observation_spec, self.state_spec, self.reward_spec, self.action_spec = specs
        _OWNERS.update((part, ref(base)) for part in _all_of(transforms))

    def _set_seed(self, seed: int) -> None:
        self.base_env.set_seed(seed)

    def _reset(self, td: TensorDictBase | None) -> TensorDictBase:
        base_in = td
        if td is not None and td.get(RESET, None) is not None:
            base_in = self._raw(td)
        out = root_of(self.base_env, self.base_env.reset(base_in))
        self._keep_raw(out)
        return self.transform._reset(td, out)

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        out = next_of(self.base_env, self.base_env.step(self.transform.inv(td.clone(False))))
        self._keep_raw(out)
        reward = out.get("reward", None)
        self.own_reward = None if reward is None else reward.clone()  # a transform may change it in place
        done = None if (done := out.get("done", None)) is None else done.clone()
        out = self.transform._step(td, out)
        complete_flags(out, self.batch_size, done)
        return out

    def _promoted(self, td: TensorDictBase, following: TensorDictBase) -> None:
        self.transform.promoted(td, following)

    def fake_tensordict(self) -> TensorDictBase:
        return self.transform.transform_fake_tensordict(super().fake_tensordict())

    def _keep_raw(self, out: TensorDictBase) -> None:
        # a partial reset below must find the untransformed values of the lanes that go on
        base = self.base_env
        keys = [*base.observation_spec.keys(True, True), *base.state_spec.keys(True, True), *END_FLAGS]
        self._last_raw = out.select(*keys, strict=False)

    def _raw(self, td: TensorDictBase) -> TensorDictBase:
        mask, last = td.get(RESET), vars(self).get("_last_raw")
        if last is None:
            if not bool(mask.all()):
                raise ArgumentError("some envs are to be reset, and none was before", fix="Reset all of them.")
            return td.select(RESET)
        states = td.select(*self.base_env.state_spec.keys(True, True), strict=False)  # a step need not write them
        return states.update(last).set(RESET, mask)

    def close(self) -> None:
        super().close()
        self.base_env.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "base_env":
            raise AttributeError(name)
        return getattr(self.base_env, name)

    def __repr__(self) -> str:
        return f"TransformedEnv({self.base_env!r}, {self.transform!r})"


# ---- what a policy needs of an env: a marker of first steps, and a place for the state for its next step -------------
# Found from specs, so that what an env below has already is not added again. `policy=` of every env and a collector's
# `auto_register_policy_transforms` ask here.
def with_policy_transforms(env: EnvBase, policy: Any) -> EnvBase:
    """The env with what is missing on its outside; itself where nothing is.

    An InitTracker, and primers for the policy's recurrent parts, unless the specs hold their keys.
    """
    specs = (env.full_observation_spec, env.full_state_spec)
    present = {unravel(key) for spec in specs for key in spec.keys(True, True)}
    primers = [part.make_tensordict_primer() for part in recurrent_parts(policy)]
    if primers:
        _check_states(policy)
    marked = primers or IS_INIT in keys_of(policy, "in_keys") or set(written_states(policy)) & present
    if marked and IS_INIT not in present:
        from rlcli.transforms.counters import InitTracker

        env = TransformedEnv(env, InitTracker())
    for primer in primers:
        if not set(primer.out_keys) <= present:
            _check_written(policy, primer.out_keys)
            env = TransformedEnv(env, primer)
            present |= set(primer.out_keys)
    return env


def _check_written(policy: Any, states: Iterable[Key]) -> None:
    written = written_states(policy)
    lost = [key for key in states if key not in written]
    if lost and keys_of(policy, "out_keys"):
        raise ArgumentError(
            f"the policy would forget its state {show(lost[0])} at every step", where=type(policy).__name__,
            why=f"its out_keys are {', '.join(map(repr, keys_of(policy, 'out_keys')))}",
            fix=f"Write the next state at {under_next(lost[0])!r}.",
        )  # fmt: skip


def _check_states(policy: Any) -> None:
    """Raise ArgumentError if two modules write one state; one around another may speak for it."""
    parts = recurrent_parts(policy)
    inner = [part for part in parts if not any(other in parts for other in list(part.modules())[1:])]
    written = Counter(key for part in inner for key in set(written_states(part)))
    twice = [show(key) for key, count in written.items() if count > 1]
    refuse(
        twice, f"two modules of the policy have one state, {', '.join(twice)}",
        why="each would go on from what the other one wrote",
        fix='Name the states apart: in_keys=["x", "h"], out_keys=["features", ("next", "h")].',
    )  # fmt: skip


def written_states(policy: Any) -> list[Key]:
    """Return the root names of what the policy writes under `next`, from its `out_keys`."""
    keys = [as_tuple(key) for key in keys_of(policy, "out_keys")]
    return [unravel(key[1:]) for key in keys if key[0] == NEXT and len(key) > 1]


def keys_of(policy: Any, name: str) -> list[Key]:
    """Return the policy's `in_keys` or `out_keys`; none where it does not say."""
    return [unravel(key) for key in getattr(policy, name, None) or ()]
