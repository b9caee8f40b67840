"""A buffer on disk: its rows, its index, and what its sampler knows; written whole or not at all.

```
folder/dump_000003/   rows-00000000.bin  rows-00000001.bin ...   state.safetensors   manifest.json
rows-*.bin            see `rlcli.data.files.row_files`
state.safetensors     ring (cursor, index, side pool) and what the buffer adds: tensors and JSON
```
The dump before stays until the new one has its name. Files that would be the same as before are links; a storage on
disk gives its full segments: only what is new is written. No pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from rlcli.data.fields import check_fit
from rlcli.data.files.disk import Disk, Stamp
from rlcli.data.files.row_files import ABOUT, NAMES, RowFiles, SavedRows, check_rows
from rlcli.data.files.sealed_folder import SealedFolders
from rlcli.data.files.state import ROWS, decode_state, encode_state, loading_state
from rlcli.errors import ArgumentError, ResourceError
from rlcli.keys import Key
from rlcli.typed import Misfit, held, mapping, record

if TYPE_CHECKING:
    from rlcli.data.ring.contents import Contents
    from rlcli.data.ring.ring import Ring

FORMAT, VERSION, STATE = "rlcli-buffer", 2, "state.safetensors"


def _check(manifest: dict[str, Any]) -> None:
    named = {STATE, *(file["name"] for file in manifest["rows"])}
    if named != manifest["files"].keys():
        raise Misfit(f"{', '.join(sorted(manifest['files']))} are there, {STATE} and rows belong there", "files")
    check_rows(manifest, manifest["files"])


FOLDERS = SealedFolders("dump", "buffer", FORMAT, VERSION, rf"{NAMES}|state\.safetensors", ABOUT, {}, _check)


def dump(
    ring: Ring, folder: Path | str, extra: Mapping[str, Any] | None = None, *, keep: int = 1, disk: Disk | None = None
) -> Path:
    """Write a buffer and `extra` beside the dumps in `folder`, keep the newest `keep`, return the new one's folder."""
    storage, disk = ring.storage, disk or Disk()
    state = encode_state({"ring": ring.state_dict(), "extra": dict(extra or {})})
    storage.commit(ring.content)
    files = RowFiles(ring, FOLDERS, FOLDERS.paths(Path(folder)), keep)
    about = {"created": datetime.now().astimezone().isoformat(timespec="seconds"), **files.about()}

    def fill(path: Path) -> dict[str, Stamp]:
        return {STATE: disk.write_file(path / STATE, state), **files.write(path, about, disk)}

    return FOLDERS.write(Path(folder), fill, about, needed=files.needed + sum(map(len, state)), keep=keep, disk=disk)


def load(
    ring: Ring, folder: Path | str, *, cut: bool = True, take: Callable[[dict[str, Any]], None] | None = None
) -> dict[str, Any]:
    """Fill a ring with the newest dump that verifies; its `extra`, which `take` may refuse before anything changes."""
    while True:
        path, manifest = _newest(Path(folder))
        with FOLDERS.held(path) as there:  # a writer at work may have taken it away since then
            if there:
                return _load(ring, path, manifest, cut, take)


def _load(
    ring: Ring, path: Path, manifest: Mapping[str, Any], cut: bool, take: Callable[[dict[str, Any]], None] | None
) -> dict[str, Any]:
    storage = ring.storage
    storage.need_writable()
    other = [
        f"{name} is {manifest[name]} there, {value} here"
        for name, value in (("max_size", storage.max_size), ("ndim", storage.ndim))
        if manifest[name] != value
    ]
    if other:
        raise ArgumentError(
            "the dump is of a buffer of another shape", where=str(path), why="; ".join(other),
            fix=f"Make the storage with max_size={manifest['max_size']}, ndim={manifest['ndim']}.",
        )  # fmt: skip
    state, rows = read_dump(path), SavedRows(path, manifest)
    if take is not None:
        take(state["extra"])
    with loading_state(path, ROWS):
        take_rows(ring, state["ring"], rows, cut=cut)
    return state["extra"]


def read_dump(path: Path) -> dict[str, Any]:
    """Return what stands in a dump beside its rows: "ring" and "extra"; the caller has compared its checksums."""
    state = decode_state((path / STATE).read_bytes(), str(path / STATE))
    return held(record(ring=mapping(), extra=mapping()), state, path / STATE)


Saved = Mapping[Key, Tensor] | SavedRows | tuple[int, int]
"""Rows that go with a ring's state: columns in the order of their numbers, files, or, of rows that a storage holds,
the number of the first and one past that of the last."""


def read_rows(ring: Ring, state: Mapping[str, Any], saved: Saved) -> Contents:
    """Return what `ring.read_state` makes of a state for these rows; Misfit, ArgumentError: they are none of a ring."""
    contents = ring.read_state(state)
    first, stop = contents.first, contents.first + len(contents)
    stored = contents.columns
    if isinstance(saved, Mapping):
        if saved or first < stop:
            check_fit(stored, saved)
            if any(len(column) != stop - first for column in saved.values()):
                raise Misfit(f"columns of {stop - first} rows were expected")
        return contents
    storage, size = ring.storage, contents.space.size
    fields, capacity, (begin, end) = (
        (saved.fields, size, saved.span) if isinstance(saved, SavedRows) else (storage.fields, storage.capacity, saved)
    )
    if fields != stored or capacity != size:
        raise Misfit("the files and the state of a buffer do not belong together")
    if first < stop and not begin <= first < stop == end:
        raise Misfit(f"steps {begin} to {end} are stored, and the state is of {first} to {stop}")
    return contents


def take_rows(ring: Ring, state: Mapping[str, Any], saved: Saved, *, cut: bool = False) -> None:
    """Give a ring another one's state and rows; where rows cannot be written, it holds none."""
    contents = read_rows(ring, state, saved)
    if isinstance(saved, tuple):
        ring.take_over(contents, cut=cut, here=True)
        return
    coded = contents.coded
    if ring.storage.elsewhere:  # no pass of the host unpacks rows there
        contents.coded = None

    def plain(first: int, columns: Mapping[Key, Tensor]) -> Mapping[Key, Tensor]:
        if coded is None or contents.coded is not None or not columns:
            return columns
        rows = np.arange(first, first + len(next(iter(columns.values())))) % contents.space.size
        return coded.unpack(columns, rows, contents.index)

    try:
        ring.take_over(contents, cut=cut)
        for first, columns in saved if isinstance(saved, SavedRows) else _in_order(ring, saved):
            ring.storage.write(first, plain(first, columns))
        ring.storage.commit(ring.content)
    except BaseException:
        ring.clear(fields=True)
        raise


def resume(ring: Ring) -> bool:
    """Take over what a storage holds from an earlier process, to go on with it or to read it only; whether it did."""
    storage = ring.storage
    with loading_state(storage.where, ROWS):
        saved = storage.saved()
        if saved is not None:
            take_rows(ring, *saved, cut=True)
    return saved is not None


def _in_order(ring: Ring, columns: Mapping[Key, Tensor]) -> Iterator[tuple[int, dict[Key, Tensor]]]:
    """Yield the live rows, given in the order of their row numbers, from the oldest on, with the first's number."""
    first, live = ring.base * ring.lanes, len(ring)
    cut = max(0, live - (ring.storage.capacity - first % ring.storage.capacity))  # from row 0 on lie the newest
    if live:
        yield first, {key: column[cut:] for key, column in columns.items()}
    if cut:
        yield first + live - cut, {key: column[:cut] for key, column in columns.items()}


def _newest(folder: Path) -> tuple[Path, dict[str, Any]]:
    if (path := FOLDERS.newest(folder)) is not None:
        return path, FOLDERS.manifest(path)
    if not folder.is_dir():
        raise ResourceError("there is no such folder", where=str(folder), fix="Give the folder that dumps() wrote.")
    torn = any(path.name.startswith(".tmp_") for path in folder.iterdir())
    raise ResourceError(
        "this is not the folder of a buffer", where=str(folder),
        why="its only dump was never finished" if torn else "it holds no dump",
        fix="Give the folder that dumps() wrote.",
    )  # fmt: skip
