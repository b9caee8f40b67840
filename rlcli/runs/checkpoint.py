"""Checkpoints: each a new folder, there whole or not at all, and believed only after its checksums fit.

```
checkpoints/checkpoint_000007/   tensors.safetensors   state.json   manifest.json
             .tmp_000008_4711/   one being written, or what a crash left of it
```
`rlcli.data.files.sealed_folder` says in which order. safetensors and JSON only: loading runs nothing.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from datetime import datetime
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from rlcli.data.files.checkpoint_reader import BUFFER, RANK, STATE, TENSORS, gone, read_manifest, read_state
from rlcli.data.files.checkpoint_reader import FOLDERS as FOLDERS
from rlcli.data.files.disk import Disk, Stamp, stamp_of
from rlcli.data.files.row_files import LiveRows, RowFiles
from rlcli.data.files.sealed_folder import MANIFEST as MANIFEST
from rlcli.data.files.state import flatten, non_finite
from rlcli.data.files.tensors import encode
from rlcli.errors import ArgumentError, ConfigError, DamagedDataError, NumericsError, ResourceError
from rlcli.runs.folder import BEST, CHECKPOINTS, Run, nothing_saved, open_run, start_command


class Checkpoint(NamedTuple):
    """A verified checkpoint, its tensors on the CPU; `skipped`: a sentence for each newer, damaged one."""

    path: Path
    state: dict[str, Any]
    manifest: dict[str, Any]
    skipped: list[str]
    whole: bool = True  # whether it holds what each rank of the learner has of its own

    @property
    def ranks(self) -> int:
        """Return how many ranks the learner of its run had."""
        return int(self.manifest["config"].get("learner", {}).get("world_size", 1))


def save(
    folder: Path | str,
    state: Mapping[str, Any],
    *,
    number: int,
    config: Mapping[str, Any] | None = None,
    versions: Mapping[str, str] | None = None,
    keep: int = 2,
    may_be_infinite: Sequence[str] = (),
    ring: LiveRows | None = None,
    disk: Disk | None = None,
    rank: int = 0,
    ranks: int = 1,
) -> Path:
    """Write the next checkpoint, at `number` frames, a `ring`'s rows as files; keep the newest `keep` that verify.

    `rank` above 0: write what it has of its own, a part of the checkpoint that rank 0 of so many writes next.
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
    about: dict[str, Any] = {
        "number": number,
        "created": datetime.now().astimezone().isoformat(timespec="seconds"),
        "config": dict(config or {}),
        "versions": dict(versions or {}),
    }
    part, before = f"{RANK}{rank}" if rank else "", FOLDERS.paths(folder)
    others = [f"{RANK}{other}" for other in range(1, ranks) if not rank]
    lost = [name for name in others if _number(FOLDERS.draft(folder, name)) != number]
    if lost and before:
        who = " and ".join(name.replace("_", " ") for name in lost)
        raise DamagedDataError(f"{who} saved no part of it", why="the checkpoint before it is whole, and stays")
    before = [path / part for path in before]
    rows = None if ring is None else RowFiles(ring, FOLDERS, before, keep)
    if rows is not None:
        about[BUFFER] = rows.about()

    def fill(path: Path) -> dict[str, Stamp]:
        stamps = {name: disk.write_file(path / name, chunks) for name, chunks in contents.items()}
        if rows is not None:
            stamps |= rows.write(path, about[BUFFER], disk)
        for name in () if lost else others:
            disk.rename(FOLDERS.draft(folder, name), path / name)
            stamps[f"{name}/{MANIFEST}"] = stamp_of(path / name / MANIFEST)
        return stamps

    needed = sum(len(chunk) for chunks in contents.values() for chunk in chunks)
    needed += 0 if rows is None else rows.needed
    return FOLDERS.write(folder, fill, about, needed=needed, keep=keep, disk=disk, part=part, parts=others)


def _number(part: Path) -> int | None:
    """Return the frames that a rank's part is of; None where it has none, or not yet a whole one."""
    try:
        return read_manifest(part)["number"]
    except DamagedDataError:
        return None


def make_room(folder: Path | str) -> list[Path]:
    """Remove all but the newest checkpoint that verifies; return them."""
    return FOLDERS.prune(Path(folder), 1, Disk())


def named(text: PathLike[str] | str) -> Path | None:
    """Return the checkpoint that `RUN:best`, `RUN:FRAMES` or `RUN:CHECKPOINT` names; None where a folder is named."""
    run, _, word = str(text).rpartition(":")
    if not run or Path(text).is_dir() or not Path(run).is_dir():
        return None
    if word == "best":
        if folders := FOLDERS.paths(Path(run) / BEST):
            return folders[-1]
        raise ConfigError(
            "this run has kept no best checkpoint", where=run,
            why="run.keep_best=true keeps it, where run.eval_every says how often to evaluate",
            fix=f"Use {run}, its newest one.",
        )  # fmt: skip
    frames = {str(read_manifest(path)["number"]): path for path in FOLDERS.paths(Path(run) / CHECKPOINTS)}
    path = frames.get(word.replace("_", ""), Path(run) / CHECKPOINTS / word)
    if not (path / MANIFEST).exists():
        existing = ", ".join(f"{path.name} ({at} frames)" for at, path in frames.items())
        raise ConfigError(f"the run has no checkpoint {word!r}", where=run, fix=f"It has {existing or 'none'}.")
    return path


def load_latest(folder: Path | str) -> Checkpoint:
    """Return the newest checkpoint that verifies, with a warning for each damaged one passed over."""
    skipped: list[str] = []
    for path in reversed(FOLDERS.paths(Path(folder))):
        try:
            loaded = load(path)
        except DamagedDataError as error:
            skipped.append(str(error))
            warnings.warn(f"checkpoint skipped: {error}", stacklevel=2)
            continue
        return loaded._replace(skipped=skipped)
    if not skipped:
        raise ResourceError("there is no checkpoint", where=str(folder), why="the run ended before its first one")
    more = f"; and {len(skipped) - 3} more" if len(skipped) > 3 else ""
    raise DamagedDataError("no checkpoint can be read", where=str(folder), why="; ".join(skipped[:3]) + more)


def newest(run: Run) -> Checkpoint:
    """Return the newest checkpoint that verifies; warn if the run has saved a later one that is gone."""
    if (verb := run.info.get("verb")) != "train":
        raise ConfigError("only training runs hold a policy", where=str(run.path), why=f"this is one of rlcli {verb}")
    try:
        loaded = load_latest(run.path / CHECKPOINTS)
    except DamagedDataError as error:
        error.fix = f"Restore one of them from a copy, or start again: {start_command(run)}"
        raise
    except ResourceError:
        raise nothing_saved(run) from None
    if (why := gone_before(loaded)) is not None:
        warnings.warn(f"{run.path}: {why}", stacklevel=2)
    return loaded


def asked_for(text: str) -> Checkpoint:
    """Return the checkpoint that `RUN`, `RUN:FRAMES`, `RUN:best` or its own folder names."""
    path = named(text) or Path(text)
    return load(path) if (path / MANIFEST).exists() else newest(open_run(path))


def gone_before(loaded: Checkpoint) -> str | None:
    """Return `checkpoint_reader.gone` of it; None where a newer one is damaged, which is told already."""
    return None if loaded.skipped else gone(loaded.path)


def load(path: Path | str, rank: int = 0, ranks: int = 1) -> Checkpoint:
    """Return a checkpoint, verified; with what another `rank` of so many saved in place of what rank 0 has alone."""
    path = Path(path)
    manifest = read_manifest(path)
    parts = FOLDERS.parts(manifest)
    found = Checkpoint(path, read_state(path, manifest), manifest, [])
    found = found._replace(whole=len(parts) == found.ranks - 1)
    for part in () if rank else parts:
        FOLDERS.check(path, f"{part}/{MANIFEST}", manifest)
        FOLDERS.need_whole(path / part)
    if rank and found.whole and found.ranks == ranks:
        theirs = path / f"{RANK}{rank}"
        own = read_state(theirs, read_manifest(theirs))
        found.state.update(own | {"update": found.state["update"] | own["update"]})
    return found
