"""What one key of a stored row looks like, and the check that a batch fits the rows stored before it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlcli.errors import ArgumentError
from rlcli.keys import Key, show


@dataclass(frozen=True)
class Field:
    """One key of a row.

    Attributes
    ----------
    dtype : torch dtype
    shape : torch.Size
        Of one row, without batch dims.
    """

    dtype: torch.dtype
    shape: torch.Size

    @classmethod
    def of(cls, column: Tensor, lead: int = 1) -> Field:
        """Of a column `[*lead dims, *F]`."""
        return cls(column.dtype, column.shape[lead:])

    @property
    def width(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self, count: int, device: torch.device | str = "cpu") -> Tensor:
        """`[count, *F]`, uninitialised."""
        return torch.empty((count, *self.shape), dtype=self.dtype, device=device)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def fields_of(columns: Mapping[Key, Tensor], lead: int = 1) -> dict[Key, Field]:
    """The fields of columns `[*lead dims, *F]`."""
    return {key: Field.of(column, lead) for key, column in columns.items()}


def check_fit(fields: Mapping[Key, Field], columns: Mapping[Key, Tensor], lead: torch.Size | None = None) -> None:
    """Refuse columns that are not those that `fields` say.

    Parameters
    ----------
    columns : dict of key to Tensor ``[*lead, *F]``
    lead : torch.Size, optional
        The batch dims, which all columns are known to share; by default one, which is checked.

    Raises
    ------
    ArgumentError
        Keys are missing or new, a dtype or shape differs, or columns differ in length. Nothing was stored.
    """
    if columns.keys() != fields.keys():
        missing = [show(key) for key in fields if key not in columns]
        new = [show(key) for key in columns if key not in fields]
        told = [f"{word} {', '.join(keys)}" for word, keys in (("missing", missing), ("new", new)) if keys]
        raise ArgumentError(
            "the batch has other keys than the rows stored before it",
            why="; ".join(told),
            fix="Give every batch the same keys (batch.select(...)), or call empty(fields=True) on the buffer first.",
        )
    dims = 1 if lead is None else len(lead)
    for key, field in fields.items():
        column = columns[key]
        if column.dtype is not field.dtype or column.shape[dims:] != field.shape:
            raise ArgumentError(
                "a batch does not fit the rows stored before it",
                where=show(key),
                why=f"expected {field} a row, got {Field.of(column, dims)}",
            )
    if lead is None and len({len(column) for column in columns.values()}) > 1:
        sizes = ", ".join(f"{show(key)} {len(column)}" for key, column in columns.items())
        raise ArgumentError("columns differ in length", why=sizes)
