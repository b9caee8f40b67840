"""Actors: policies as the collector's loop calls them, with no policy, and the random stream of unknown ones.

A policy or an env on tensordicts may draw from torch's global stream. While a batch is collected that stream is
replaced by the collector's own (`TorchStream`), and put back afterwards: what is drawn depends on the collector's seed,
and drawing it disturbs nobody. A collector in the background draws from the global stream with the others: there is one
for all threads, and putting it back would give them the same numbers again.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from rlcli.collectors.batch import Columns
from rlcli.collectors.devices import Placement
from rlcli.collectors.states import States
from rlcli.envs.late_columns import LateColumns
from rlcli.errors import ArgumentError
from rlcli.keys import ACTION, Key, show
from rlcli.modules.masks import pick, refuse_no_option
from rlcli.specs.field import Field, Fields
from rlcli.vec_envs.actions import ActionFormat
from rlcli.vec_envs.noise import Noise


class BoundActor:
    """An actor bound to the rows of one batch.

    `begin` once before the loop, `act(t)` at every step, `end` once after it.

    Attributes
    ----------
    written : TensorDict or None
        All that a policy on tensordicts wrote in the step that it acted in last, its inputs among it.
    """

    written: TensorDictBase | None = None

    def begin(self, noise: Noise, first: int, last: int) -> None:
        """Prepare steps `first..last-1`: look at their noise, check that views of the weights are not stale."""

    def renew(self, t: int) -> None:
        """The weights were overwritten before step t of a leg that has begun."""

    def act(self, t: int) -> Any:
        """The action of step t as the env's loop takes it (`ActionFormat`)."""
        raise NotImplementedError

    def end(self, first: int, last: int) -> None:
        """Fill the whole-column outputs of these steps (log-probabilities, encoded actions)."""


@dataclass(frozen=True)
class PolicyContext:
    """What a policy acts in.

    Attributes
    ----------
    actions : ActionFormat
        What it has to write.
    inputs : Fields
        Every key that it may be shown.
    batch_size : torch.Size
        The env's: `()` (the policy sees `[*obs]`) or `(N,)`.
    placement : Placement
        Devices; the input is copied to the policy's device where it differs.
    exploration : InteractionType, optional
        Whether actions are drawn or the mode is taken; None leaves distributions their own way.
    flags : callable, optional
        Gives the end flags of the root, where any may be set; False without it.
    """

    actions: ActionFormat
    inputs: Fields
    batch_size: torch.Size
    placement: Placement
    exploration: InteractionType | None
    flags: Callable[[], Mapping[str, torch.Tensor]] | None = None


class ActorRunner:
    """A policy, ready to be bound.

    Attributes
    ----------
    reads : set of keys
        Keys it reads from the rows; transforms that write them must run inside the loop.
    live : Fields
        Keys it writes row by row.
    once : Fields
        Keys it writes once per batch, as whole columns.
    log_prob_key : key, optional
        Where it writes log-probabilities, each of `log_prob_shape`.
    states : sequence of keys
        Root keys whose next value it writes: row t+1 at step t.
    rewrites : set of keys
        Keys that it reads and writes anew at the root; the rows keep what it read.
    calls : bool
        Whether code of the user's is called: it may draw from torch's global stream, and keep tensors between calls.
    late : LateColumns or None
        Columns beside those of `live` and `once`, where it is not known before the first step what it writes.
    """

    reads: set[Key]
    live: Fields
    once: Fields

    log_prob_key: Key | None = None
    log_prob_shape: tuple[int, ...] = ()
    states: Sequence[Key] = ()
    rewrites: Set[Key] = frozenset()
    calls: bool = False
    late: LateColumns | None = None

    def bind(self, columns: Columns, lanes: int, states: States) -> BoundActor:
        """Make it ready to act on these rows; `states` says what may be written under `next`."""
        raise NotImplementedError

    def act_with(self, policy: Any) -> None:
        """Act with this copy of the policy from now on."""

    def refresh(self) -> None:
        """A batch begins: see whether the policy is still made of what it was made of."""


def holding(bound: BoundActor, columns: Columns, keys: Iterable[Key]) -> BoundActor:
    """The actor, with the rows of `keys` copied from each step to the next; itself where there are none."""
    rows = [columns.rows[key] for key in keys]
    return _Holding(bound, rows) if rows else bound


class Masked(BoundActor):
    """The actor, which is not asked for an action where the mask allows none.

    Parameters
    ----------
    bound : BoundActor
    rows : sequence of array
        The masks of each step, `[N, *]`.
    sizes : sequence of int
        Options of each choice.
    key : key
        Of the mask.
    """

    def __init__(self, bound: BoundActor, rows: Sequence[np.ndarray], sizes: Sequence[int], key: Key) -> None:
        self.bound, self.rows, self.sizes, self.key = bound, [row.reshape(len(row), -1) for row in rows], sizes, key
        self.begin, self.renew, self.end = bound.begin, bound.renew, bound.end  # type: ignore[method-assign]

    def act(self, t: int):
        if not self.rows[t].all():  # the usual end of it where nothing is forbidden
            refuse_no_option(self.rows[t], self.sizes, self.key, f"step {t} of the batch; the env was not stepped")
        action = self.bound.act(t)
        self.written = self.bound.written
        return action


class _Holding(BoundActor):
    def __init__(self, bound: BoundActor, rows: list) -> None:
        self.bound, self.rows = bound, rows
        self.begin, self.renew, self.end = bound.begin, bound.renew, bound.end  # type: ignore[method-assign]

    def act(self, t: int):
        for rows in self.rows:
            rows[t + 1][...] = rows[t]
        action = self.bound.act(t)
        self.written = self.bound.written
        return action


# ---- no policy -------------------------------------------------------------------------------------------------------
class RandomActor(ActorRunner):
    """No policy: uniform actions of the action space.

    Parameters
    ----------
    actions : ActionFormat
    log_prob_key : key, optional
        Where to write the log-density of the uniform law, float32; None leaves it out.
    log_prob_shape : tuple of int
        Of one log-density, as the policy writes its own: `()`, or the action's shape for one a dim.
    mask_key : key, optional
        Of the action mask: actions are uniform among those that it allows.
    """

    def __init__(
        self,
        actions: ActionFormat,
        log_prob_key: Key | None = None,
        log_prob_shape: tuple[int, ...] = (),
        mask_key: Key | None = None,
    ) -> None:
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


# ---- the stream of what is called ----------------------------------------------------------------------------------
class TorchStream:
    """Keep the torch random stream of all envs of a process, on the CPU and on a CUDA `device`."""

    def __init__(self, seed: int, device: torch.device | None, shared: Callable[[], bool] = lambda: False) -> None:
        self.seed = seed
        self._device = device
        self._cuda = [device] if device is not None and device.type == "cuda" else []
        self._shared = shared
        self._state: list[torch.Tensor] | None = None
        self._entered = False

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Make it the global stream; not where that is shared, whose other users would go back in time."""
        if self._shared() or self._entered:
            yield
            return
        with torch.random.fork_rng(self._cuda):
            self._put()
            self._entered = True
            try:
                yield
            finally:
                self._entered = False
                self._state = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._cuda)]

    def reseed(self, seed: int) -> None:
        """Begin anew."""
        self.seed, self._state = seed, None

    def _put(self) -> None:
        if self._state is None:
            self._seed(self.seed % 2**63)
            return
        torch.set_rng_state(self._state[0])
        for device, state in zip(self._cuda, self._state[1:], strict=True):
            torch.cuda.set_rng_state(state, device)

    def _seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which would reseed every GPU too
        if self._cuda:
            with torch.cuda.device(self._device):
                torch.cuda.manual_seed(seed)
        elif self._device is not None and self._device.type != "cpu":
            torch.get_device_module(self._device).manual_seed(seed)

    def state_dict(self) -> dict[str, Any]:
        """Return where the stream stands; empty before its first use."""
        return {} if self._state is None else {"torch": self._state[0], "cuda": self._state[1:]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there; where nothing is said, from the seed."""
        self._state = [state["torch"], *state["cuda"]] if state else None
