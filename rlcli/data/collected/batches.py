"""A batch as the tensors of a file and back: next observations taken apart, keys as names, and the check that they fit.

```
"observation", "next/reward", ...                        a column each, keys joined by "/", parts percent-encoded
"@ends", "@extra/observation"                            next observations that no row stands for, and where they belong
"@at/next/delta/observation", "@few/next/delta/..."      columns of a few rows only: their numbers, and those rows
```
One-hot rows and frame stacks lie in fewer bytes: `folded.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import quote, unquote

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from rlcli.data.collected.folded import compressed, declared, expanded, folded, plain, unfolded
from rlcli.data.fields import DTYPES, columns_of
from rlcli.data.files.journal import Record
from rlcli.data.next_obs.packing import Packed, pack, unpack
from rlcli.data.next_obs.sparse import Sparse, nothing_of
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
    check_tensors({name: (x.dtype, list(x.shape)) for name, x in tensors.items()}, record["batch_size"], layout)
    tensors = unfolded(expanded(tensors, layout, record["batch_size"]), layout)
    ends = tensors.pop(_ENDS, None)
    extra = {key_of(n.removeprefix(_EXTRA)): tensors.pop(n) for n in list(tensors) if n.startswith(_EXTRA)}
    named = [n.removeprefix(_AT) for n in tensors if n.startswith(_AT)]
    sparse = {key_of(n): Sparse(tensors.pop(_AT + n), tensors.pop(_FEW + n), nothing_of(key_of(n))) for n in named}
    for key, places in sparse.items():
        if len(places.at) and not (int(places.at.min()) >= 0 and int(places.at.max()) < record["frames"]):
            raise Misfit("rows are named that the batch does not have", show(key))
    batch = TensorDict({}, batch_size=record["batch_size"], names=record["names"])
    for name in sorted(tensors):
        batch.set(key_of(name), tensors[name])
    try:
        return unpack(Packed(batch, ends, extra, sparse))
    except ArgumentError as error:
        raise Misfit(str(error)) from error


def check_tensors(
    found: Mapping[str, tuple[torch.dtype, list[int]]], batch_size: list[int], layout: Mapping[str, Field]
) -> None:
    """Refuse named tensors, dtype and shape of each, that are not those of a batch: missing, other, or out of place."""
    found = declared(plain(found, layout, batch_size), layout)
    ends = found[_ENDS][1] if _ENDS in found else []
    for name, (dtype, shape) in found.items():
        key, lead = name, batch_size
        if name == _ENDS:
            if dtype is not torch.int32 or len(shape) != 1:
                raise Misfit(f"int32 [E] was expected, found {dtype} {shape}", name)
            continue
        if name.startswith(_AT):
            if dtype is not torch.int64 or len(shape) != 1 or _FEW + name.removeprefix(_AT) not in found:
                raise Misfit(f"int64 [E] was expected beside its rows, found {dtype} {shape}", name)
            continue
        if name.startswith(_EXTRA):
            key, lead = under_next_name(name.removeprefix(_EXTRA)), ends
            if _ENDS not in found or name.removeprefix(_EXTRA) not in found:
                raise Misfit("its ends or its observations are missing", name)
        elif name.startswith(_FEW):
            key = name.removeprefix(_FEW)
            lead = found[_AT + key][1] if _AT + key in found else [-1]
        if key not in layout:
            raise Misfit("the batches of this folder have no such key", name)
        wanted = (layout[key].dtype, [*lead, *layout[key].shape])
        if (dtype, shape) != wanted:
            raise Misfit(f"{wanted[0]} {wanted[1]} was expected, found {dtype} {shape}", name)
    there = {name.removeprefix(_FEW) for name in found} | {
        under_next_name(name.removeprefix(_EXTRA)) for name in found if name.startswith(_EXTRA)
    }
    if missing := [name for name in layout if name not in there]:
        raise Misfit(f"{', '.join(missing)} is missing")


def name_of(key: Key) -> str:
    """Return what a key's tensor is called in a file."""
    return "/".join(quote(part, safe="") for part in as_tuple(key))


def key_of(name: str) -> Key:
    """Return the key that `name_of` spells."""
    return unravel(tuple(unquote(part) for part in name.split("/")))


def under_next_name(name: str) -> str:
    """Return what the next observation of a key is called, by the key's own name."""
    return f"{NEXT}/{name}"
