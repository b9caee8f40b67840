"""`rlcli collect`: frames to disk, one checksummed segment a batch, in constant memory; and what a run of it holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rlcli.collectors.build import build_collector, devices, keys_of
from rlcli.collectors.row_fields import row_specs
from rlcli.config import registry
from rlcli.config.resolved import to_dict
from rlcli.config.run_files import SEGMENTS
from rlcli.config.schemas import CollectConfig
from rlcli.data.collected import SegmentReader, SegmentWriter
from rlcli.data.collected.folder import JOURNAL
from rlcli.data.files.state import encode_state, loading_state
from rlcli.envs.build import build_env
from rlcli.errors import RlcliError, StoppedSafely
from rlcli.jobs.collect_policy import acting_policy
from rlcli.keys import (
    DONE,
    REWARD,
    SAMPLE_LOG_PROB,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    Key,
    as_tuple,
    under_next,
    unravel,
)
from rlcli.modules import ActorCritic
from rlcli.planning.foresee import Learning, expected
from rlcli.processes.memory import process_memory
from rlcli.runs import random_streams
from rlcli.runs.collected import Found, open_lanes
from rlcli.runs.commands import resume_command, with_command
from rlcli.runs.folder import Run
from rlcli.runs.provenance import surroundings
from rlcli.runs.session import REPLAY_NOTICE, begun, closing, lose, notes, reporter_of
from rlcli.runs.signals import StopSignals
from rlcli.specs.numbers import fill_for
from rlcli.typed import Misfit

COMMIT_EVERY = 1.0  # seconds; a sync takes milliseconds, so small batches share it


def collect(cfg: CollectConfig, overrides: Sequence[str] = ()) -> Run:
    """Collect `total_frames` into a new run folder, which `rlcli.data.open_buffer(run.path)` opens as a replay buffer.

    A batch counts once its segment is on disk (synced once a second); a kill loses at most a second, and
    `resume` goes on after the last frame that counts.

    Raises
    ------
    StoppedSafely
        On SIGTERM or Ctrl-C, with all frames on the disk.
    """
    with begun(cfg, "collect", overrides) as (run, stop):
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
        while not collection.stop.requested and collector.steps_left():
            delivered = collector.deliver(stage=clock)
            with clock("write"):
                for batch in delivered.pieces:
                    writer.append(batch)
            reporter.batch(delivered.raw, reward=delivered.reward, done=delivered.done)
            reporter.out_of_bounds(collector.out_of_bounds())
            if writer.waited >= COMMIT_EVERY:
                with clock("write"):
                    writer.commit(state=collection.state())
        with clock("write"):
            writer.commit(state=collection.state())
    except Exception:
        writer.commit()  # whatever is wrong with this batch, the ones before are good
        raise


class Collection:
    """One run's env, policy, collector and reporter.

    Parameters
    ----------
    cfg : CollectConfig
    run : Run
        Its folder.
    stop : StopSignals
    resume_at : int, optional
        Frames of the state that is about to be loaded.
    """

    def __init__(self, cfg: CollectConfig, run: Run, stop: StopSignals, resume_at: int | None = None) -> None:
        self.cfg, self.run, self.stop = cfg, run, stop
        self.imported = process_memory()[0]
        random_streams.seed(cfg.seed)
        threads = cfg.threads if isinstance(cfg.threads, int) else 1  # a few rows a step
        torch.set_num_threads(threads)
        self.env = build_env(cfg.env)
        self.policy = acting_policy(cfg, self.env, run)
        self.observed = observed = [unravel(key) for key in self.env.full_observation_spec.keys(True, True)]
        if cfg.memory.fill_value is not None:
            for key in observed:
                fill_for(key, self.env.full_observation_spec[key].dtype, cfg.memory.fill_value)
        keys = stored_keys(cfg, observed, self.policy)
        self.collector = build_collector(cfg, self.env, self.policy, keys)
        self.reporter = reporter_of(cfg, run, stop, verb="collect", observed=observed, resume_at=resume_at)
        self.replayable: bool | None = None  # unknown until the env was tried
        self.versions = surroundings(threads, devices(cfg).values(), registry.imported)
        self.resumed: Found | None = None
        self.cut: list[int] = []  # lanes whose open episode on the disk could not be gone on with

    @property
    def about(self) -> dict[str, Any]:
        """The header of the segments: what a resumed run must have too, and in a new one what it was made with."""
        new = self.resumed is None or self.resumed.segments is None
        made = {"config": to_dict(self.cfg), "versions": self.versions, "specs": row_specs(self.env)}
        return {**self.kind, **(made if new else {})}

    @property
    def kind(self) -> dict[str, Any]:
        """What frames of one folder have in common."""
        cfg = self.cfg
        lanes = self.env.batch_size.numel()
        about = {"env": cfg.env.id, "seed": cfg.seed, "envs": lanes, "next_obs": cfg.memory.next_obs}
        if cfg.memory.next_obs != "compact":
            return about
        return about | {"fill_value": cfg.memory.fill_value, "observations": [list(as_tuple(k)) for k in self.observed]}

    def start(self) -> None:
        """Say what was derived, and bring a resumed run to the last frame on the disk."""
        collector = self.collector
        lines = [f"run {self.run.path}", *notes(self.cfg, collector)]
        if self.resumed is None:
            self._try_replaying()
        if not self.replayable:
            lines.append(REPLAY_NOTICE)
        with random_streams.kept():
            self.reporter.expect(expected(self.cfg, collector, Learning(self.policy), self.imported))
        self.reporter.start(*lines)
        if self.resumed is not None and self.resumed.segments is not None:
            self._catch_up(self.resumed.segments, self.resumed.first)

    # ---- states ------------------------------------------------------------------------------------------------
    def state(self) -> list[bytes | memoryview]:
        """What it takes to go on after the last batch, as the content of a safetensors file."""
        return encode_state(
            {
                "collector": self.collector.state_dict(),
                "reporter": self.reporter.state_dict(),
                "random": random_streams.state(),
                "buffers": {} if self.policy is None else dict(self.policy.named_buffers()),
                "config": to_dict(self.cfg),
                "versions": self.versions,
            }
        )

    def load(self, found: Found) -> None:
        """Go on from a state; damaged ones that were passed over are named.

        Raises
        ------
        DamagedDataError
            It does not fit this configuration.
        """
        self.resumed = found
        self._try_replaying()
        if found.skipped:
            self.reporter.warn("state", f"passed over: {'; '.join(found.skipped)}", len(found.skipped))
        if found.state:
            with loading_state(self.run.path / SEGMENTS):
                self._take_over(found.state)
                if self.collector.frames != found.frames:
                    raise Misfit(f"the state is of {self.collector.frames:,} frames, not of {found.frames:,}")

    def _try_replaying(self) -> None:
        self.replayable = self.collector.remember_episodes(self.cfg.run.max_replay_steps)

    def _take_over(self, state: dict[str, Any]) -> None:
        if self.policy is not None:
            for name, buffer in self.policy.named_buffers():
                buffer.copy_(state["buffers"][name])
        self.reporter.load_state_dict(state["reporter"])
        self._lose(self.collector.load_state_dict(state["collector"], replay=bool(self.replayable)))
        random_streams.restore(state["random"])  # replaying may have drawn from them

    def _catch_up(self, segments: SegmentReader, first: int) -> None:
        """Collect segments `first...` again without writing them; where that gives others, begin new episodes."""
        exact = bool(self.replayable) and not self.cut
        begun = np.array(self.collector.episodes)
        for i in range(first, len(segments)):
            reward = done = None
            if exact:
                again = self.collector.deliver(segments.record(i)["batch_size"][-1])
                (batch,), reward, done = again.pieces, again.reward, again.done
                exact = segments.holds(i, batch)
            if not exact:
                batch, reward, done = segments.read(i), None, None
            self.reporter.batch(batch, reward=reward, done=done)
        if not exact and first < len(segments):
            self._begin_anew(segments, first, begun + 1)  # where an episode was over, the next was not counted yet

    def _begin_anew(self, segments: SegmentReader, first: int, episodes: np.ndarray) -> None:
        """After the last frame on the disk: new episodes in all lanes, under ids and from seeds that are not there yet.

        `episodes`, int64 ``[lanes]``, are the numbers of those that segment `first` begins with.
        """
        ids = []
        for i in range(first, len(segments)):
            batch = segments.read(i)
            if (x := batch.get(TRAJ_IDS, None)) is not None:
                ids.append(int(x.max()))
            episodes = episodes + batch.get(DONE).reshape(len(episodes), -1).sum(1).numpy()
        self.collector.begin_anew(segments.frames, ids, episodes.tolist())
        self._lose(list(range(self.collector.envs)))

    def _lose(self, lanes: list[int]) -> None:
        self.cut = lanes
        lose(self.reporter, lanes)


def stored_keys(cfg: CollectConfig, observed: list[Key], policy: ActorCritic | None) -> list[Key]:
    """Observations, actions, rewards, ends and ids; what else a policy writes only if `memory.keep` names it."""
    keep: list[Key] = [*observed, *(under_next(key) for key in observed), "action"]
    keep += [SAMPLE_LOG_PROB] if policy is not None and SAMPLE_LOG_PROB in getattr(policy.actor, "out_keys", ()) else []
    keep += [REWARD, DONE, TERMINATED, TRUNCATED, TRAJ_IDS]
    return [*keep, *keys_of(cfg.memory.keep)]
