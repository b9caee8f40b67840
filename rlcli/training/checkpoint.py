"""Checkpoints: each a new folder, there whole or not at all, and believed only after its checksums fit.

```
checkpoints/checkpoint_000007/   tensors.safetensors   state.json   manifest.json
             .tmp_000008_4711/   one being written, or what a crash left of it
```
Order: folder, files, sync, manifest (size and checksum of each file, config, versions), sync, rename, sync of
the parent. The newest that verifies is the latest. safetensors and JSON only: loading runs nothing.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from rlcli.data.disk import Disk, Stamp, digest_of, stamp_of
from rlcli.data.tensor_file import decode, encode
from rlcli.errors import ArgumentError, DamagedDataError, NumericsError, ResourceError
from rlcli.training.state_tree import flatten, non_finite, restore

FORMAT, VERSION = "rlcli-checkpoint", 2
TENSORS, STATE, MANIFEST = "tensors.safetensors", "state.json", "manifest.json"
_NAME = re.compile(r"checkpoint_(\d{6,})")
_TEMPORARY, _OLD = ".tmp_", ".old_"


class Checkpoint(NamedTuple):
    """A checkpoint that verified.

    Attributes
    ----------
    path : Path
    state : dict
        As it was saved; tensors on the CPU.
    manifest : dict
        sequence, number, created, config, versions, files.
    skipped : list of str
        One sentence for each newer checkpoint that is damaged.
    """

    path: Path
    state: dict[str, Any]
    manifest: dict[str, Any]
    skipped: list[str]


def save(
    folder: Path | str,
    state: Mapping[str, Any],
    *,
    number: int,
    config: Mapping[str, Any] | None = None,
    versions: Mapping[str, str] | None = None,
    keep: int = 2,
    may_be_infinite: Sequence[str] = (),
    disk: Disk | None = None,
) -> Path:
    """Write the next checkpoint into `folder`, then take away those beyond the newest `keep` that verify.

    Parameters
    ----------
    state : nested dict
        See `rlcli.training.state_tree`.
    number : int
        The frames it stands at. A run that fell back may pass them again: folders have their own count.
    config, versions : dict, optional
        What the run was made with.
    keep : int
        At least 2.
    may_be_infinite : sequence of str
        Names at the top of `state` in which NaN and inf are allowed (statistics, bounds).

    Returns
    -------
    path : Path
        The new checkpoint's folder.

    Raises
    ------
    NumericsError
        A tensor is not finite: nothing is written, the checkpoints before it stay.
    ResourceError
        The disk refuses: the checkpoints before it stay.
    ArgumentError
        `keep` is below 2, or the state holds something that has no place in a file.
    """
    if keep < 2:
        raise ArgumentError("at least 2 checkpoints are kept", why=f"got keep={keep}")
    folder, disk = Path(folder), disk or Disk()
    tree, tensors = flatten(dict(state))
    weights = {name: x for name, x in tensors.items() if name.split("/")[0] not in may_be_infinite}
    if bad := non_finite(weights):
        raise NumericsError(
            "the state is not finite, so no checkpoint was written",
            where=", ".join(bad[:5]),
            why=f"{len(bad)} of {len(tensors)} tensors hold NaN or inf",
        )
    contents: dict[str, list[bytes | memoryview]] = {
        TENSORS: encode(tensors),
        STATE: [json.dumps(tree, allow_nan=False).encode()],
    }
    sequence = max((_sequence(p) for p in list_checkpoints(folder)), default=0) + 1
    temporary = folder / f"{_TEMPORARY}{sequence:06d}_{os.getpid()}"
    disk.make_folder(folder)
    _clear(folder, disk)
    disk.require(folder, sum(len(chunk) for chunks in contents.values() for chunk in chunks))
    try:
        disk.make_folder(temporary)
        files = {name: disk.write_file(temporary / name, chunks) for name, chunks in contents.items()}
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "sequence": sequence,
            "number": number,
            "created": datetime.now().astimezone().isoformat(timespec="seconds"),
            "config": dict(config or {}),
            "versions": dict(versions or {}),
            "files": {name: stamp._asdict() for name, stamp in files.items()},
        }
        disk.write_file(temporary / MANIFEST, [_sealed(manifest)])
        disk.sync_folder(temporary)
        path = folder / f"checkpoint_{sequence:06d}"
        disk.rename(temporary, path)
    except ResourceError:
        if temporary.exists():
            disk.remove(temporary)
        raise
    _prune(folder, keep, disk)
    return path


def load_latest(folder: Path | str) -> Checkpoint:
    """The newest checkpoint that verifies.

    Damaged ones are passed over with a warning each, which names the file and what is wrong with it.

    Raises
    ------
    ResourceError
        There has never been one.
    DamagedDataError
        There are checkpoints, and none verifies.
    """
    skipped: list[str] = []
    for path in reversed(list_checkpoints(Path(folder))):
        try:
            found = load(path)
        except DamagedDataError as error:
            skipped.append(str(error))
            warnings.warn(f"checkpoint passed over: {error}", stacklevel=2)
            continue
        return found._replace(skipped=skipped)
    raise _none_of(folder, skipped)


def latest_number(folder: Path | str) -> int:
    """The number of the newest checkpoint that verifies; raises as `load_latest`, warns of nothing."""
    skipped: list[str] = []
    for path in reversed(list_checkpoints(Path(folder))):
        reason = verify(path)
        if reason is None:
            return read_manifest(path)["number"]
        skipped.append(reason)
    raise _none_of(folder, skipped)


def load(path: Path | str) -> Checkpoint:
    """One checkpoint, verified.

    Raises
    ------
    DamagedDataError
        A file is missing, cut, grown or altered.
    """
    path = Path(path)
    manifest = read_manifest(path)
    contents = {}
    for name, wanted in manifest["files"].items():
        try:
            contents[name] = (path / name).read_bytes()
        except OSError as error:
            raise _damaged(path / name, error.strerror or str(error)) from error
        _compare(path / name, Stamp(len(contents[name]), digest_of(contents[name])), wanted)
    tensors = decode(contents[TENSORS], str(path / TENSORS))
    try:
        state = restore(json.loads(contents[STATE]), tensors)
    except (ValueError, TypeError, RecursionError) as error:  # the checksum fits, so somebody wrote it by hand
        raise _damaged(path / STATE, str(error)) from error
    return Checkpoint(path, state, manifest, [])


def verify(path: Path | str) -> str | None:
    """What is wrong with a checkpoint, in one sentence; None when it is whole. Loads nothing."""
    path = Path(path)
    try:
        for name, wanted in read_manifest(path)["files"].items():
            if not (path / name).is_file():
                raise _damaged(path / name, "it is missing")
            _compare(path / name, stamp_of(path / name), wanted)
    except DamagedDataError as error:
        return str(error)
    return None


def read_manifest(path: Path | str) -> dict[str, Any]:
    """The manifest of a checkpoint, checked against its own seal.

    Raises
    ------
    DamagedDataError
        It is missing or altered, or of a version that is not known here.
    """
    file = Path(path) / MANIFEST
    try:
        raw = file.read_bytes()
        manifest = json.loads(raw)
        body = {key: value for key, value in manifest.items() if key != "seal"}
    except OSError as error:
        raise _damaged(file, error.strerror or str(error)) from error
    except (ValueError, AttributeError) as error:
        raise _damaged(file, "it is not a manifest") from error
    # every byte counts, blanks too: what is read must be exactly what would be written
    if _sealed(body) != raw:
        raise _damaged(file, "it was altered")
    if (body.get("format"), body.get("version")) != (FORMAT, VERSION):
        raise _damaged(file, f"it is {body.get('format')} {body.get('version')}, and {FORMAT} {VERSION} is read here")
    if not isinstance(body.get("files"), dict) or set(body["files"]) != {TENSORS, STATE}:
        raise _damaged(file, f"files other than {TENSORS} and {STATE} are named")  # nothing else is ever opened
    return body


def list_checkpoints(folder: Path | str) -> list[Path]:
    """Checkpoint folders, oldest first, whole or not."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if _NAME.fullmatch(p.name) and p.is_dir()), key=_sequence)


def _sealed(body: Mapping[str, Any]) -> bytes:
    text = json.dumps(body, indent=1, sort_keys=True)
    return (json.dumps({**body, "seal": digest_of(text.encode())}, indent=1, sort_keys=True) + "\n").encode()


def _compare(path: Path, found: Stamp, wanted: Mapping[str, Any]) -> None:
    if found.size != wanted["size"]:
        raise _damaged(path, f"it has {found.size} bytes, {wanted['size']} were written")
    if found.digest != wanted["digest"]:
        raise _damaged(path, "its bytes were altered")


def _prune(folder: Path, keep: int, disk: Disk) -> None:
    """Only good ones count as kept: a damaged checkpoint must not push a good one out."""
    good = 0
    for path in reversed(list_checkpoints(folder)):
        if good >= keep:
            aside = folder / f"{_OLD}{path.name}"
            disk.rename(path, aside)  # half a folder must never look like a checkpoint
            disk.remove(aside)
        else:
            good += verify(path) is None


def _clear(folder: Path, disk: Disk) -> None:
    """What crashes left behind."""
    for path in folder.iterdir():
        if path.name.startswith((_TEMPORARY, _OLD)):
            disk.remove(path)


def _sequence(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def _none_of(folder: Path | str, damaged: list[str]) -> DamagedDataError | ResourceError:
    if damaged:
        more = f"; and {len(damaged) - 3} more" if len(damaged) > 3 else ""
        return DamagedDataError("no checkpoint can be read", where=str(folder), why="; ".join(damaged[:3]) + more)
    return ResourceError(
        "there is no checkpoint",
        where=str(folder),
        why="the run ended before its first one",
        fix="Start it again, with a smaller run.checkpoint_every.",
    )


def _damaged(path: Path, why: str) -> DamagedDataError:
    return DamagedDataError("a checkpoint file is damaged", where=str(path), why=why)
