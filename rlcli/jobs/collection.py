"""One collecting run: frames to disk, one checksummed segment a batch, in constant memory.

A state stands beside the segments for each of the last two commits, and the journal names it in the record of the last
segment before it. Going on from an older one, or from none, means collecting the segments after it once more and
comparing: what is on the disk is never written again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rlcli.collectors import BaseCollector
from rlcli.config.run_files import SEGMENTS
from rlcli.data.collected import SegmentReader, SegmentWriter
from rlcli.data.collected.folder import JOURNAL, has_header, need_journal
from rlcli.data.files.state import decode_state, encode_state, loading_state
from rlcli.errors import DamagedDataError, RlcliError, StoppedSafely, saying_memory
from rlcli.keys import DONE, TRAJ_IDS
from rlcli.modules import ActorCritic
from rlcli.report.memory import Expected
from rlcli.report.reporter import Reporter
from rlcli.runs import random_streams
from rlcli.runs.folder import FRAMES, Run, note_new, resume_command, with_command
from rlcli.runs.session import closing, report_lost
from rlcli.runs.signals import StopSignals
from rlcli.typed import Misfit, mapping, record, text

COMMIT_EVERY = 1.0  # seconds; a sync takes milliseconds, so small batches share it


def fill(collection: Collection) -> None:
    """Write frames until there are `total_frames`, and close the report whatever happens."""
    run, stop, collector = collection.run, collection.stop, collection.collector
    commands = {"read": f"rlcli.data.open_buffer('{run.path}')"}
    with closing(run, collection.reporter, collector, "collect", commands):
        collection.start()
        _write(collection)
        if stop.requested:
            raise collection.stopped()


def _write(collection: Collection) -> None:
    """Write segments after those that are there; an error names the frames that are on the disk."""
    folder, resumed = collection.run.path / SEGMENTS, collection.resumed
    frames = 0
    note_new(collection.run, FRAMES, SEGMENTS)
    try:
        with (
            saying_memory(),
            SegmentWriter(folder, collection.about, resume=resumed is not None, commit_seconds=math.inf) as writer,
        ):
            if collection.cut and resumed is not None and resumed.segments is not None:
                done = np.atleast_2d(resumed.segments.read(-1).get(DONE).squeeze(-1).numpy())[:, -1]
                writer.cut([lane for lane in collection.cut if not done[lane]])  # those that are open on the disk
            try:
                _batches(collection, writer)
            finally:
                frames = writer.frames
    except RlcliError as error:
        on_disk = frames and (folder / JOURNAL).is_file()  # somebody may have taken the folder away
        if on_disk and not isinstance(error, StoppedSafely):
            error.fix = with_command(error.fix, f"{frames:,} frames are on disk; resume with", collection.run)
        raise


def _batches(collection: Collection, writer: SegmentWriter) -> None:
    collector, reporter, clock = collection.collector, collection.reporter, collection.reporter.clock
    collector.interrupt_by(collection.stop_if_overdue)
    try:
        while not collection.stop.requested and collector.steps_left():
            delivered = collector.deliver(stage=clock)
            with clock("write"):
                for batch in delivered.pieces:
                    writer.append(batch)
            reporter.tally.episodes.interrupt(delivered.gaps)
            workers, restarts = collector.workers, collector.restarts
            reporter.batch(
                delivered.raw,
                reward=delivered.reward,
                done=delivered.done,
                workers=workers,
                restarts=restarts,
                ends=delivered.ends_by(collector.frames),
            )
            reporter.out_of_bounds(collector.out_of_bounds())
            if writer.waited >= COMMIT_EVERY:
                with clock("write"):
                    writer.commit(state=collection.state())
        with clock("write"):
            writer.commit(state=collection.state())
    except Exception:
        writer.commit()  # whatever is wrong with this batch, the ones before are good
        raise


@dataclass(eq=False)
class Collection:
    """Hold one run's collector, policy and reporter."""

    run: Run
    stop: StopSignals
    collector: BaseCollector
    policy: ActorCritic | None
    reporter: Reporter
    kind: Mapping[str, Any]  # the facts that frames of one folder have in common
    made: Mapping[str, Any]  # how a new folder was made, for its header
    max_replay_steps: int
    notes: Callable[[bool], list[str]]  # whether it can be replayed -> lines for its start
    expected: Callable[[], Expected]
    replayable: bool = False  # unknown until the env was tried
    resumed: Found | None = None
    cut: Sequence[int] = ()  # lanes whose open episode on the disk could not be gone on with

    @property
    def about(self) -> dict[str, Any]:
        """Return the header of the segments: what resumed runs must share, and how a new one was made."""
        new = self.resumed is None or self.resumed.segments is None
        return {**self.kind, **(self.made if new else {})}

    def start(self) -> None:
        """Say what was derived, and bring a resumed run to the last frame on the disk."""
        if self.resumed is None:
            self.replayable = self.collector.remember_episodes(self.max_replay_steps)
        lines = [f"run {self.run.path}", *self.notes(self.replayable)]
        with random_streams.kept():
            self.reporter.memory.expected = self.expected()
        self.reporter.workers.begin(self.collector.workers)
        self.reporter.start(*lines)
        if self.resumed is not None and self.resumed.segments is not None:
            self._catch_up(self.resumed.segments, self.resumed.first)

    def stop_if_overdue(self) -> None:
        """Give up the batch in its middle where a signal came some seconds ago."""
        if self.stop.requested and self.stop.overdue:  # asked once a step
            raise self.stopped()

    def stopped(self) -> StoppedSafely:
        """Return the error that ends a run that was asked to stop."""
        frames = self.collector.frames
        return StoppedSafely(
            f"stopped by {self.stop.reason} at {frames:,} frames", where=str(self.run.path),
            why="all of them are on disk" if frames else None, fix=f"Resume with: {resume_command(self.run)}",
        )  # fmt: skip

    # ---- states ------------------------------------------------------------------------------------------------
    def state(self) -> list[bytes | memoryview]:
        """Return what it takes to go on after the last batch, as the content of a safetensors file."""
        return encode_state(
            {
                "collector": self.collector.state_dict(),
                "reporter": self.reporter.state_dict(),
                "random": random_streams.state(),
                "buffers": {} if self.policy is None else dict(self.policy.named_buffers()),
                "config": self.made["config"],
                "versions": self.made["versions"],
            }
        )

    def load(self, found: Found) -> None:
        """Go on from a state; damaged ones that were passed over are named."""
        self.resumed = found
        self.replayable = self.collector.remember_episodes(self.max_replay_steps)
        if found.skipped:
            self.reporter.warn("state", f"skipped: {'; '.join(found.skipped)}", len(found.skipped))
        if found.state:
            with loading_state(self.run.path / SEGMENTS):
                self._take_over(found.state)
                if self.collector.frames != found.frames:
                    raise Misfit(f"the state is of {self.collector.frames:,} frames, not of {found.frames:,}")

    def _take_over(self, state: dict[str, Any]) -> None:
        if self.policy is not None:
            for name, buffer in self.policy.named_buffers():
                buffer.copy_(state["buffers"][name])
        self.reporter.load_state_dict(state["reporter"])
        self._report_lost(self.collector.load_state_dict(state["collector"], replay=self.replayable))
        random_streams.restore(state["random"])  # replaying may have drawn from them

    def _catch_up(self, segments: SegmentReader, first: int) -> None:
        """Collect segments `first...` again without writing them; where that gives others, begin new episodes."""
        exact = self.replayable and not self.cut
        begun = np.array(self.collector.episodes)
        for i in range(first, len(segments)):
            reward, done, ends = None, None, []
            if exact:
                again = self.collector.deliver(segments.record(i)["batch_size"][-1])
                (batch,), reward, done = again.pieces, again.reward, again.done
                ends = again.ends_by(self.collector.frames)
                exact = segments.holds(i, batch)
            if not exact:
                batch, reward, done, ends = segments.read(i), None, None, []
            self.reporter.batch(batch, reward=reward, done=done, ends=ends)
        if not exact and first < len(segments):
            self._begin_anew(segments, first, begun + 1)  # where an episode was over, the next was not counted yet

    def _begin_anew(self, segments: SegmentReader, first: int, episodes: np.ndarray) -> None:
        """Begin new episodes in all envs, under unused ids and seeds; `episodes` int64 ``[lanes]``."""
        ids = []
        for i in range(first, len(segments)):
            batch = segments.read(i)
            if (x := batch.get(TRAJ_IDS, None)) is not None:
                ids.append(int(x.max()))
            episodes = episodes + batch.get(DONE).reshape(len(episodes), -1).sum(1).numpy()
        self.collector.begin_anew(segments.frames, ids, episodes.tolist())
        self._report_lost(list(range(self.collector.envs)))

    def _report_lost(self, lanes: list[int]) -> None:
        self.cut = lanes
        report_lost(self.reporter, lanes)


# ---- where a stopped one goes on ------------------------------------------------------------------------------------
_STATE = record(
    collector=mapping(), reporter=mapping(), random=mapping(), buffers=mapping(), config=mapping(),
    versions=mapping(text()),
)  # fmt: skip


class Found(NamedTuple):
    """Describe the point at which a collecting run stands."""

    segments: SegmentReader | None  # None before the first commit
    first: int  # segments before the state
    frames: int  # in those segments
    state: dict[str, Any]
    skipped: list[str]  # one sentence for each newer state that is damaged


def find_state(run: Run) -> Found:
    """Return a run's newest state that verifies; every segment is read, so damage shows before it goes on."""
    folder = run.path / SEGMENTS
    need_journal(folder)
    if not has_header(folder / JOURNAL):  # killed before it was written
        return Found(None, 0, 0, {}, [])
    segments = SegmentReader(folder)
    segments.need_all()
    for path, why in segments.check():
        if why is not None and path not in [state for _, state in segments.states()]:
            raise DamagedDataError("a segment is damaged", where=str(path), why=why, fix="Restore it from a copy.")
    first, content, skipped = segments.newest_state()
    state: dict[str, Any] = {}
    if content is not None:
        with loading_state(folder):
            state = decode_state(content, str(folder))
            _STATE(state)
    frames = sum(segments.record(i)["frames"] for i in range(first))
    return Found(segments, first, frames, state, skipped)
