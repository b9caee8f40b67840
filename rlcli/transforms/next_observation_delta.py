"""`next_obs=delta`: what a step changed, at low precision, in the place of the next observation.

```
env side      next.obs  ->  next.delta.obs = next.obs - obs     what policy and env read stays exact
buffer side   next.obs  =   obs + next.delta.obs                also at the ends of trajectories
overflow      next.obs  ->  next.delta_kept.obs                 of rows whose difference the code cannot hold, if asked
```
One class for both sides. What it costs in precision is measured where it is written, and told by `figures`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlcli import arguments
from rlcli.arguments import refuse
from rlcli.errors import ArgumentError, MissingKeyError, NumericsError
from rlcli.keys import (
    DELTA,
    DELTA_PARTS,
    NEXT,
    Key,
    as_tuple,
    delta_key,
    kept_key,
    scale_key,
    show,
    under_next,
    unravel,
)
from rlcli.specs.dtypes import dtype_name
from rlcli.transforms.base import Transform
from rlcli.transforms.delta_codec import (
    FLOAT_CODES,
    Coded,
    RoundTrips,
    bytes_a_row,
    code_of,
    decode,
    encode,
    is_part,
    mark,
    marked,
    rebuilt,
    remove,
    remove_difference,
    saves,
    spread,
)

ON_OVERFLOW = ("raise", "keep")


class NextObservationDelta(Transform):
    """Keep ``("next", "delta", *obs)`` instead of ``("next", *obs)``.

    Parameters
    ----------
    in_keys : sequence of keys, optional
        Observations. By default those for which it saves memory (the others keep their next observation in full); in a
        buffer those that have a difference.
    delta_dtype : torch dtype, default float16
        Of differences of floats: float16; bfloat16, which has the range of float32; or int8, with a float32 scale for
        each row and key under ``("next", "delta_scale", *obs)``. Differences of int32 and int64 are int16, and exact.
    on_overflow : "raise" or "keep"
        What becomes of a row whose difference the dtype cannot hold: an error; or its next observation is kept as it
        is under ``("next", "delta_kept", *obs)``, where all other rows are zeros that take no memory, and counted.
    drop_delta : bool
        In a buffer: leave the differences out of what is sampled.
    restore_dtype : torch dtype or "root"
        In a buffer: the dtype of the next observations that are rebuilt from differences of floats; "root" is that of
        the observation.

    Raises
    ------
    ArgumentError
        Another dtype or `on_overflow`; or, put on an env, keys that would take no less memory than before (uint8
        pixels).
    NumericsError
        While collecting: a difference that the dtype cannot hold (`on_overflow="raise"`), or an observation that is not
        finite. Nothing of that batch is handed out.

    Notes
    -----
    It belongs on the outside of batched envs, and what changes its observations belongs inside it.
    """

    has_batch_pass = True  # the collector computes differences of whole columns when it puts a batch together
    outside_batches = True
    stepping = (
        "_step",
        "_reset",
        "promoted",
        "inv",
        "compress",
    )  # a collector codes whole columns by its other methods

    def __init__(
        self,
        in_keys: Sequence[Key] | None = None,
        *,
        delta_dtype: torch.dtype = torch.float16,
        on_overflow: str = "raise",
        drop_delta: bool = True,
        restore_dtype: torch.dtype | str = "root",
    ) -> None:
        super().__init__(() if in_keys is None else in_keys)
        self.delta_dtype = arguments.choice("delta_dtype", delta_dtype, FLOAT_CODES)
        self.on_overflow = arguments.choice("on_overflow", on_overflow, ON_OVERFLOW)
        floats = isinstance(restore_dtype, torch.dtype) and restore_dtype.is_floating_point
        if restore_dtype != "root" and not floats:
            raise ArgumentError('restore_dtype is a dtype of floats or "root"', why=f"got {restore_dtype!r}")
        self.drop_delta, self.restore_dtype = drop_delta, restore_dtype
        self.chosen = in_keys is not None
        self.keys: list[Key] = list(self.in_keys)  # on an env: those it turns into differences
        self._trips = RoundTrips()
        self._in_buffer = False

    # -- env side ------------------------------------------------------------------------------------------
    def transform_observation_spec(self, spec):
        dims, leaves = len(spec.shape), {unravel(key): leaf for key, leaf in spec.items(True, True)}
        _check_names(leaves)
        if self.chosen:
            for key in self.in_keys:
                refuse(
                    key not in leaves, f"NextObservationDelta was given {show(key)}, which the env does not observe",
                    why=f"it observes {', '.join(map(show, leaves))}",
                )  # fmt: skip
                self._check_saving(key, tuple(leaves[key].shape[dims:]), leaves[key].dtype)
            return spec
        self.keys = [k for k, s in leaves.items() if saves(s.shape[dims:].numel(), s.dtype, self.delta_dtype)]
        if leaves and not self.keys:
            key, leaf = next(iter(leaves.items()))
            self._check_saving(key, tuple(leaf.shape[dims:]), leaf.dtype)
        return spec

    def _check_saving(self, key: Key, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        elements = torch.Size(shape).numel()
        if saves(elements, dtype, self.delta_dtype):
            return
        kind, code = dtype_name(dtype), code_of(dtype, self.delta_dtype)
        cost = "no smaller than itself" if code is None else f"{bytes_a_row(elements, code)} bytes a row"
        raise ArgumentError(
            f"the difference of {show(key)} would save nothing",
            why=f"{list(shape)} {kind} takes {elements * dtype.itemsize} bytes a row, its difference is {cost}",
            fix="Use memory.next_obs=exact (Collector(next_obs='exact')), which keeps every observation once.",
        )

    def check_later(self, later):
        for transform in later:
            changed = [key for key in transform.out_keys if key in self.keys]
            if changed or isinstance(transform, NextObservationDelta):
                raise ArgumentError(
                    "NextObservationDelta is the last transform that writes observations",
                    why=f"{type(transform).__name__} comes after it"
                    + (f" and writes {show(changed[0])}, whose difference would be of other values" if changed else ""),
                    fix="Put NextObservationDelta on the outside, once.",
                )

    def reads(self, schema):
        return []

    def writes(self, schema):
        return []

    def plan(self, schema):
        return {}

    def batch_pass(self, cols, fresh):
        """Nothing: differences are of observations as the batch will show them."""

    def _step(self, tensordict, next_tensordict):
        for key in self.keys:
            obs, after = self._need(tensordict, key), self._need(next_tensordict, key)
            coded, kept = self.code(key, obs, after, tensordict.ndim)
            _put(next_tensordict, key, coded, strip=1)
            if kept is not None:
                next_tensordict.set(kept_key(key)[1:], _dense(kept, after))
        return next_tensordict

    def promoted(self, tensordict, following):
        nested = tensordict.get("next")
        for key in self.keys:
            remove(nested, key)
        for name in DELTA_PARTS:
            following.pop(name, None)

    def transform_fake_tensordict(self, tensordict):
        for key in self.keys:
            obs = tensordict.get(key)
            _put(tensordict, key, encode(obs, obs, self.delta_dtype, tensordict.ndim))
            if self.on_overflow == "keep":
                tensordict.set(kept_key(key), torch.zeros_like(obs))
            remove(tensordict, under_next(key))
        return tensordict

    def code(self, key: Key, obs: Tensor, after: Tensor, batch_dims: int) -> tuple[Coded, Tensor | None]:
        """Code one key's difference `[*B, *F]`, or refuse it; and which rows `[*B]` are marked, where they are kept."""
        if obs.dtype != after.dtype or obs.shape != after.shape:
            raise ArgumentError(
                f"{show(key)} and its next value are not alike, so they have no difference",
                why=f"{list(obs.shape)} {obs.dtype} and {list(after.shape)} {after.dtype}",
            )
        coded = encode(obs, after, self.delta_dtype, batch_dims)
        error = (decode(obs, coded) - after).abs()
        lost = ~torch.isfinite(error) if error.is_floating_point() else error != 0
        lost = lost | marked(coded)  # who reads it takes it for a row that was kept
        lost = lost.flatten(batch_dims).any(-1) if lost.ndim > batch_dims else lost
        keeps, count = self.on_overflow == "keep", int(lost.sum())
        if count:
            _check_finite(key, obs, after)
            if not keeps:
                _refuse(key, obs, after, coded.delta.dtype)
            coded, obs, after, error = mark(coded, lost), obs[~lost], after[~lost], error[~lost]
        worst = float(error.max()) if error.numel() else 0.0
        self._trips.add(key, obs, after, coded.delta.dtype, worst, lost.numel() - count, count)
        return coded, lost if keeps else None

    def figures(self) -> dict[str, dict[str, Any]]:
        """What was measured while differences were written, by key; see `RoundTrips.figures`."""
        return self._trips.figures()

    # -- buffer side ---------------------------------------------------------------------------------------
    def bind_buffer(self, ring):
        self._in_buffer = True

    def inv(self, tensordict):
        """On a buffer: full next observations of what is written become differences; others are stored as they are."""
        return self.compress(tensordict) if self._in_buffer else tensordict

    def compress(
        self, tensordict: TensorDictBase, sparse: Callable[[Tensor, Tensor], Tensor] | None = None
    ) -> TensorDictBase:
        """The batch `[*B]` with differences in the place of its full next observations; a new TensorDict.

        Parameters
        ----------
        sparse : callable, optional
            From bool rows `[*B]` and next observations `[*B, *F]` to what is kept of them where a difference
            overflows; by default a plain tensor, zeros in the other rows.
        """
        _check_names([unravel(key) for key in tensordict.keys(True, True)])
        keys = self.keys or self._worth_it(tensordict)
        out = tensordict.copy()
        for key in keys:
            obs, after = tensordict.get(key, None), tensordict.get(under_next(key), None)
            if after is None or obs is None:
                continue
            if self.chosen:
                self._check_saving(key, tuple(obs.shape[tensordict.ndim :]), obs.dtype)
            if hasattr(after, "extra"):  # put together when it is read, as `next_obs=exact` keeps it
                after = after.full()
            coded, kept = self.code(key, obs, after, tensordict.ndim)
            _put(out, key, coded)
            if kept is not None:
                out.set(kept_key(key), (sparse or _dense)(kept, after))
            remove(out, under_next(key))
        return out

    def _worth_it(self, tensordict: TensorDictBase) -> list[Key]:
        """Return root keys with a next value of the same kind, for which a difference is smaller."""
        keys: list[Key] = []
        for key, obs in tensordict.items(True, True):
            after = tensordict.get(under_next(key), None) if as_tuple(key)[0] != "next" else None
            alike = after is not None and after.shape == obs.shape and after.dtype == obs.dtype
            if alike and saves(obs.shape[tensordict.ndim :].numel(), obs.dtype, self.delta_dtype):
                keys.append(unravel(key))
        return keys

    def forward(self, tensordict):
        """Rebuild the next observations of a batch `[*B]` and drop their differences, in place."""
        nested = tensordict.get(NEXT, None)
        deltas = None if nested is None else nested.get(DELTA, None)
        coded = [] if deltas is None else _coded(deltas, tensordict)
        for key in self.in_keys if self.chosen else coded:
            if key in coded:
                nested.set(key, self._restored(rebuilt(tensordict, key)))
            elif nested is None or nested.get(key, None) is None:
                raise MissingKeyError(
                    f"the batch holds neither {show(delta_key(key))} nor {show(under_next(key))}",
                    fix="Collect with NextObservationDelta on the env, or with next_obs='delta'.",
                )
        if self.drop_delta:
            for key in self.in_keys if self.chosen else coded:
                remove_difference(tensordict, key)
        return tensordict

    def _restored(self, after: Tensor) -> Tensor:
        """Return a rebuilt next observation in the dtype that was asked for; whole numbers stay whole."""
        if self.restore_dtype == "root" or not after.dtype.is_floating_point:
            return after
        return after.to(self.restore_dtype)  # type: ignore[arg-type]

    # -- checkpoints ---------------------------------------------------------------------------------------
    def get_extra_state(self):
        return self._trips.state_dict()

    def set_extra_state(self, state):
        self._trips.load_state_dict(state)

    def __repr__(self) -> str:
        keys = ", ".join(map(show, self.in_keys)) if self.chosen else "all that shrink"
        return f"NextObservationDelta({keys}, {dtype_name(self.delta_dtype)})"


def _check_names(keys: Collection[Key]) -> None:
    """Raise ArgumentError for observations that are called as differences are."""
    for key in keys:
        refuse(
            as_tuple(key)[0] in DELTA_PARTS,
            f"NextObservationDelta cannot be used beside an observation called {show(key)}",
            why=f"differences are kept under next.{as_tuple(key)[0]}",
            fix="Use memory.next_obs=exact (Collector(next_obs='exact')), or give that observation another name.",
        )  # fmt: skip


def _coded(deltas: Any, tensordict: TensorDictBase) -> list[Key]:
    """Return the keys that have a difference in a batch where `deltas` lies under `("next", "delta")`."""
    if not isinstance(deltas, TensorDictBase):  # an observation called so
        return []
    root = [unravel(key) for key in tensordict.keys(True, True)]
    return [key for key in map(unravel, deltas.keys(True, True)) if is_part((DELTA, *as_tuple(key)), root)]


def _put(tensordict: TensorDictBase, key: Key, coded: Coded, strip: int = 0) -> None:
    """Write both parts; `strip=1` where `tensordict` is what lies under `next`."""
    tensordict.set(delta_key(key)[strip:], coded.delta)
    if coded.scale is not None:
        tensordict.set(scale_key(key)[strip:], coded.scale)


def _dense(rows: Tensor, after: Tensor) -> Tensor:
    """Return `after` `[*B, *F]` in some rows (bool `[*B]`), zeros in the others."""
    return torch.where(spread(rows, after), after, torch.zeros_like(after))


# ---- differences that their code cannot hold ----------------------------------------------------------------------
def _refuse(key: Key, obs: Tensor, after: Tensor, code: torch.dtype) -> NoReturn:
    """Raise NumericsError: which change is too large for a code, and what would hold it."""
    change = (after.to(torch.float64) - obs.to(torch.float64)).abs().max().item()
    limit = torch.finfo(code).max if code.is_floating_point else torch.iinfo(torch.int16).max
    if code is torch.int8:
        limit = torch.finfo(torch.float32).max
    elif code.is_floating_point and change <= limit:  # down to the lowest, which marks rows that are kept
        limit = -float(torch.nextafter(torch.tensor(-limit, dtype=code), torch.zeros((), dtype=code)))
    wider = "memory.delta_dtype=bfloat16 or int8, or " if code is torch.float16 else ""
    raise NumericsError(
        f"a step changed {show(key)} by {change:g}, more than {dtype_name(code)} can hold ({limit:g})",
        why="kept as it is, the next observation would be lost",
        fix=f"Use {wider}memory.on_overflow=keep, or memory.next_obs=exact "
        "(NextObservationDelta(delta_dtype=..., on_overflow=...), Collector(next_obs=...)).",
    )  # fmt: skip


def _check_finite(key: Key, *values: Tensor) -> None:
    if not all(bool(torch.isfinite(x).all()) for x in values):
        raise NumericsError(f"{show(key)} is not finite, so a step has no difference to keep", where=show(key))
