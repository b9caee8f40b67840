"""A batch as the tensors of a file and back: next observations taken apart, keys as names, and the check that they fit.

```
"observation", "next/reward", ...                        a column each, keys joined by "/", parts percent-encoded
"@ends", "@extra/observation"                            next observations that no row stands for, and where they belong
"@at/next/delta/observation", "@few/next/delta/..."      columns of a few rows only: their numbers, and those rows
```

One-hot rows and frame stacks lie in fewer bytes, and come back bit for bit; what a column holds decides, segment by
segment:
```
"@hot/observation"      [*batch] or [E]       where the one is, -1 without; in place of whole numbers [*, n]
"@frame/observation"    [*batch, *F]          the newest frame of each stack, in place of bytes [*batch, k, *F]
"@where/observation"    [H]                   rows whose older frames are not those of the row before, flat
"@older/observation"    [H, k - 1, *F]        those frames
"@lz4/@frame/observation"   [bytes]           any of bytes among these, where a folder is compressed
```
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from urllib.parse import quote, unquote

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from rlcli.data.fields import DTYPES, columns_of
from rlcli.data.files.journal import Record
from rlcli.data.next_obs.packing import Packed, pack, unpack
from rlcli.data.next_obs.pairs import indices_of
from rlcli.data.next_obs.sparse import Sparse, nothing_of
from rlcli.data.storages.frame_column import lz4_block
from rlcli.errors import ArgumentError
from rlcli.keys import DONE, NEXT, TRUNCATED, Key, as_tuple, show, unravel
from rlcli.specs.dtypes import dtype_name
from rlcli.specs.field import Field
from rlcli.typed import Misfit

_ENDS, _EXTRA, _AT, _FEW = "@ends", "@extra/", "@at/", "@few/"  # "@" is encoded in keys: no key is called this


def layout_of(batch: TensorDictBase) -> dict[str, Field]:
    """Return name -> field of every tensor of a batch, by name."""
    return dict(sorted((name_of(key), Field.of(x, batch.ndim)) for key, x in columns_of(batch).items()))


def as_json(layout: Mapping[str, Field]) -> dict[str, dict]:
    """Return a layout as the journal holds it."""
    return {name: {"dtype": dtype_name(field.dtype), "shape": list(field.shape)} for name, field in layout.items()}


def of_json(layout: Mapping[str, Mapping]) -> dict[str, Field]:
    """Return the layout that a journal holds."""
    return {name: Field(tuple(of["shape"]), DTYPES[of["dtype"]]) for name, of in layout.items()}


def tensors_of(batch: TensorDictBase, *, compress: bool = False) -> dict[str, Tensor]:
    """Return a batch as named tensors, next observations taken apart; with `compress` bytes go through lz4."""
    packed = pack(batch)
    out = {name_of(key): x for key, x in packed.batch.items(include_nested=True, leaves_only=True)}
    if packed.ends is not None:
        out[_ENDS] = packed.ends
        out |= {_EXTRA + name_of(key): x for key, x in packed.extra.items()}
    for key, sparse in packed.sparse.items():
        out |= {_AT + name_of(key): sparse.at, _FEW + name_of(key): sparse.rows}
    parts = {part: x for name, column in out.items() for part, x in folded(name, column, batch.shape).items()}
    return dict(compressed(name, x) for name, x in parts.items()) if compress else parts


def close_last(batch: TensorDictBase, lanes: Sequence[int]) -> None:
    """Flag the last step of these lanes (envs, numbered over all dims before time) truncated: nothing follows there."""
    last = [*np.unravel_index(lanes, batch.shape[:-1]), -1] if batch.ndim > 1 else [-1]
    for key in (TRUNCATED, DONE):
        flag = batch.get(key, None)
        if flag is not None:
            flag[tuple(last)] = True


def batch_of(tensors: dict[str, Tensor], record: Record, layout: Mapping[str, Field]) -> TensorDictBase:
    """Return the batch that `tensors_of` took apart, laid out by `layout_of`; Misfit: they are not its tensors."""
    try:
        batch = _rebuilt(tensors, record, layout)
        if layout_of(batch) == layout:
            return batch
    except Misfit:
        raise
    except (ArgumentError, AssertionError, LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise Misfit(str(error)) from error
    raise Misfit("it holds other columns than the batches of this folder")


def _rebuilt(tensors: Mapping[str, Tensor], record: Record, layout: Mapping[str, Field]) -> TensorDictBase:
    tensors = unfolded(expanded(tensors, record["batch_size"], layout), layout)
    ends = tensors.pop(_ENDS, None)
    extra = {key_of(n.removeprefix(_EXTRA)): tensors.pop(n) for n in list(tensors) if n.startswith(_EXTRA)}
    named = [n.removeprefix(_AT) for n in tensors if n.startswith(_AT)]
    sparse = {key_of(n): Sparse(tensors.pop(_AT + n), tensors.pop(_FEW + n), nothing_of(key_of(n))) for n in named}
    for key, (at, rows, _) in sparse.items():
        within = at.shape == rows.shape[:1] and (not len(at) or 0 <= int(at.min()) <= int(at.max()) < record["frames"])
        if at.dtype is not torch.int64 or not within:
            raise Misfit("rows are named that the batch does not have", show(key))
    batch = TensorDict({}, batch_size=record["batch_size"], names=record["names"])
    for name in sorted(tensors):
        batch.set(key_of(name), tensors[name])
    return unpack(Packed(batch, ends, extra, sparse))


def _layout_name(column: str) -> str:
    """Return the name in a layout of what a column stands for, or has other rows of."""
    if column.startswith(_EXTRA):
        return f"{NEXT}/{column.removeprefix(_EXTRA)}"
    return column.removeprefix(_FEW)


def name_of(key: Key) -> str:
    """Return what a key's tensor is called in a file."""
    return "/".join(quote(part, safe="") for part in as_tuple(key))


def key_of(name: str) -> Key:
    """Return the key that `name_of` spells."""
    return unravel(tuple(unquote(part) for part in name.split("/")))


# ---- columns in fewer bytes, and back --------------------------------------------------------------------------------
HOT, FRAME, WHERE, OLDER, LZ4 = "@hot/", "@frame/", "@where/", "@older/", "@lz4/"
_INDEX = {torch.uint8: torch.int16, torch.int16: torch.int16, torch.int32: torch.int32, torch.int64: torch.int32}
_FEWEST = 16  # values of a choice that is worth it
_DEEPEST = 64  # frames of a stack
_LEAST, _MOST = 1 << 10, 1 << 30  # bytes that are compressed together


def folded(name: str, x: Tensor, batch: torch.Size) -> dict[str, Tensor]:
    """Return the tensors that stand for a column ``[*batch, *F]``, or for other rows ``[E, *F]``, in a file."""
    apart = name.startswith("@")
    lead = x.shape[:1] if apart else batch
    if x.dtype in _INDEX and x.shape[:-1] == lead and _FEWEST <= x.shape[-1] < 1 << 15:
        places = indices_of(x.reshape(-1, x.shape[-1]))
        if places is not None:
            return {HOT + name: places.to(_INDEX[x.dtype]).reshape(x.shape[:-1])}
    depth = len(batch)
    if x.dtype is torch.uint8 and not apart and x.ndim >= depth + 3 and 2 <= x.shape[depth] <= _DEEPEST:
        rows = x.reshape(-1, *batch[-1:], *x.shape[depth:])  # [L, T, k, *F]
        begins = torch.ones(rows.shape[:2], dtype=torch.bool)
        begins[:, 1:] = (rows[:, 1:, :-1] != rows[:, :-1, 1:]).flatten(2).any(2)
        where = begins.reshape(-1).nonzero().squeeze(1)
        if 2 * len(where) < begins.numel():
            older = rows.flatten(0, 1)[where, :-1]
            newest = x.select(depth, -1).contiguous()
            return {FRAME + name: newest, WHERE + name: where.to(torch.int32), OLDER + name: older.contiguous()}
    return {name: x}


def compressed(name: str, x: Tensor) -> tuple[str, Tensor]:
    """Return a tensor of a file, bytes in fewer of them."""
    if x.dtype is not torch.uint8 or not _LEAST <= x.numel() <= _MOST or name.startswith("@few/"):
        return name, x
    packed = lz4_block().compress(x.contiguous().numpy(), store_size=False)
    return LZ4 + name, torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def expanded(tensors: Mapping[str, Tensor], batch: list[int], layout: Mapping[str, Field]) -> dict[str, Tensor]:
    """Return the tensors of a file, none compressed; Misfit: bytes that are not what was compressed."""
    if not any(name.startswith(LZ4) for name in tensors):
        return dict(tensors)
    lz4 = lz4_block()
    out = {}
    for packed, x in tensors.items():
        name = packed.removeprefix(LZ4)
        if name in out:
            raise Misfit("it is there twice", name)
        out[name] = x
        if name == packed:
            continue
        column = name.removeprefix(FRAME).removeprefix(OLDER)
        shape = layout[_layout_name(column)].shape
        if name.startswith(OLDER):
            shape = (len(tensors[WHERE + column]), shape[0] - 1, *shape[1:])
        else:
            shape = (*([len(tensors[_ENDS])] if column.startswith(_EXTRA) else batch), *shape[name.startswith(FRAME) :])
        try:
            made = lz4.decompress(x.numpy(), uncompressed_size=math.prod(shape))
        except (lz4.LZ4BlockError, ValueError, MemoryError) as error:
            raise Misfit(str(error), packed) from error
        out[name] = torch.frombuffer(bytearray(made), dtype=torch.uint8).reshape(shape)
    return out


def unfolded(tensors: Mapping[str, Tensor], layout: Mapping[str, Field]) -> dict[str, Tensor]:
    """Return the columns that tensors stand for; Misfit: an index or row is none, or a column is there twice."""
    out: dict[str, Tensor] = {}
    folds = [name.removeprefix(HOT).removeprefix(FRAME) for name in tensors if not name.startswith((WHERE, OLDER))]
    if len(set(folds)) < len(folds):
        raise Misfit(f"a column is there twice: {', '.join(sorted(folds))}")
    for name, x in tensors.items():
        if name.startswith(HOT):
            name = name.removeprefix(HOT)
            (count,), wanted = layout[_layout_name(name)]
            places = x.reshape(-1, 1).long()
            if places.numel() and not (int(places.min()) >= -1 and int(places.max()) < count):
                raise Misfit(f"an index is none of {count}", HOT + name)
            rows = torch.zeros((len(places), count), dtype=wanted)
            out[name] = rows.scatter_(1, places.clamp(min=0), (places >= 0).to(wanted)).reshape(*x.shape, count)
        elif name.startswith(FRAME):
            name = name.removeprefix(FRAME)
            out[name] = _stacks(name, x, tensors[WHERE + name].long(), tensors[OLDER + name])
        elif not name.startswith((WHERE, OLDER)):
            out[name] = x
    return out


def _stacks(name: str, newest: Tensor, where: Tensor, older: Tensor) -> Tensor:
    """Stack ``[*batch, k, *F]``: frame j of row t is the newest of t - (k - 1 - j), or before its first row."""
    frames = older.shape[1] + 1
    depth = newest.ndim - older.ndim + 2
    lead, count = newest.shape[:depth], math.prod(newest.shape[:depth])
    if not len(where) or int(where[0]) or bool((where.diff() <= 0).any()) or int(where[-1]) >= count:
        raise Misfit("the rows that begin stacks are not in order", name)
    row = torch.arange(count)
    first = torch.searchsorted(where, row, right=True) - 1
    begun = where[first, None]
    at = row[:, None] - torch.arange(frames - 1, -1, -1)
    apart = count + first[:, None] * (frames - 1) + frames - 1 + at - begun
    pool = torch.cat((newest.flatten(0, depth - 1), older.flatten(0, 1)))
    return pool[torch.where(at >= begun, at, apart)].reshape(*lead, frames, *newest.shape[depth:])
