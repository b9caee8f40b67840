"""A batch as flat columns, what one row of each looks like, and the check that it fits the rows stored before it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor
from torch import Tensor

from rlcli.errors import ArgumentError
from rlcli.keys import Key, as_tuple, show, unravel
from rlcli.specs.dtypes import dtype_name
from rlcli.specs.field import Field

DTYPES = {
    dtype_name(x): x
    for x in vars(torch).values()
    if isinstance(x, torch.dtype) and not str(x).startswith(("torch.q", "torch.bits"))
}


def width_of(fields: Mapping[Key, Field]) -> int:
    """Return the bytes of one row of all of them."""
    return sum(field.width for field in fields.values())


def column_offsets(
    fields: Mapping[Key, Field], rows: int, packed: Sequence[int | None] | None = None
) -> tuple[dict[Key, int], int]:
    """Return where each column of so many rows begins, and bytes of all; `packed`: of those that are packed."""
    offsets, at = {}, 0
    sizes = [None] * len(fields) if packed is None else packed
    for (key, field), size in zip(fields.items(), sizes, strict=True):
        offsets[key] = at
        at += field.width * rows if size is None else size
    return offsets, at


def check_fit(fields: Mapping[Key, Field], columns: Mapping[Key, Tensor], lead: torch.Size | None = None) -> None:
    """Refuse columns `[*lead, *F]` that are not those that `fields` say; without `lead`, of unequal lengths too."""
    if columns.keys() != fields.keys():
        missing = [show(key) for key in fields if key not in columns]
        new = [show(key) for key in columns if key not in fields]
        differences = [f"{word} {', '.join(keys)}" for word, keys in (("missing", missing), ("new", new)) if keys]
        raise ArgumentError(
            "the batch has other keys than the rows stored before it", why="; ".join(differences),
            fix="Give every batch the same keys (batch.select(...)), or call empty(fields=True) on the buffer first.",
        )  # fmt: skip
    dims = 1 if lead is None else len(lead)
    for key, field in fields.items():
        column = columns[key]
        if column.dtype is not field.dtype or column.shape[dims:] != field.shape:
            raise ArgumentError(
                "a batch does not fit the rows stored before it", where=show(key),
                why=f"expected {field} a row, got {Field.of(column, dims)}",
            )  # fmt: skip
    if lead is None and len({len(column) for column in columns.values()}) > 1:
        sizes = ", ".join(f"{show(key)} {len(column)}" for key, column in columns.items())
        raise ArgumentError("columns differ in length", why=sizes)


def listed_fields(fields: Mapping[Key, Field]) -> list[list[Any]]:
    """Return the fields as JSON can hold them: key, dtype, shape."""
    return [[list(as_tuple(key)), dtype_name(field.dtype), list(field.shape)] for key, field in fields.items()]


def read_fields(listed: Sequence[Sequence[Any]]) -> dict[Key, Field]:
    """Return the fields of `listed_fields`; `check_fields` (files/tensors.py) has looked at those of a file."""
    return {unravel(tuple(key)): Field(tuple(shape), DTYPES[dtype]) for key, dtype, shape in listed}


def bytes_of(column: Tensor) -> Tensor:
    """Return the bytes of each row, uint8 ``[N, bytes]``, on the CPU."""
    plain = column.detach().cpu().reshape(len(column), math.prod(column.shape[1:])).contiguous()
    if plain.numel():
        return plain.view(torch.uint8).view(len(column), -1)
    return plain.new_empty((len(column), plain.shape[1] * plain.element_size()), dtype=torch.uint8)


# ---- between a TensorDict and its columns, without the checks that a known layout does not need ---------------------
def columns_of(batch: TensorDictBase) -> dict[Key, Tensor]:
    """Return every leaf of a batch, under its key; lazily conjugated or negated ones as what they stand for."""
    columns: dict[Key, Tensor] = {}
    if type(batch) is not TensorDict or not _collect_leaves(batch, (), columns):
        columns = dict(batch.items(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor))
        for key in columns:
            if "" in as_tuple(key):
                raise ArgumentError("a key has a name", where=repr(key), fix="Rename it (batch.rename_key_(...)).")
    for key, x in columns.items():
        strided = isinstance(x, Tensor) and x.layout is torch.strided
        if not strided or x.is_nested or x.is_meta or x.is_quantized:  # no rows of as many bytes each
            raise ArgumentError(
                f"{show(key)} is not a tensor whose rows have bytes", why=f"it is {_kind_of(x)}",
                fix="Leave the key out (batch.exclude(...), or keep_keys of a collector), or use ListStorage.",
            )  # fmt: skip
        if x.is_conj() or x.is_neg():
            columns[key] = x.resolve_conj().resolve_neg()
    return columns


def _kind_of(x: Any) -> str:
    """Say what it is, for somebody who expected a tensor of rows."""
    if not isinstance(x, Tensor) or x.is_nested:
        return type(x).__name__
    return "a meta tensor" if x.is_meta else f"a tensor of layout {x.layout}, dtype {x.dtype}"


def _collect_leaves(batch: TensorDict, path: tuple[str, ...], out: dict[Key, Tensor]) -> bool:
    """Collect leaves without the iterators of TensorDict, which take longer than all the rest of a small write."""
    for name, value in batch._tensordict.items():
        if name and isinstance(value, Tensor):
            out[(*path, name) if path else name] = value
        elif not name or type(value) is not TensorDict or not _collect_leaves(value, (*path, name), out):
            return False
    return True


def nested(columns: Mapping[Key, Tensor], batch_size: torch.Size, device: torch.device | None = None) -> TensorDict:
    """Return a TensorDict of columns that are known to have this batch size."""
    # the public constructor and `set` check every leaf again, which takes five times as long as all the rest of a
    # sample; given a device, the constructor would ask for the machine's others
    top = TensorDict._new_unsafe({}, batch_size=batch_size)
    top._device = device
    tables: dict[tuple[str, ...], TensorDict] = {(): top}
    for key, column in columns.items():
        if isinstance(key, str):
            top._tensordict[key] = column
            continue
        if key[:-1] not in tables:
            for n in range(1, len(key)):
                if key[:n] not in tables:
                    new = tables[key[:n]] = TensorDict._new_unsafe({}, batch_size=batch_size)
                    new._device = device
                    tables[key[: n - 1]]._tensordict[key[n - 1]] = new
        tables[key[:-1]]._tensordict[key[-1]] = column
    return top
