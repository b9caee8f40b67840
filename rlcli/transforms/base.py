"""A transform: one small change to what an env gives or takes, for tensordicts and for columns.

The *TensorDict face* (`_step`, `_reset`, `forward`, `inv`) works anywhere. The *column face* (`bind`,
`batch_pass`) does the same inside the collector, on numpy rows and whole columns, without a tensordict; both
give the same bits there. A transform without a column face is still right, only slower: with all that lie below it,
it is stepped as `TransformedEnv` steps it. `choose_faces` decides where a column face runs.

Letters: N envs ("lanes"), T steps of a batch, B the batch dims of a tensordict.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from tensordict import TensorDictBase
from torch import Tensor, nn

from rlcli.arguments import refuse
from rlcli.errors import ArgumentError, MissingKeyError
from rlcli.keys import NEXT, RAW, RESET, TAKEN, Key, as_tuple, show, under_next, unravel
from rlcli.recognise import declaring, overridden
from rlcli.specs import Composite, TensorSpec, Unbounded
from rlcli.specs.base import as_field
from rlcli.specs.dtypes import torch_dtype
from rlcli.specs.field import Field, Fields

if TYPE_CHECKING:
    from rlcli.transforms.stored_rows import BufferRows

Rows = Mapping[Any, Sequence[np.ndarray]]
Columns = MutableMapping[Any, np.ndarray]

# what may be overridden without a word on steps: of other moments, or asked by both faces
OTHER_METHODS = {
    "get_extra_state", "set_extra_state", "state_dict", "load_state_dict", "adopt", "check_later",
    "transform_fake_tensordict", "bind_buffer", "reads_anew", "sampled", "has_columns", "own_methods", "reads",
    "writes", "recalls", "plan",
}  # fmt: skip


class RowOp:
    """A transform bound to the rows of one batch buffer; the collector calls it inside its loop.

    In a batch: `begin()`; `reset(0, lanes)` for lanes that were reset outside the loop; then for every step
    `step(t + 1)` on the true successors and, where episodes ended, `reset(t + 1, lanes)` on the reset states
    that overwrote them; `end()`. State that outlives the batch belongs to the transform or to row T, not to
    the op: a transform is bound once to each of several buffers.

    Parameters
    ----------
    step, reset : callable, optional
        Called in the place of these methods, which a subclass defines instead.
    """

    def __init__(
        self,
        step: Callable[[int], Sequence[int] | None] | None = None,
        reset: Callable[[int, Sequence[int]], None] | None = None,
    ) -> None:
        if step is not None:
            self.step = step  # type: ignore[assignment, method-assign]
        if reset is not None:
            self.reset = reset  # type: ignore[assignment, method-assign]

    def begin(self) -> None:
        """A batch starts; row 0 holds the carried state."""

    def step(self, t: int) -> Sequence[int] | None:
        """Transform row t, `1 <= t <= T`. Returns the lanes whose episode it truncates, if any.

        The reward and flags of that step are `rows[("next", ...)][t - 1]`. Lanes that ended anyway may be
        among those returned: they are flagged truncated as well.
        """

    def reset(self, t: int, lanes: Sequence[int]) -> None:
        """Transform the reset states that lanes `lanes` hold in row t."""

    def end(self) -> None:
        """The batch is complete."""


class Transform(nn.Module):
    """Base of all transforms.

    Parameters
    ----------
    in_keys : sequence of keys
        What is read, by root name: `"reward"` is `("next", "reward")` in a batch.
    out_keys : sequence of keys, optional
        What is written, one for each of `in_keys`; the same keys by default. With `"reward"` among them it changes
        rewards: reported returns are then those of the env, before any transform.
    """

    fast = True
    has_batch_pass = False  # whether `batch_pass` exists
    batch_only = False  # whether `batch_pass` is its only column face
    ends_episodes = False  # whether `_step` may set done flags
    remembers = True  # whether what it writes may depend on earlier steps, its frozen statistics apart
    stepping: Collection[str] = ()  # the methods that the column face speaks for; none named: all but `OTHER_METHODS`
    outside_batches = False  # whether it must not be put on one of the envs that are stepped together

    def __init__(self, in_keys: Sequence[Key] = (), out_keys: Sequence[Key] | None = None) -> None:
        super().__init__()
        self.in_keys = key_list(in_keys)
        self.out_keys = list(self.in_keys) if out_keys is None else key_list(out_keys)
        refuse(
            not all([*self.in_keys, *self.out_keys]), f"{type(self).__name__} does not take a key without a name",
            why=f"its in_keys are {self.in_keys}, its out_keys {self.out_keys}",
        )  # fmt: skip

    # -- TensorDict face ---------------------------------------------------------------------------
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Transform data that is already collected, `[*B]`, at the keys as they are named."""
        raise ArgumentError(
            f"{type(self).__name__} transforms an env's steps, not collected data",
            fix="Put it into the env: TransformedEnv(env, transform).",
        )

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Transform what the step from `tensordict` `[*B]` gave, `next_tensordict`, in place; return it."""
        return next_tensordict

    def _reset(self, tensordict: TensorDictBase | None, reset_tensordict: TensorDictBase) -> TensorDictBase:
        """Transform reset states `[*B]` in place, of lanes in a mask `"_reset"` `[*B, 1]` if any; return them."""
        return reset_tensordict

    def inv(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Transform what goes the other way: actions on their way to the env, data on its way to a buffer."""
        return tensordict

    def promoted(self, tensordict: TensorDictBase, following: TensorDictBase) -> None:
        """`following`, the root of the next step, was made of `tensordict`: drop what only that needed, in place."""

    def check_later(self, later: Sequence[Transform]) -> None:
        """Refuse transforms that an env applies after this one and that would make what it wrote wrong."""

    def adopt(self, state: Mapping[str, Any]) -> None:
        """Use what a transform of this kind has learned in other envs, without learning on: for an evaluation.

        By default parameters and buffers, and what the transforms inside it adopt. What `get_extra_state` gives, the
        state of those envs (step counts, sums), stays behind: a transform that keeps what it has learned there
        overrides this.

        Parameters
        ----------
        state : mapping
            The other transform's `state_dict()`.
        """
        rest = {name: value for name, value in state.items() if not name.endswith("_extra_state")}
        for place, inner in self.named_modules():
            prefix = f"{place}."
            if place and isinstance(inner, Transform):
                part = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
                if part:
                    inner.adopt(part)
                rest = {name: value for name, value in rest.items() if not name.startswith(prefix)}
        if rest:
            self.load_state_dict(rest, strict=False)

    def transform_fake_tensordict(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The layout `[*B]` of a step, `next` included, after this transform; changed in place."""
        return tensordict

    # -- in a buffer: `inv` on what is written, `sampled` on what is drawn -----------------------------------
    def bind_buffer(self, ring: BufferRows) -> None:
        """Called once by the buffer that this is put on; `ring` holds its rows."""

    def reads_anew(self) -> Collection[Key]:
        """Keys that `sampled` writes without looking at them: a sample need not be read with them."""
        return ()

    def sampled(self, tensordict: TensorDictBase, rows: np.ndarray) -> TensorDictBase:
        """Transform a sample, slice markers and sampler flags in place already.

        Parameters
        ----------
        tensordict : TensorDict ``[N]``
        rows : ndarray int64 ``[N]``
            The ring's rows that were read.
        """
        return self(tensordict)

    # -- specs: observation, state and done as Composites; reward and action as the leaf -------------------
    def transform_observation_spec(self, spec: Composite) -> Composite:
        """The observation spec after this transform; `spec` may be changed in place."""
        return spec

    def transform_state_spec(self, spec: Composite) -> Composite:
        """The state spec (what the env reads besides the action) after this transform."""
        return spec

    def transform_done_spec(self, spec: Composite) -> Composite:
        """The spec of the done flags after this transform."""
        return spec

    def transform_reward_spec(self, spec: TensorSpec) -> TensorSpec:
        """The reward spec after this transform."""
        return spec

    def transform_action_spec(self, spec: TensorSpec) -> TensorSpec:
        """The action spec that the policy sees."""
        return spec

    # -- column face -------------------------------------------------------------------------------
    @property
    def has_columns(self) -> bool:
        """Whether the column face does all that the TensorDict face does.

        It does in a class that says so, `fast = True` in its own body: `bind` and, with `has_batch_pass`, `batch_pass`
        do to rows what it does to tensordicts. A subclass or an object that overrides any method that steps may go
        through, and does not say so itself, is stepped on tensordicts.
        """
        return not self.own_methods

    @property
    def own_methods(self) -> list[str]:
        """The methods of the user's that the column face does not speak for."""
        methods = self.stepping or set(dir(declaring(type(self)))) - OTHER_METHODS
        return sorted(overridden(self, methods))

    def reads(self, schema: Mapping[Key, Field]) -> list[Key]:
        """The keys that it reads, reward and flags under `"next"`.

        Flags are what a batch pass reads; a row op hears of ends from `reset`.
        """
        return _keys_in(self.in_keys, schema)

    def writes(self, schema: Mapping[Key, Field]) -> list[Key]:
        """The keys that it adds or changes, reward and flags under `"next"`."""
        written = _keys_in(self.out_keys, schema)  # all of them where the rows are those after this transform
        return (
            written if len(written) == len(self.out_keys) else _keys_in(self.out_keys, {**schema, **self.plan(schema)})
        )

    def recalls(self) -> list[Key]:
        """The written keys whose last row `bind`'s op reads: later transforms must leave those rows alone."""
        return []

    def plan(self, schema: Mapping[Key, Field]) -> Fields:
        """The root keys that are new or of another shape or dtype after this transform.

        Parameters
        ----------
        schema : mapping of key to Field, which unpacks as (shape, numpy dtype)
            One env's root keys, and its reward and flags under `"next"`.
        """
        roots = {key: kind for key, kind in schema.items() if as_tuple(key)[0] not in (NEXT, RAW)}
        before = Composite({key: Unbounded(shape, torch_dtype(dtype)) for key, (shape, dtype) in roots.items()})
        after = self.transform_observation_spec(before.clone())
        fields = {key: as_field(spec) for key, spec in after.items(True, True)}
        return {key: field for key, field in fields.items() if tuple(schema.get(key, ())) != tuple(field)}

    def bind(self, rows: Rows, n: int) -> RowOp | None:
        """The row face on one batch buffer, or `None` if there is none.

        Parameters
        ----------
        rows : mapping of key to T + 1 arrays `[N, *shape]`
            Row t holds the state that step t starts from. A key whose shape or dtype changes is read from
            `rows[("_raw", key)]` and written to `rows[key]`; consecutive rows of a written key are different
            arrays. `rows[("next", "reward")][t]` is the reward of the step from row t.
        n : int
            N.
        """
        return None

    def batch_pass(self, cols: Columns, fresh: np.ndarray) -> None:
        """The same change made to the whole batch, after the loop.

        Parameters
        ----------
        cols : mapping of key to array `[N, T, *shape]`
            Written in place; a key that is written and not there is added, at the root and under `"next"`.
        fresh : ndarray `[N]` of bool
            The lanes whose row 0 was reset outside the loop (all of them in the first batch).
        """
        raise NotImplementedError

    # -- small shared steps ------------------------------------------------------------------------
    def pairs(self) -> list[tuple[Key, Key]]:
        """`(in_key, out_key)`, one for each value."""
        refuse(
            len(self.in_keys) != len(self.out_keys), f"{type(self).__name__} needs an out_key for each in_key",
            why=f"it has {len(self.in_keys)} in_keys and {len(self.out_keys)} out_keys",
        )  # fmt: skip
        return list(zip(self.in_keys, self.out_keys, strict=True))

    def _row_pairs(self, rows: Rows) -> list[tuple[Sequence[np.ndarray], Sequence[np.ndarray]]]:
        """Return the rows to read and the rows to write of each pair, for `bind`."""
        return [(rows.get((RAW, source), rows[source]), rows[target]) for source, target in self.pairs()]

    def _added(self, spec: Composite, key: Key, leaf: TensorSpec, argument: str) -> Composite:
        """Add a key to `spec`, named by `argument`; raise ArgumentError if it is there."""
        existing = next((other for other in spec.keys(True, True) if _overlap(other, key)), None)
        if existing is not None or as_tuple(key)[0] in TAKEN:
            raise ArgumentError(
                f"{type(self).__name__} would overwrite {show(key)}, which is there already",
                why=f"every env and batch has a {as_tuple(key)[0]} of its own" if existing is None
                else f"the env, or a transform below, shows {show(existing)} as {spec[existing]!r}",
                fix=f"Give it another name: {type(self).__name__}({argument}=...).",
            )  # fmt: skip
        spec[key] = leaf
        return spec

    def _leaf(self, spec: Composite, key: Key) -> TensorSpec:
        """Return the spec of one of `in_keys`; raise ArgumentError for a group of observations, of no one shape."""
        leaf = spec[key]
        if isinstance(leaf, Composite):
            parts = [show((*as_tuple(key), *as_tuple(part))) for part in leaf.keys(True, True)]
            raise ArgumentError(
                f"{type(self).__name__} was given {show(key)}, which is a group of observations",
                why=f"it holds {', '.join(parts) or 'nothing'}", fix="Name those in in_keys, each by itself.",
            )  # fmt: skip
        return leaf

    def _mapped(self, spec: Composite, kind: Callable[[TensorSpec], TensorSpec]) -> Composite:
        """Set each of `out_keys` in `spec` to the `kind` of its in_key's spec; replace only its own."""
        for i, (source, target) in enumerate(zip(self.in_keys, self.out_keys, strict=True)):
            if target in self.in_keys[i + 1 :] or target in self.out_keys[:i]:
                raise ArgumentError(
                    f"{type(self).__name__} would overwrite {show(target)}",
                    why=f"it writes {show(target)} from {show(source)}, and has another use for {show(target)}",
                    fix=f"Give it another name: {type(self).__name__}(out_keys=...), or use two transforms.",
                )
            leaf = kind(self._leaf(spec, source))
            if target in self.in_keys:
                spec[target] = leaf
            else:
                self._added(spec, target, leaf, "out_keys")
        return spec

    def _need(self, tensordict: TensorDictBase | None, key: Key) -> Tensor:
        value = None if tensordict is None else tensordict.get(key, None)
        if value is None:
            keys = () if tensordict is None else tensordict.keys(True, True)
            raise MissingKeyError(
                f"{type(self).__name__} needs {show(key)}",
                why=f"the tensordict holds {', '.join(sorted(map(show, keys))) or 'nothing'}",
                fix="Reset the env first, or name the right key in in_keys.",
            )
        return value


def _overlap(a: Key, b: Key) -> bool:
    """Return True if one of the keys is the other, or lies below it."""
    n = min(len(as_tuple(a)), len(as_tuple(b)))
    return as_tuple(a)[:n] == as_tuple(b)[:n]


def reset_mask(tensordict: TensorDictBase | None, reset_tensordict: TensorDictBase) -> Tensor | None:
    """Return the lanes that restart, bool `[*B, 1]`; `None` for all of them."""
    mask = reset_tensordict.get(RESET, None)
    return tensordict.get(RESET, None) if mask is None and tensordict is not None else mask


def planned(transform: Transform, schema: Mapping[Key, Field]) -> Fields:
    """Return a transform's plan; one of a user's may give pairs of shape and dtype."""
    return {key: Field(*pair) for key, pair in transform.plan(schema).items()}


def put(cols: Columns, key: Key, value: np.ndarray) -> None:
    """Fill the column of `key`, or add it."""
    if key in cols:
        cols[key][...] = value
    else:
        cols[key] = value


def key_list(keys: Sequence[Key]) -> list[Key]:
    """Return keys as they are spelled here; one name is one key."""
    return [unravel(key) for key in ([keys] if isinstance(keys, str) else keys)]


def _keys_in(keys: Sequence[Key], schema: Mapping[Key, Field]) -> list[Key]:
    """Root names as the columns spell them: reward and flags live under `"next"`."""
    return [key if key in schema else under_next(key) for key in keys if key in schema or under_next(key) in schema]
