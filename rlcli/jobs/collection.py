"""Everything one collecting run holds, wired from its configuration."""

from __future__ import annotations

import json
from typing import Any

import torch

from rlcli.builders.collector import build_collector, devices, keys_of
from rlcli.builders.env import build_env
from rlcli.config import registry
from rlcli.config.resolved import to_dict
from rlcli.config.schemas import CollectConfig
from rlcli.data.fitting import fitting
from rlcli.data.segments import SegmentReader
from rlcli.data.state_tree import flatten
from rlcli.data.tensor_file import encode
from rlcli.jobs.collect_policy import acting_policy
from rlcli.jobs.foresee import Learning, expected
from rlcli.jobs.found import SEGMENTS, TREE, Found
from rlcli.jobs.replaying import NOTICE, lose, remember_episodes
from rlcli.jobs.reporting import notes, reporter_of
from rlcli.jobs.row_specs import row_specs
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
from rlcli.report.process import process_memory
from rlcli.specs.fill import fill_for
from rlcli.training import random_streams
from rlcli.training.provenance import surroundings
from rlcli.training.run import Run
from rlcli.training.signals import StopSignals
from rlcli.typed import Misfit


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
            lines.append(NOTICE)
        with random_streams.kept():
            self.reporter.expect(expected(self.cfg, "collect", collector, Learning(self.policy), self.imported))
        self.reporter.start(*lines)
        if self.resumed is not None and self.resumed.segments is not None:
            self._catch_up(self.resumed.segments, self.resumed.first)

    # ---- states ------------------------------------------------------------------------------------------------
    def state(self) -> list[bytes | memoryview]:
        """What it takes to go on after the last batch, as the content of a safetensors file."""
        tree, tensors = flatten(
            {
                "collector": self.collector.state_dict(),
                "reporter": self.reporter.state_dict(),
                "random": random_streams.state(),
                "buffers": {} if self.policy is None else dict(self.policy.named_buffers()),
                "config": to_dict(self.cfg),
                "versions": self.versions,
            }
        )
        text = json.dumps(tree, allow_nan=False).encode()
        return encode({**tensors, TREE: torch.frombuffer(bytearray(text), dtype=torch.uint8)})

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
            with fitting(self.run.path / SEGMENTS):
                self._take_over(found.state)
                if self.collector.frames != found.frames:
                    raise Misfit(f"the state is of {self.collector.frames:,} frames, not of {found.frames:,}")

    def _try_replaying(self) -> None:
        self.replayable = remember_episodes(self.collector, self.cfg.run.max_replay_steps)

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
        for i in range(first, len(segments)):
            reward = done = None
            if exact:
                batch = self.collector.rollout(segments.record(i)["batch_size"][-1])
                exact = segments.holds(i, batch)
                reward, done = self.collector.raw_reward, self.collector.raw_done
            if not exact:
                batch, reward, done = segments.read(i), None, None
            self.reporter.batch(batch, reward=reward, done=done)
        if not exact and first < len(segments):
            self._begin_anew(segments, first)

    def _begin_anew(self, segments: SegmentReader, first: int) -> None:
        """After the last frame on the disk: new episodes in all lanes, under ids that are not there yet."""
        ids = [
            int(x.max()) for i in range(first, len(segments)) if (x := segments.read(i).get(TRAJ_IDS, None)) is not None
        ]
        self.collector.begin_anew(segments.frames, ids)
        self._lose(list(range(self.collector.lanes.n)))

    def _lose(self, lanes: list[int]) -> None:
        self.cut = lanes
        lose(self.reporter, lanes)


def stored_keys(cfg: CollectConfig, observed: list[Key], policy: ActorCritic | None) -> list[Key]:
    """Observations, actions, rewards, ends and ids; what else a policy writes only if `memory.keep` names it."""
    keep: list[Key] = [*observed, *(under_next(key) for key in observed), "action"]
    keep += [SAMPLE_LOG_PROB] if policy is not None and SAMPLE_LOG_PROB in getattr(policy.actor, "out_keys", ()) else []
    keep += [REWARD, DONE, TERMINATED, TRUNCATED, TRAJ_IDS]
    return [*keep, *keys_of(cfg.memory.keep)]
