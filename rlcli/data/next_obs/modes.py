"""Modes of `memory.next_obs`: how a batch's next observations are built, or read off afterwards.

```
lane 0   a0 a1 a2|b0 b1‖       the true next of a2 is a', lane 0 goes on after b1 from the carrier

full      a1 a2 a' b1 carrier      every one of them, stored beside the observation
exact     ends: a2 -> a', b1 -> the carrier (of a lane that finished in the last step its own end, not the reset);
          all others are the row below
compact   none: a1 a2 . b1 ?       read off the rows below; nobody kept a', and ? is the first row of what follows
```
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlcli.data.next_obs.rows import Rows, Successors
from rlcli.keys import DONE, TRAJ_IDS, Key, delta_key, kept_key, scale_key, under_next
from rlcli.specs import Categorical, MultiCategorical, OneHot, TensorSpec
from rlcli.specs.field import CODED, NONE, OWN, PASS, SHARED, SPARSE, Field, Fields

KEEPS = {"full": OWN, "exact": SHARED, "compact": NONE, "delta": CODED}  # mode -> how next observations are kept
MODES = tuple(KEEPS)


def instead_of(mode: str) -> str:
    """Return the mode to use where this one saves nothing."""
    return "exact" if KEEPS[mode] == CODED else "full"


def of_buffer(mode: str) -> str:
    """Return the mode of a buffer whose rows come in this one."""
    return mode if KEEPS[mode] == SHARED else "full"


def next_in(field: Field, mode: str) -> str:
    """Say how a mode keeps a field's next value; one that a transform's pass writes has a column, or none."""
    if field.next == NONE or KEEPS[mode] == NONE:
        return NONE
    return OWN if field.written == PASS else KEEPS[mode]


def stored(fields: Mapping[Key, Field], mode: str, code: torch.dtype = torch.float16) -> Fields:
    """Return what every row holds in a mode, on torch; of next observations, those that have columns."""
    kept = {key: field for key, field in fields.items() if field.stored and field.written != SPARSE}
    ways = {key: next_in(field, mode) for key, field in fields.items()}
    for key in sorted((key for key in fields if ways[key] in (OWN, CODED)), key=lambda k: fields[k].written != PASS):
        field = Field(*fields[key])
        coded = ways[key] == CODED and _saves(field, code)
        kept |= _coded(key, field, code) if coded else {under_next(key): field}
    return kept


def _saves(field: Field, code: torch.dtype) -> bool:
    from rlcli.transforms.delta_codec import saves  # of one mode

    return saves(field.size, field.dtype, code)


def _coded(key: Key, field: Field, code: torch.dtype) -> Fields:
    """Return the columns of a next observation's difference."""
    from rlcli.transforms.delta_codec import encode

    nothing = field.empty(1).zero_()
    coded = encode(nothing, nothing, code, 1)
    found: Fields = {delta_key(key): Field.of(coded.delta)}
    return found if coded.scale is None else found | {scale_key(key): Field.of(coded.scale)}


def shared(fields: Mapping[Key, Field], mode: str) -> Fields:
    """Return next observations, by their keys, that a mode keeps in the row below and apart from it."""
    return {under_next(key): Field(*field) for key, field in fields.items() if next_in(field, mode) == SHARED}


def overflows(fields: Mapping[Key, Field], mode: str, code: torch.dtype) -> Fields:
    """Return columns for next observations that no difference can stand for."""
    coded = {key: field for key, field in fields.items() if next_in(field, mode) == CODED}
    return {kept_key(key): Field(*field) for key, field in coded.items() if _saves(field, code)}


def choices_of(spec: TensorSpec) -> int | None:
    """Return how many values there are: of a one-hot vector as many as it has numbers, of indices another number."""
    if isinstance(spec, OneHot):
        return spec.n
    if not isinstance(spec, Categorical | MultiCategorical):
        return None
    most = spec.n if isinstance(spec, Categorical) else max(spec.nvec)
    return most + (spec.shape[-1:] == (most,))


def counts_of(fields: Mapping[Key, Field]) -> dict[Key, int]:
    """Return how many values keys have, and their next ones, that are a choice among some."""
    known = {key: field.choices for key, field in fields.items() if field.choices}
    return known | {under_next(key): n for key, n in known.items()}


def build_full(
    now: Mapping[Key, np.ndarray | Tensor],
    after: Mapping[Key, np.ndarray],
    places: Sequence[tuple[int, int]],
    last: Mapping[Key, np.ndarray],
    *,
    batched: bool = True,
) -> dict[Key, Tensor]:
    """Return next observations `[N, T, *F]` as plain tensors: the rows below, the carrier, then the ends.

    Of each key `now` is `[N, T, *F]`; `after` `[N, *F]`, what the lanes start the next batch from; `places` are the
    (t, lane) that ended an episode, in any order, and `last` `[len(places), *F]` their true next observations, empty
    where there are none. Not `batched`: N = 1 is squeezed away.
    """
    where = np.array(places, np.intp).reshape(-1, 2)
    out: dict[Key, Tensor] = {}
    for key, column in now.items():
        column = np.asarray(column)
        following = np.empty_like(column)
        following[:, :-1] = column[:, 1:]
        following[:, -1] = after[key]
        if places:
            following[where[:, 1], where[:, 0]] = last[key]
        tensor = torch.from_numpy(following)
        out[key] = tensor if batched else tensor[0]
    return out


def build_exact(
    now: Mapping[Key, Tensor | np.ndarray],
    after: Mapping[Key, np.ndarray],
    places: Sequence[tuple[int, int]],
    last: Mapping[Key, np.ndarray],
    *,
    batched: bool = True,
) -> dict[Key, Tensor]:
    """Next observations `[N, T, *F]` as `Rows`; parameters as `build_full`.

    `now` should hold the very tensors that the batch holds, or that its are views of: then a change of them
    in place is seen when next observations are read. Arrays work too, but a write to them goes unseen.
    """
    if not now:
        return {}
    lanes, steps = next(iter(now.values())).shape[:2]
    positions, order = places_of_ends(lanes, steps, places)
    ends = Successors(torch.Size((lanes, steps) if batched else (steps,)), torch.from_numpy(positions))
    out: dict[Key, Tensor] = {}
    for key, column in now.items():
        obs = torch.from_numpy(column) if isinstance(column, np.ndarray) else column
        # taking rows copies them: the carrier belongs to the loop, which goes on writing there
        extra = after[key].copy() if order is None else np.concatenate((after[key], last[key]))[order]
        out[key] = Rows.from_ends(obs if batched else obs[0], ends, torch.from_numpy(extra))
    return out


def places_of_ends(lanes: int, steps: int, ends: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the ascending flat positions of all ends, and each one's row in (carrier ++ finals); None: the carrier."""
    borders = np.arange(steps - 1, lanes * steps, steps, dtype=np.int32)
    if not ends:
        return borders, None
    source = {lane * steps + steps - 1: lane for lane in range(lanes)}
    for row, (t, lane) in enumerate(ends, lanes):
        source[lane * steps + t] = row  # a lane that finished in the last step: its own end, not the carrier
    positions = sorted(source)
    return np.array(positions, np.int32), np.array([source[p] for p in positions], np.intp)


def with_next(
    batch: TensorDictBase, keys: Sequence[Key], *, after: TensorDictBase | None = None, fill_value: float | None = None
) -> TensorDictBase:
    """Return a `compact` batch with its next observations; unknown ones are `fill_value` (default NaN)."""
    from rlcli.transforms import NextStateReconstructor
    from rlcli.transforms.stored_rows import ends_of

    ends_of(batch)  # or it is refused
    rows, out, time = batch.select(*keys, DONE, TRAJ_IDS, strict=False), batch.copy(), batch.ndim - 1
    if after is not None and (rows.get(TRAJ_IDS, None) is not None) and after.get(TRAJ_IDS, None) is not None:
        rows = torch.cat((rows, after.select(*rows.keys(True, True))[..., :1]), time)  # type: ignore[assignment]
    value = math.nan if fill_value is None else fill_value
    rows = NextStateReconstructor(keys, source="sample", fill_value=value, strict=False)(rows)
    for key in keys:
        out.set(under_next(key), rows.get(under_next(key)).narrow(time, 0, batch.shape[-1]))
    return out
