"""The files of a checkpoint, read: what `rlcli.runs.checkpoint` writes, and data is found in by whoever wants it.

```
checkpoint_000007/   tensors.safetensors   state.json   manifest.json   rows-00000000.bin ...
            rank_1/  the same, of another rank of a learner: what it has of its own
```
The rows of a buffer are files of their own (`rlcli.data.files.row_files`): in the state stands who reads them. What the
rest means is for those who saved it. Bytes and JSON only: reading runs nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlcli.config.run_files import CHECKPOINTS, SUMMARY, read_run_file, saved_frames
from rlcli.data.files.row_files import ABOUT, NAMES, SavedRows, check_rows
from rlcli.data.files.sealed_folder import MANIFEST, SealedFolders
from rlcli.data.files.state import restore
from rlcli.data.files.tensors import decode
from rlcli.typed import Misfit, mapping, parsed, record, some, text, whole

FORMAT, VERSION = "rlcli-checkpoint", 4
TENSORS, STATE, BUFFER, RANK = "tensors.safetensors", "state.json", "buffer", "rank_"


def _check(manifest: dict[str, Any]) -> None:
    parts = {f"{part}/{MANIFEST}" for part in FOLDERS.parts(manifest)}
    if manifest["files"].keys() != {TENSORS, STATE} | _row_files(manifest) | parts:
        raise Misfit(f"files other than {TENSORS}, {STATE} and rows are named", "files")
    if BUFFER in manifest:
        check_rows(manifest[BUFFER], manifest["files"])


FOLDERS = SealedFolders(
    "checkpoint", "checkpoint", FORMAT, VERSION, rf"tensors\.safetensors|state\.json|{NAMES}|{RANK}[1-9]\d*/{MANIFEST}",
    {"number": whole(), "config": mapping(), "versions": mapping(text())}, {BUFFER: record(**ABOUT)}, _check,
)  # fmt: skip


def read_manifest(path: Path | str) -> dict[str, Any]:
    """Return the manifest of a checkpoint, checked against its own seal."""
    return FOLDERS.manifest(Path(path))


def _row_files(manifest: dict[str, Any]) -> set[str]:
    return {entry["name"] for entry in manifest[BUFFER]["rows"]} if BUFFER in manifest else set()


def read_state(path: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Return what was saved, verified; tensors on the CPU."""
    contents = {name: FOLDERS.read(path, name, manifest) for name in (TENSORS, STATE)}
    for name in _row_files(manifest):
        FOLDERS.check(path, name, manifest)
    tensors = decode(contents[TENSORS], str(path / TENSORS))
    try:
        state = restore(parsed(contents[STATE]), tensors)
        mapping()(state)
        if BUFFER in manifest:
            some(rows=some(columns=mapping(), ring=mapping()))(state.get(BUFFER))
            state[BUFFER]["rows"]["columns"] = SavedRows(path, manifest[BUFFER])
        return state
    except (KeyError, ValueError, TypeError, RecursionError) as error:  # its checksum fits: written by hand
        raise FOLDERS.damaged(path / STATE, str(error)) from error


def gone(path: Path) -> str | None:
    """Say that a run has saved more than its newest checkpoint, `path`, holds (no damage); None: it has not."""
    run, frames = path.absolute().parents[1], read_manifest(path)["number"]
    ours = path.absolute().parent.name == CHECKPOINTS and read_run_file(run, SUMMARY).get("verb") == "train"
    saved = saved_frames(run) if ours else 0
    if frames >= saved:
        return None
    return f"the newest checkpoint is of {frames:,} frames: the run had saved {saved:,}, whose checkpoint is gone"
