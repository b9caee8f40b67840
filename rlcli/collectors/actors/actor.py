"""Actors: policies as the collector's loop calls them, and with no policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from rlcli.errors import ArgumentError
from rlcli.keys import ACTION, STEP_RESULTS, Key, show
from rlcli.modules.masks import pick
from rlcli.specs.field import Field, Fields
from rlcli.transforms.base import Transform
from rlcli.transforms.primer import TensorDictPrimer
from rlcli.vec_envs.actions import ActionFormat
from rlcli.vec_envs.noise import Noise
from rlcli.vec_envs.vec_env import VecEnv

if TYPE_CHECKING:
    from rlcli.collectors.batch import Columns
    from rlcli.collectors.devices import Placement
    from rlcli.envs.late_columns import LateColumns


class BoundActor:
    """Act on the rows of one batch: `begin` once before the loop, `act(t)` at every step, `end` once after it."""

    written: TensorDictBase | None = None  # all that a policy on tensordicts wrote last, its inputs among it

    def begin(self, noise: Noise, first: int, last: int) -> None:
        """Prepare steps `first..last-1`: look at their noise, check that views of the weights are not stale."""

    def renew(self, t: int) -> None:
        """Look at weights that were overwritten before step t of a leg that has begun."""

    def act(self, t: int) -> Any:
        """Return the action of step t as the env's loop takes it (`ActionFormat`)."""
        raise NotImplementedError

    def end(self, first: int, last: int) -> None:
        """Fill the whole-column outputs of these steps (log-probabilities, encoded actions)."""


@dataclass(frozen=True)
class PolicyContext:
    """Describe what a policy acts in."""

    actions: ActionFormat  # what it has to write
    inputs: Fields  # all that it may be shown
    batch_size: torch.Size  # the env's: `()`, the policy sees `[*obs]`, or `(N,)`
    placement: Placement
    exploration: InteractionType | None  # None leaves distributions their own way
    flags: Callable[[], Mapping[str, torch.Tensor]] | None = None  # end flags of the root; all are False without it


class ActorRunner:
    """Know what a policy reads and writes; `bind` makes it ready to act."""

    reads: set[Key]  # from the rows; transforms that write them must run inside the loop
    live: Fields  # written row by row
    once: Fields  # written once per batch, as whole columns
    log_prob_key: Key | None = None
    log_prob_shape: tuple[int, ...] = ()
    states: Sequence[Key] = ()  # root keys whose next value it writes: row t+1 at step t
    rewrites: Set[Key] = frozenset()  # read and written anew at the root; the rows keep what was read
    calls: bool = False  # code of the user's, which may draw from torch's global stream and keep tensors
    late: LateColumns | None = None  # further columns, where the first step shows what is written

    def bind(self, columns: Columns, lanes: int, states: States) -> BoundActor:
        """Make it ready to act on these rows; `states` says what may be written under `next`."""
        raise NotImplementedError

    def act_with(self, policy: Any) -> None:
        """Act with this copy of the policy from now on."""

    def refresh(self) -> None:
        """See, as a batch begins, whether the policy is still made of what it was made of."""


# ---- recurrent states ----------------------------------------------------------------------------------------------
class States:
    """Hold the keys that a policy may carry, and who else writes them.

    A `TensorDictPrimer` among the `transforms` on rows, or `below` them, gives a key its rows and, at resets, its
    default; ("next", key) of step t is row t+1. Who writes none (random actions, a policy that only reads) keeps it.
    """

    def __init__(
        self, transforms: Sequence[Transform], below: Iterable[Transform], vec_env: VecEnv, rows: Fields
    ) -> None:  # fmt: skip
        self.transforms, self.vec_env, self.rows = transforms, vec_env, rows
        self._on_rows, inside = (
            [key for t in parts if isinstance(t, TensorDictPrimer) for key in t.out_keys]
            for parts in (transforms, below)
        )
        self.primed = [*self._on_rows, *inside]

    def learn(self, states: Sequence[Key], rewrites: Set[Key]) -> None:
        """Learn what the policy writes for the next step, and which of the keys that it reads it writes anew."""
        for key in states:
            writers = [
                type(t).__name__
                for t in self.transforms
                if not isinstance(t, TensorDictPrimer) and key in t.writes(self.rows)
            ]
            if key in self.vec_env.schema and not self.vec_env.on_tensordicts:
                writers.append(self.vec_env.name)
            if writers:
                raise ArgumentError(
                    f"the policy writes next.{show(key)}, which {writers[0]} writes",
                    why="one of the two would be lost", fix="Give the policy's state a name of its own.",
                )  # fmt: skip
        for key in self.primed:
            if key in rewrites and key not in states:
                raise ArgumentError(
                    f"the policy overwrites {show(key)}, the state that it reads",
                    why="row t keeps the state that step t began with; the new one belongs to the next step",
                    fix=f"Write ('next', {key!r})." if isinstance(key, str) else f"Write {('next', *key)!r}.",
                )
        self.vec_env.carry(states)  # of primers inside the env

    def held(self, states: Sequence[Key]) -> list[Key]:
        """Return the keys whose rows go from step to step where nobody writes them."""
        return [key for key in [*self._on_rows, *self.vec_env.states] if key not in states]


def no_place(key: Key, *, by_itself: bool = False) -> ArgumentError:
    if key in STEP_RESULTS:
        return ArgumentError(f"the policy writes next.{show(key)}", why="reward and end flags are the env's to write")
    name = repr(key)
    return ArgumentError(
        f"the policy is recurrent, but nothing carries its state {show(key)} from step to step",
        why=f"it writes next.{show(key)}, and the env has no {show(key)} to hold it",
        fix="Leave auto_register_policy_transforms=True, or use "
        "TransformedEnv(env, Compose(InitTracker(), module.make_tensordict_primer()))."
        if by_itself
        else f"Use TransformedEnv(env, TensorDictPrimer({{{name}: Unbounded((size,))}})), "
        "or give the module a make_tensordict_primer() that returns it.",
    )


# ---- no policy -------------------------------------------------------------------------------------------------------
class RandomActor(ActorRunner):
    """Draw uniform actions of the action space, or of those that a mask allows; without a policy.

    Under `log_prob_key` goes the log-density of that law, float32, one number or one a dim as the policy writes its.
    """

    def __init__(
        self, actions: ActionFormat, log_prob_key: Key | None = None, log_prob_shape: tuple[int, ...] = (),
        mask_key: Key | None = None,
    ) -> None:  # fmt: skip
        self.actions, self.log_prob_key, self.log_prob_shape = actions, log_prob_key, log_prob_shape
        self.mask_key = mask_key
        self.reads = set() if mask_key is None else {mask_key}
        self.live: Fields = {}
        self.once: Fields = {ACTION: actions.stored}
        if log_prob_key is not None:
            self.once[log_prob_key] = Field(log_prob_shape, np.dtype(np.float32))

    def bind(self, columns: Columns, lanes: int, states: States) -> BoundActor:
        return _BoundRandom(self, columns, lanes)


class _BoundRandom(BoundActor):
    def __init__(self, actor: RandomActor, columns: Columns, lanes: int) -> None:
        self.actions, self.lanes = actor.actions, lanes
        self.action = columns.data.get(ACTION)
        self.key, self.shape = actor.log_prob_key, actor.log_prob_shape
        self.log_prob = None if self.key is None else columns.data.get(self.key)
        self.first = 0
        key = actor.mask_key
        self.masks = None if key is None else [row.reshape(lanes, -1) for row in columns.rows[key]]

    def begin(self, noise, first, last) -> None:
        each = bool(self.shape) and self.shape == self.actions.shape
        shape = self.actions.shape
        self.first = first
        self.uniform = noise.peek(lambda generator, t: generator.random((t, *shape)), last - first, math.prod(shape))
        drawn, density = self.actions.from_uniform(self.uniform, each=each)  # [steps, N, *] both
        self.rows = list(drawn)
        if self.masks is None:
            self._store(drawn, density, each, first, last)
        else:
            self.drawn, self.density = drawn, np.empty(self.uniform.shape)

    def _store(self, drawn: np.ndarray, density: np.ndarray, each: bool, first: int, last: int) -> None:
        if self.action is not None:
            column = self.action[:, first:last]
            across = drawn.swapaxes(0, 1)  # [N, steps, *]
            if self.actions.encoded:
                self.actions.encode(across, column)
            else:
                column[...] = across
        if self.log_prob is not None and self.key is not None:
            if not each and math.prod(self.shape) != 1:
                raise ArgumentError(
                    f"the first frames' random actions have no {show(self.key)} like the policy's",
                    why=f"the policy writes {self.shape} numbers a step for an action of shape {self.actions.shape}",
                    fix="Use init_random_frames=0, or sum the policy's log-probabilities over the action.",
                )
            self.log_prob[:, first:last] = density.swapaxes(0, 1).reshape(self.lanes, last - first, *self.shape)

    def act(self, t: int):
        offset = t - self.first
        if self.masks is not None:
            index, count = pick(self.masks[t], self.actions.sizes, self.uniform[offset].reshape(self.lanes, -1))
            self.drawn[offset] = index.reshape(self.drawn[offset].shape)
            self.density[offset] = -np.log(count).reshape(self.drawn[offset].shape)
        return self.rows[offset]

    def end(self, first, last) -> None:
        if self.masks is not None:
            each = bool(self.shape) and self.shape == self.actions.shape
            taken = slice(last - first)
            density = self.density[taken] if each else self.density[taken].reshape(last - first, self.lanes, -1).sum(-1)
            self._store(self.drawn[taken], density, each, first, last)
