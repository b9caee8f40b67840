"""`rlcli collect`: frames to disk, one checksummed segment a batch, in constant memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlcli.config.resolved import to_dict
from rlcli.config.schemas import CollectConfig
from rlcli.data.segments import SegmentWriter
from rlcli.data.segments.layout import JOURNAL
from rlcli.errors import RlcliError, StoppedSafely
from rlcli.jobs.collection import Collection
from rlcli.jobs.found import SEGMENTS, open_lanes
from rlcli.jobs.reporting import closing
from rlcli.jobs.saved import with_command
from rlcli.training.commands import resume_command
from rlcli.training.descriptors import own_descriptors
from rlcli.training.evidence import kept_in
from rlcli.training.run import Run
from rlcli.training.run_folder import create, taken_back
from rlcli.training.run_lock import RunLock
from rlcli.training.signals import StopSignals

COMMIT_EVERY = 1.0  # seconds; a sync takes milliseconds, so small batches share it


@own_descriptors()
def collect(cfg: CollectConfig, overrides: Sequence[str] = ()) -> Run:
    """Collect `total_frames` into a new run folder, which `rlcli.data.open_buffer(run.path)` opens as a replay buffer.

    A batch counts once its segment is on disk (synced once a second); a kill loses at most a second, and
    `resume` goes on after the last frame that counts.

    Raises
    ------
    StoppedSafely
        On SIGTERM or Ctrl-C, with all frames on the disk.
    """
    with StopSignals() as stop:
        run = create(
            to_dict(cfg), verb="collect", recipe=cfg.recipe, seed=cfg.seed, directory=cfg.run.dir, overrides=overrides
        )
        with taken_back(run), RunLock(run.path), kept_in(run.path):
            collection = Collection(cfg, run, stop)
            with collection.reporter:
                fill(collection)
    return run


def fill(collection: Collection) -> None:
    """Write frames until there are `total_frames`, and close the report whatever happens."""
    run, stop, collector = collection.run, collection.stop, collection.collector
    commands = {"read": f"rlcli.data.open_buffer('{run.path}')"}
    with closing(run, collection.reporter, collector, "collect", commands):
        collection.start()
        _write(collection)
        if stop.requested:
            raise StoppedSafely(
                f"stopped by {stop.reason} at {collector.frames:,} frames",
                where=str(run.path),
                why="all of them are on disk",
                fix=f"Go on with: {resume_command(run)}",
            )


def _write(collection: Collection) -> None:
    """Segments, after those that are there; an error names the frames that are on the disk."""
    folder, found = collection.run.path / SEGMENTS, collection.resumed
    frames = 0
    try:
        with SegmentWriter(folder, collection.about, resume=found is not None, commit_seconds=math.inf) as writer:
            if found is not None and found.segments is not None:
                writer.cut(open_lanes(found.segments, collection.cut))
            try:
                _batches(collection, writer)
            finally:
                frames = writer.frames
    except RlcliError as error:
        if frames and (folder / JOURNAL).is_file():  # somebody may have taken the folder away
            error.fix = with_command(error.fix, f"{frames:,} frames are on the disk; go on after them", collection.run)
        raise


def _batches(collection: Collection, writer: SegmentWriter) -> None:
    collector, reporter, clock = collection.collector, collection.reporter, collection.reporter.clock
    try:
        while not collection.stop.requested and (steps := collector.steps_left()):
            with clock("collect"):
                batch = collector.rollout(steps)
            with clock("write"):
                writer.append(batch)
            reporter.batch(batch, reward=collector.raw_reward, done=collector.raw_done)
            reporter.out_of_bounds(collector.lanes.bounds.news())
            if writer.waited >= COMMIT_EVERY:
                with clock("write"):
                    writer.commit(state=collection.state())
        with clock("write"):
            writer.commit(state=collection.state())
    except Exception:
        writer.commit()  # whatever is wrong with this batch, the ones before are good
        raise
