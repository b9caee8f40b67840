"""The TensorDict face of an environment: reset, step, step_and_maybe_reset, rollout.

A subclass gives specs and two methods, `_reset` and `_step`; everything else is written here once.  The collector does
not walk this path for envs that have a `vec_env`; it is what users call by hand, and the slow plain oracle
of the fast loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from inspect import Signature, signature
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType as ExplorationType
from tensordict.nn import set_interaction_type as set_exploration_type
from tensordict.nn.probabilistic import interaction_type as exploration_type

from rlcli import arguments
from rlcli.arguments import refuse
from rlcli.envs.mdp import acted, complete_flags, merged, on_tensordicts, promoted, step_mdp
from rlcli.errors import ArgumentError, EnvError, in_words
from rlcli.keys import ACTION, DONE, END_FLAGS, NEXT, RESET, Key, show, unravel
from rlcli.recognise import overridden
from rlcli.specs import Binary, Composite, TensorSpec, Unbounded
from rlcli.specs.composite import returned_by

__all__ = ["EnvBase", "ExplorationType", "exploration_type", "set_exploration_type"]
SPECS = ("observation_spec", "state_spec", "action_spec", "reward_spec")
SEEDING = ("set_seed", "_set_seed")
_STEPPING = (
    "reset", "step", "step_and_maybe_reset", "maybe_reset", "set_seed", "_reset", "_step", "_set_seed",
)  # fmt: skip


def _other_name(name: str) -> Any:
    return property(lambda env: getattr(env, name), lambda env, spec: setattr(env, name, spec))


class _WithPolicy(type):
    """Take `policy=` of any env's constructor."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        asked = "policy" in kwargs and "policy" not in signature(cls.__init__).parameters  # type: ignore[misc]
        policy = kwargs.pop("policy") if asked else None
        env = super().__call__(*args, **kwargs)
        if policy is None:
            return env
        return import_module("rlcli.envs.transformed").with_policy_transforms(env, policy)  # a file that knows this one

    @property
    def __signature__(cls) -> Signature:
        bound = signature(cls.__init__)  # type: ignore[misc]
        return bound.replace(parameters=list(bound.parameters.values())[1:])


class EnvBase(metaclass=_WithPolicy):
    """An environment that reads and writes TensorDicts.

    Parameters
    ----------
    batch_size : sequence of int
        `()` for a single env, `(N,)` for N stepped together.
    device : torch device, optional
        Where its tensors live; None keeps the CPU without stamping a device on TensorDicts.
    policy : callable, optional
        Of every env: what its recurrent parts need that its specs do not have, an `InitTracker` and primers of their
        states, is put around it. What is returned is a `TransformedEnv` then.

    Notes
    -----
    Subclasses set `observation_spec` (Composite), `action_spec`, `reward_spec`, `state_spec` with shapes that include
    the batch size, and define

    - `_reset(td) -> TensorDict` with root observations; `td` may hold `_reset`, a bool mask `[*batch, 1]` of the lanes
      to restart (the others keep their values);
    - `_step(td) -> TensorDict` with the next observations, `reward` and any of `terminated`, `truncated`, `done`;
    - `_set_seed(seed)`.
    """

    fast = True
    action_key, reward_key = ACTION, "reward"
    action_spec: TensorSpec
    # `step` and `reset` of this class; not counted: those that override them without `super()`, `_step` and `_reset`
    _times_called = 0

    def __init__(self, *, batch_size=(), device=None) -> None:
        self.batch_size = torch.Size(batch_size)
        self.device = torch.device(device) if device is not None else None
        self.observation_spec = Composite({}, shape=self.batch_size)
        self.state_spec = Composite({}, shape=self.batch_size)
        self.reward_spec: TensorSpec = Unbounded(shape=(*self.batch_size, 1), dtype=torch.float32)
        self.is_closed = False
        self.seeded_with: int | None = None  # what `set_seed` was given last

    @property
    def out_of_bounds(self) -> str:
        """What the collector does at an observation outside `observation_spec`: "refuse", "count" or "ignore" it."""
        return "count"

    # ---- specs -------------------------------------------------------------------------------------------------
    @property
    def done_spec(self) -> Composite:
        """The three end flags, bool `[*batch, 1]` each."""
        flag = Binary(1, shape=(*self.batch_size, 1), dtype=torch.bool, device=self.device)
        return Composite({name: flag.clone() for name in END_FLAGS}, shape=self.batch_size)

    @done_spec.setter
    def done_spec(self, spec: TensorSpec) -> None:
        for name, leaf in spec.items(True, True) if isinstance(spec, Composite) else [("done", spec)]:
            if name not in END_FLAGS or (leaf.shape, leaf.dtype) != ((*self.batch_size, 1), torch.bool):
                raise ArgumentError(
                    "the flags of an env are done, terminated and truncated, bool, one for each env",
                    why=f"got {show(name)}: {leaf}", fix="Leave done_spec out: it follows from the batch size.",
                )  # fmt: skip

    full_observation_spec = _other_name("observation_spec")
    full_state_spec = _other_name("state_spec")
    full_done_spec = _other_name("done_spec")

    @property
    def full_action_spec(self) -> Composite:
        return Composite({ACTION: self.action_spec}, shape=self.batch_size)

    @full_action_spec.setter
    def full_action_spec(self, spec: Composite) -> None:
        self.action_spec = _only(spec, self.action_key)

    @property
    def full_reward_spec(self) -> Composite:
        return Composite({"reward": self.reward_spec}, shape=self.batch_size)

    @full_reward_spec.setter
    def full_reward_spec(self, spec: Composite) -> None:
        self.reward_spec = _only(spec, self.reward_key)

    @property
    def _observation_keys_step_mdp(self) -> list[Key]:
        """Return the observation keys that a step carries from `next` to the root."""
        return [unravel(key) for key in self.observation_spec.keys(True, True)]

    @property
    def _state_keys_step_mdp(self) -> list[Key]:
        """Return the state keys (recurrent states and the like) that a step carries from `next` to the root."""
        return [unravel(key) for key in self.state_spec.keys(True, True)]

    @property
    def action_keys(self) -> list[Key]:
        return [self.action_key]

    @property
    def reward_keys(self) -> list[Key]:
        return [self.reward_key]

    @property
    def done_keys(self) -> list[Key]:
        return list(END_FLAGS)

    @property
    def reset_keys(self) -> list[Key]:
        return [RESET]

    # ---- what subclasses write ---------------------------------------------------------------------------------
    def _reset(self, td: TensorDictBase | None) -> TensorDictBase:
        raise NotImplementedError

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        raise NotImplementedError

    def _set_seed(self, seed: int) -> None:
        raise NotImplementedError

    # ---- what users call ---------------------------------------------------------------------------------------
    def set_seed(self, seed: int) -> int:
        """Seed every env from `seed`, the next episode included; returns a seed for the next user in a chain.

        Raises
        ------
        ArgumentError
            It is no whole number from 0 to 2**64 - 1.
        """
        number = arguments.count("seed", seed, 0, 2**64 - 1)
        self._set_seed(number)
        self.seeded_with = number
        return number + 1

    def reset(self, td: TensorDictBase | None = None) -> TensorDictBase:
        """Begin episodes: observations and end flags (all False) at the root.

        With a `_reset` mask `[*batch, 1]` in `td`, only those lanes restart and the rest of `td` is kept.
        """
        mask = td.get(RESET, None) if td is not None else None
        if mask is not None and not bool(mask.all()):
            self._check_going_on(td)
        self._times_called += 1
        out = root_of(self, self._reset(td), "_reset")
        if mask is not None and not bool(mask.all()):
            assert td is not None
            out = merged(td.exclude(RESET, NEXT), out, mask)
        return out

    def _check_going_on(self, td: TensorDictBase) -> None:
        """Raise ArgumentError for a reset of some envs where `td` lacks what the others show."""
        missing = [key for key in self.observation_spec.keys(True, True) if td.get(key, None) is None]
        refuse(
            missing, "some envs are to be reset, and what the others show is not there",
            why=f"the tensordict holds no {', '.join(map(show, missing))}",
            fix="Write '_reset' into the root of the next step, or reset all of them.",
        )  # fmt: skip

    def step(self, td: TensorDictBase) -> TensorDictBase:
        """Take one step; `td` gains `next` with observations, reward and the three end flags.

        What a policy wrote under `next`, and the env does not, stays there. Terminated and truncated are kept apart and
        `done` is always their union.
        """
        if not isinstance(td, TensorDictBase) or td.get(ACTION, None) is None:
            raise ArgumentError("the tensordict given to step holds no action", fix="Use rand_step, or write 'action'.")
        written = td.get(NEXT, None)  # by a recurrent policy
        self._times_called += 1
        out = returned_by(self, "_step", self._step(td))
        complete_flags(out, self.batch_size)
        reward = out.get("reward", None)
        shape = (*self.batch_size, 1)
        if reward is not None and reward.shape != shape and reward.numel() == self.batch_size.numel():
            out.set("reward", reward.reshape(shape))
        if written is not None:
            out = written.clone(False).update(out)
        td.set(NEXT, out)
        return td

    def step_and_maybe_reset(self, td: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """`(td with next, root of the following step)`; finished lanes of the second are freshly reset."""
        td = self.step(td)
        next_of(self, td)
        following = step_mdp(td)
        self._promoted(td, following)
        return td, self.maybe_reset(following)

    def _promoted(self, td: TensorDictBase, following: TensorDictBase) -> None:
        """Drop what only `td` needed from `following`, which was made of it."""

    def maybe_reset(self, td: TensorDictBase) -> TensorDictBase:
        """Reset the lanes whose root `done` is set."""
        over = td.get("done")
        if bool(over.any()):
            td = root_of(self, self.reset(td.set(RESET, over.clone())))
        return td

    def rand_action(self, td: TensorDictBase | None = None) -> TensorDictBase:
        """Write a random action from the action spec (torch's global random stream)."""
        if td is None:
            td = TensorDict({}, batch_size=self.batch_size, device=self.device)
        if self.action_spec is None:
            raise ArgumentError("there is no action_spec to draw actions from", fix="Set one, or use a policy.")
        return td.set(ACTION, self.action_spec.rand())

    def rand_step(self, td: TensorDictBase | None = None) -> TensorDictBase:
        """One step with a random action."""
        return self.step(returned_by(self, "rand_action", self.rand_action(td)))

    def rollout(
        self,
        max_steps: int,
        policy: Callable[[TensorDictBase], TensorDictBase] | None = None,
        *,
        auto_reset: bool = True,
        break_when_any_done: bool = True,
        tensordict: TensorDictBase | None = None,
        callback: Callable[[EnvBase, TensorDictBase], Any] | None = None,
    ) -> TensorDictBase:
        """Steps under a policy (random without one), stacked along a last dim named "time".

        Parameters
        ----------
        max_steps : int
            At most this many.
        policy : callable, optional
            TensorDict -> TensorDict with an action, or a module on observations as a `Collector` takes it.
        auto_reset : bool
            Begin with a reset; otherwise with `tensordict`, of which envs that are `done` are reset first.
        break_when_any_done : bool
            Stop when an env finishes; otherwise reset it and go on. After the last step nothing is reset: give
            `step_mdp(steps[..., -1])` to the next rollout to go on from there.

        Notes
        -----
        Policy and env are called once a step, with copies of the root. What the env showed is kept as it was; what the
        policy writes beside is kept, handed to the env, and gone before the policy is called again. Of what a step
        wrote under `next`, the next root takes what the root had: a key that no reset writes stays under `next`.

        Returns
        -------
        TensorDict ``[*batch, steps]``

        Raises
        ------
        EnvError
            Steps hold other keys or shapes than those before.
        """
        max_steps = arguments.count("max_steps", max_steps)
        td = root_of(self, self.reset()) if auto_reset else tensordict
        if td is None:
            raise ArgumentError("rollout(auto_reset=False) needs the tensordict to start from")
        if not auto_reset and td.get("done", None) is not None:
            td = returned_by(self, "maybe_reset", self.maybe_reset(td.clone(False)))
        root = td.exclude(NEXT, RESET, ACTION).clone()
        if policy is not None:
            policy = on_tensordicts(policy, [key for key in self.observation_spec.keys(True, True)])
        steps: list[TensorDictBase] = []
        for step in range(1, max_steps + 1):
            if policy is not None:
                td = acted(policy, root)
            else:
                td = returned_by(self, "rand_action", self.rand_action(root.clone(False)))
            # a part may write to its input, or keep its output and write to that
            td.set(NEXT, next_of(self, self.step(td.clone())).clone())
            steps.append(td.clone())
            if callback is not None:
                callback(self, td)
            following = promoted(root, td.get(NEXT))
            self._promoted(steps[-1], following)
            if step == max_steps or (break_when_any_done and bool(td.get(DONE).any())):
                break
            root = returned_by(self, "maybe_reset", self.maybe_reset(following)).clone()
        try:
            batch: TensorDictBase = torch.stack(steps, len(self.batch_size))  # type: ignore[arg-type, assignment]
        except RuntimeError as error:
            keys: list[set[Any]] = [{*map(unravel, step.keys(True, True))} for step in steps]
            some = sorted(map(show, set.union(*keys) - set.intersection(*keys)))
            raise EnvError(
                "the steps of a rollout do not hold the same keys and shapes", where=type(self).__name__,
                why=f"only some hold {', '.join(some)}" if some else in_words(error, 200),
                fix="Write at every step what the first one holds.",
            ) from error  # fmt: skip
        batch.names = [*[None] * len(self.batch_size), "time"]
        return batch

    def fake_tensordict(self) -> TensorDictBase:
        """Zeros in the layout of one step."""
        td = self.observation_spec.zero().update(self.state_spec.zero()).update(self.done_spec.zero())
        following = td.clone().set("reward", self.reward_spec.zero())
        return td.set(ACTION, self.action_spec.zero()).set(NEXT, following)

    def to(self, device) -> EnvBase:
        """Move the env's tensors, and what its specs say of them, to a device."""
        self.device = torch.device(device)
        self._move_specs(self.device)
        return self

    def _move_specs(self, device: torch.device) -> None:
        for name in SPECS:
            setattr(self, name, getattr(self, name).to(device))

    def close(self) -> None:
        """Release what the env holds."""
        self.is_closed = True

    def __repr__(self) -> str:
        return f"{type(self).__name__}(batch_size={list(self.batch_size)})"


def root_of(env: EnvBase, out: Any, method: str = "reset") -> TensorDictBase:
    """Return a resetting method's result as a TensorDict; missing end flags are False."""
    out = returned_by(env, method, out)
    shape = (*env.batch_size, 1)
    for name in END_FLAGS:
        flag = out.get(name, None)
        if flag is None:
            out.set(name, torch.zeros(shape, dtype=torch.bool, device=env.device))
        elif flag.dtype is not torch.bool or flag.shape != shape:
            out.set(name, flag.reshape(shape).bool())
    return out


def next_of(env: EnvBase, out: Any) -> TensorDictBase:
    """Return the env's `next` of what its `step` returned, with all end flags."""
    following = returned_by(env, "step", out).get(NEXT, None)
    if not isinstance(following, TensorDictBase):
        instead = "" if following is None else f", and wrote a {type(following).__name__}"
        raise EnvError(
            f"{type(env).__name__}.step wrote no TensorDict under 'next'", why=f"it overrides EnvBase.step{instead}",
            fix="Write what follows there.",
        )  # fmt: skip
    if any(following.get(name, None) is None for name in END_FLAGS):
        complete_flags(following, env.batch_size)
    return following


def own_methods(part: Any, methods: Iterable[str] = _STEPPING) -> list[str]:
    """Return those of a part's methods, by default those that step an env, that a class or object of the user's has."""
    return overridden(part, methods)


def _only(spec: Composite, key: Key) -> TensorSpec:
    """Return the one leaf of a composite, which is called `key`."""
    names = [unravel(name) for name in spec.keys(True, True)]
    if names != [key]:
        raise ArgumentError(
            f"an env has one {show(key)}, called so", why=f"got {', '.join(map(show, names)) or 'none'}"
        )
    return spec[key]
