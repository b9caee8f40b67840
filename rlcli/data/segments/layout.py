"""The names in a segments folder: files, format, and a batch's keys as tensor names and back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor
from torch import Tensor

from rlcli.data.journal import Record
from rlcli.data.next_obs.packing import Packed, pack, unpack
from rlcli.data.next_obs.sparse import Few
from rlcli.errors import ArgumentError, DamagedDataError
from rlcli.keys import DONE, TRUNCATED, Key, as_tuple, show, unravel

JOURNAL, SUFFIX, STATE = "journal.jsonl", ".safetensors", "state-"
FORMAT, VERSION = "rlcli-segments", 1
_ENDS, _EXTRA, _AT, _FEW = "@ends", "@extra/", "@at/", "@few/"  # "@" is encoded in keys: no key is called this


def file_name(sequence: int) -> str:
    """What segment number `sequence` is called."""
    return f"{sequence:08d}{SUFFIX}"


def state_name(count: int) -> str:
    """What the file is called that holds the writer's state after `count` segments."""
    return f"{STATE}{count:08d}{SUFFIX}"


def states(folder: Path) -> list[Path]:
    """State files, oldest first."""
    return sorted(path for path in folder.glob(f"{STATE}*{SUFFIX}") if path.stem.removeprefix(STATE).isdigit())


def layout_of(batch: TensorDictBase) -> dict[str, Any]:
    """Key name -> dtype and shape (without batch dims) of every tensor.

    Raises
    ------
    ArgumentError
        A value is not a tensor.
    """
    layout = {}
    for key, value in batch.items(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor):
        if not isinstance(value, Tensor):
            raise ArgumentError(
                f"{show(key)} is not a tensor",
                why=f"it is {type(value).__name__}",
                fix="Leave it out of keep_keys.",
            )
        layout[name_of(key)] = {
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape[batch.ndim :]),
        }
    return dict(sorted(layout.items()))


def tensors_of(batch: TensorDictBase) -> dict[str, Tensor]:
    """A batch as named tensors, next observations taken apart."""
    packed = pack(batch)
    out = {name_of(key): x for key, x in packed.batch.items(include_nested=True, leaves_only=True)}
    if packed.ends is not None:
        out[_ENDS] = packed.ends
        out |= {_EXTRA + name_of(key): x for key, x in packed.extra.items()}
    for key, few in packed.few.items():
        out |= {_AT + name_of(key): few.at, _FEW + name_of(key): few.rows}
    return out


def close_last(batch: TensorDictBase, lanes: Sequence[int]) -> None:
    """Flag the last step of these lanes truncated: their episodes were never gone on with."""
    for key in (TRUNCATED, DONE):
        flag = batch.get(key, None)
        if flag is not None:
            flag[(lanes, -1) if batch.ndim > 1 else -1] = True


def batch_of(tensors: dict[str, Tensor], record: Record) -> TensorDictBase:
    """The inverse of `tensors_of`."""
    ends = tensors.pop(_ENDS, None)
    extra = {key_of(n.removeprefix(_EXTRA)): tensors.pop(n) for n in list(tensors) if n.startswith(_EXTRA)}
    named = [n.removeprefix(_AT) for n in tensors if n.startswith(_AT)]
    few = {key_of(n): Few(tensors.pop(_AT + n), tensors.pop(_FEW + n)) for n in named}
    batch = TensorDict({}, batch_size=record["batch_size"], names=record["names"])
    for name in sorted(tensors):
        batch.set(key_of(name), tensors[name])
    return unpack(Packed(batch, ends, extra, few))


def name_of(key: Key) -> str:
    """What a key's tensor is called in a file."""
    return "/".join(quote(part, safe="") for part in as_tuple(key))


def key_of(name: str) -> Key:
    """The inverse of `name_of`."""
    return unravel(tuple(unquote(part) for part in name.split("/")))


def check_header(record: Record, path: Path) -> None:
    """Refuse a journal of another format or version."""
    found = record.get("format"), record.get("version")
    if found != (FORMAT, VERSION):
        raise DamagedDataError(
            "this journal is not one that this version reads",
            where=str(path),
            why=f"{FORMAT} {VERSION} was expected, found {found[0]} {found[1]}",
        )


def unnamed(folder: Path, count: int) -> list[Path]:
    """Segment files that no record names."""
    return sorted(p for p in folder.glob(f"*{SUFFIX}") if p.stem.isdigit() and int(p.stem) >= count)
