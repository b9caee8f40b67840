"""Adding batches to a folder of segments, so that what is acknowledged survives a crash at any moment."""

from __future__ import annotations

import contextlib
import json
import time
import warnings
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase

from rlcli import arguments
from rlcli.data.collected.batches import as_json, layout_of, tensors_of
from rlcli.data.collected.folder import FORMAT, METADATA, VERSION, Leftovers, file_name, need_journal, need_next
from rlcli.data.collected.reader import SegmentReader
from rlcli.data.files.disk import Disk
from rlcli.data.files.journal import JOURNAL, Journal, Record, state_name, states
from rlcli.data.files.tensors import encode
from rlcli.errors import ArgumentError, ResourceError
from rlcli.processes.process import uninterrupted
from rlcli.specs.field import Field
from rlcli.typed import Misfit


class SegmentWriter:
    """Adds batches to a folder; a batch is acknowledged when its record is in the journal.

    Parameters
    ----------
    folder : Path or str
        New or empty, unless `resume`.
    metadata : dict, optional
        Anything JSON can hold: env, seed, specs, keys. Kept in the header; what is given on resume is as it was. With
        `compressed` true, bytes (images) are written through lz4.
    resume : bool
        Go on after the last acknowledged batch; what a crash left behind it is moved into a folder ``aside-...``
        here, with a warning.
    commit_seconds : float
        Acknowledge at most this often: a sync takes milliseconds, so small batches share it. 0: each at once;
        inf: only when `commit` is called.
    disk : Disk, optional

    Attributes
    ----------
    count, frames, nbytes : int
        Segments, frames and bytes acknowledged so far.
    pending : list of records
        Written but not yet acknowledged: what a crash would lose.

    Raises
    ------
    ResourceError
        The folder holds segments already, is written by another process, is read-only, or its disk is full.
    DamagedDataError
        The journal was altered, or it is missing, or files are here of commits that it no longer names. Nothing is
        changed then.
    """

    def __init__(
        self,
        folder: Path | str,
        metadata: Mapping[str, Any] | None = None,
        *,
        resume: bool = False,
        commit_seconds: float = 0.0,
        disk: Disk | None = None,
    ) -> None:
        self.folder, self.disk = Path(folder), disk or Disk()
        self.count, self.frames, self.nbytes = 0, 0, 0
        self.commit_seconds = arguments.number("commit_seconds", commit_seconds, endless=True)
        self._committed = time.monotonic()
        self.pending: list[Record] = []
        self._layout: dict[str, Field] | None = None
        self._lanes: list[int] | None = None
        path = self.folder / JOURNAL
        if not resume and path.exists() and path.stat().st_size:
            raise ResourceError(
                "the folder holds segments already", where=str(self.folder),
                fix="Choose another folder, or go on with it (resume=True).",
            )  # fmt: skip
        self.disk.make_folder(self.folder)
        need_journal(self.folder)
        self._journal = Journal(path, self.disk)
        try:
            self._recall(metadata)
        except BaseException:
            self._journal.close()
            raise

    def append(self, batch: TensorDictBase) -> Record:
        """Store one batch, whole or not at all; returns its journal record.

        Raises
        ------
        ArgumentError
            Keys, dtypes, shapes or batch dims before time differ from the first batch's, it has no frame or no time
            dim, or something in it is not a tensor. Nothing is stored.
        ResourceError
            The disk refuses. What was acknowledged before is still there, and the writer can be used again.
        """
        self._journal.need_held()
        layout = layout_of(batch)
        if self._layout is not None and layout != self._layout:
            raise ArgumentError(
                "this batch does not look like the ones before", where=str(self.folder),
                why="; ".join(_differences(self._layout, layout)),
            )  # fmt: skip
        sequence = self.count + len(self.pending)
        name, first = file_name(sequence), self._layout is None
        record = {
            "kind": "segment",
            "sequence": sequence,
            "file": name,
            "batch_size": list(map(int, batch.shape)),
            "names": batch.names,
            "frames": batch.shape.numel(),  # a TensorDict's own numel is never 0
            **({"layout": as_json(layout)} if first else {}),
        }
        self._need_next(record, sequence)
        now = time.monotonic() - self._committed >= self.commit_seconds
        if (self.folder / name).exists():
            self.disk.remove(self.folder / name)  # nobody knows it: an interrupt came when it had just been written
        record |= self.disk.write_file(
            self.folder / name, encode(tensors_of(batch, compress=self._compress)), sync=now
        )._asdict()
        self._layout, self._lanes = layout, record["batch_size"][:-1]
        self.pending.append(record)
        if now:
            self.commit(synced=1)
        return record

    @property
    def waited(self) -> float:
        """Seconds since the last commit."""
        return time.monotonic() - self._committed

    def commit(self, *, synced: int = 0, state: Sequence[bytes | memoryview] | None = None) -> None:
        """Acknowledge all pending segments; the last `synced` of them are known to be on the disk.

        Parameters
        ----------
        state : chunks of bytes, optional
            The content of a file from which the caller can go on after these segments. It is acknowledged with them;
            the one before it stays until the next.

        Raises
        ------
        ResourceError
            The disk refuses; pending segments are taken away again.
        """
        if not self.pending:
            return
        count = self.count + len(self.pending)
        frames = self.frames + sum(record["frames"] for record in self.pending)
        nbytes = self.nbytes + sum(record["size"] for record in self.pending)
        saved, files = self.folder / state_name(count), [self.folder / record["file"] for record in self.pending]
        with uninterrupted():
            try:
                if saved.exists():
                    self.disk.remove(saved)  # nobody knows it: see `append`
                for file in files[: len(files) - synced]:
                    self.disk.sync_file(file)
                if state is not None:
                    self.pending[-1]["state"] = self.disk.write_file(saved, state)._asdict()
                self.disk.sync_folder(self.folder)
                self._journal.append(*self.pending)
            except BaseException:
                with contextlib.suppress(ResourceError):  # the first error is the one to report
                    self._journal.settle()
                    for path in (*files, saved):
                        with contextlib.suppress(ResourceError):
                            self.disk.remove(path)
                self.pending = []
                if not self.count:
                    self._layout = self._lanes = None
                raise
            self.count, self.frames, self.nbytes, self.pending = count, frames, nbytes, []
        self._committed = time.monotonic()
        if state is not None:
            for path in states(self.folder)[:-2]:
                with contextlib.suppress(ResourceError):  # it is acknowledged all the same; the next commit tries again
                    self.disk.remove(path)

    def cut(self, lanes: Sequence[int]) -> None:
        """The episodes that are open in these lanes end here: readers see their last step truncated.

        Only between a resume and the first batch after it.

        Raises
        ------
        ArgumentError
            There is no such lane.
        """
        if lanes and self.count:
            record = {"kind": "cut", "segment": self.count - 1, "lanes": list(map(int, lanes))}
            self._need_next(record, self.count)
            self._journal.append(record)

    def _need_next(self, record: Record, count: int) -> None:
        """Refuse what a reader would refuse."""
        try:
            need_next(record, count, self.frames, self._lanes)
        except Misfit as error:
            raise ArgumentError(
                "this does not go on from the batches before it", where=str(self.folder), why=str(error),
                fix="Append batches [*envs, time] of the same envs, or write to another folder.",
            ) from error  # fmt: skip

    def close(self) -> None:
        """Acknowledge what is pending, say that nothing is missing, and let go of the folder; once."""
        if self._journal.closed:
            return
        try:
            self.commit()
            self._journal.append({"kind": "closed", "segments": self.count, "frames": self.frames})
        finally:
            self._journal.close()

    def __enter__(self) -> SegmentWriter:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.close()
        else:  # after an error the folder stays open-ended, and `resume` goes on
            self._journal.close()

    def _recall(self, metadata: Mapping[str, Any] | None) -> None:
        """Take over what the journal says, or begin it."""
        wanted = _as_json(metadata)
        self._compress = bool((wanted or {}).get("compressed"))
        if not self._journal.end.records:
            self._journal.append(
                {
                    "kind": "header",
                    "format": FORMAT,
                    "version": VERSION,
                    "created": datetime.now().astimezone().isoformat(timespec="seconds"),
                    "metadata": wanted or {},
                }
            )
            self.disk.sync_folder(self.folder)
            return
        said = SegmentReader(self.folder, check_sizes=False)
        said.need_all()
        kept = {key: value for key, value in said.metadata.items() if key in (wanted or ())}
        if wanted is not None and kept != wanted:
            raise ArgumentError(
                "these segments were written with other metadata", where=str(self.folder),
                why=f"differs in {', '.join(_differences(kept, wanted))}",
            )  # fmt: skip
        self.count, self.frames, self.nbytes = len(said), said.frames, said.nbytes
        self._layout, self._lanes = said.layout or None, said.lanes
        if left := Leftovers.of(self.folder, self.count, ()).paths:
            aside = self.disk.set_aside(self.folder, left)
            names = ", ".join(path.name for path in left[:5]) + (", ..." if len(left) > 5 else "")
            warnings.warn(f"{aside}: {names} was written but never acknowledged; moved there", stacklevel=4)


def _as_json(metadata: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if metadata is None:
        return None
    try:
        wanted = json.loads(json.dumps(dict(metadata), allow_nan=False))
        METADATA(wanted)
    except (TypeError, ValueError) as error:  # a misfit is one
        raise ArgumentError("this metadata cannot be kept", where="metadata", why=str(error)) from error
    return wanted


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    names = sorted(set(old) | set(new))
    return [f"{n}: {old.get(n, 'absent')} -> {new.get(n, 'absent')}" for n in names if old.get(n) != new.get(n)]
