"""Which keys of a row are packed, and how: chosen by the first batch, changed when a value does not fit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from torch import Tensor

from rlcli.data.codes import bits, from_index, narrow, one_hot
from rlcli.data.codes.code import INDEX, RECORD, Code, Record
from rlcli.data.fields import Field
from rlcli.kernels.codes import layout
from rlcli.keys import Key

_WORTH = 0.1  # of a row's bytes: less is not worth the packing


def choose(
    fields: Mapping[Key, Field], columns: Mapping[Key, Tensor], *, traj_key: Key | None
) -> tuple[Code, ...]:  # fmt: skip
    """The codes for the columns of a first batch.

    Parameters
    ----------
    fields : dict of key to Field
        What is stored of a row.
    columns : dict of key to Tensor ``[N, *F]``
        Those of the first batch that can be looked at.
    traj_key : key or None
        By which the index tells trajectories apart.

    Returns
    -------
    tuple of Code
        None where they would save less than a tenth of a row.
    """
    codes = [code for key, field in fields.items() if (code := _of(key, field, columns, traj_key)) is not None]
    stored = [code for code in codes if code.kind != INDEX]
    now = sum(field.width for field in fields.values())
    saved = sum(fields[code.key].width for code in codes)
    saved -= Record.of(stored, [fields[code.key] for code in stored]).width
    return tuple(codes) if saved >= _WORTH * now and saved > 0 and RECORD not in fields else ()


def _of(key: Key, field: Field, columns: Mapping[Key, Tensor], traj_key: Key | None) -> Code | None:
    if (code := from_index.offer(key, field, traj_key)) is not None or key not in columns:
        return code
    return _first((one_hot.offer, bits.offer, narrow.offer), key, field, columns[key])


def _first(offers: Iterable[Callable[..., Code | None]], key: Key, field: Field, column: Tensor) -> Code | None:
    return next((code for offer in offers if (code := offer(key, field, column)) is not None), None)


def wider(codes: Collection[Code], misfit: Code, field: Field, column: Tensor) -> tuple[Code, ...]:
    """The codes with another for `misfit`, which cannot hold `column`: more bits, more bytes, or none at all."""
    instead = None
    if misfit.kind in (layout.BITS, layout.NARROW) and field.dtype is not torch.bool:
        instead = _first((bits.offer, narrow.offer), misfit.key, field, column)
    return tuple(code if code != misfit else instead for code in codes if code != misfit or instead is not None)  # type: ignore[misc]
