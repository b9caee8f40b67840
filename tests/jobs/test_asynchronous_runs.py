"""Runs whose frames are collected while they learn: how much is learned from them, how late they are, and resumes."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import gymnasium as gym
import pytest
from face import configure, open_run, refused
from test_changes import reseal
from test_off_policy_runs import DQN, SAC
from test_resume import final_state, stop_after
from torch import nn

from rlcli.build import resume
from rlcli.build.policy import choose_threads
from rlcli.collectors import MultiAsyncCollector
from rlcli.collectors.options import AHEAD
from rlcli.envs import GymEnv
from rlcli.errors import ConfigError
from rlcli.learning.loops import Hooks
from rlcli.report import figures

LOUD = ["console=plain", "run.eval_episodes=0", "logger=none"]
TWO = ["collector=multi_async", "collector.num_workers=2"]
IMPALA = [
    "recipe=impala_cartpole", "total_frames=4096", "env.num=4", "collector.frames_per_batch=128",
    "sampler.batch_size=128", *LOUD,
]  # fmt: skip


def said(capsys) -> str:
    """What was printed, its lines as one."""
    return " ".join(capsys.readouterr().out.split())


# ---- updates for each frame --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("task", "each", "collector"), [(DQN, 0.3, TWO), (SAC, 1.0, ["collector=async"])], ids=["dqn, two", "sac, one"]
)
def test_the_replay_ratio_is_kept_and_said(run, capsys, task, each, collector):
    task = [*task, *collector, "total_frames=1500", "console=plain"]
    made = run("run.dir=a", *task, f"optim.updates_per_frame={each}")
    ratio = made.summary["learning"]["replay_ratio"]
    assert ratio == pytest.approx(each, rel=0.02)
    assert made.metrics()[-1]["replay_ratio"] == ratio
    updates = int(final_state(made)["update"]["counters"][0])
    earned = made.summary["frames"] - made.config["collector"]["init_random_frames"]
    assert updates / earned == pytest.approx(ratio)
    out = capsys.readouterr().out
    assert f"updates     {updates:,}, {figures.number(ratio)} per frame (replay ratio)\n" in out
    assert "  lag " in out.split("eta")[0]


def test_no_batch_is_waited_for_while_updates_are_owed_and_none_is_made_unearned(run, monkeypatch):
    seen = []
    collect, after = Hooks.collect, Hooks.after_batch

    def collected(self, collector, iteration):
        seen.append(("collect", None))
        return collect(self, collector, iteration)

    def learned(self, loop, delivered, batch):
        seen.append(("learned", (loop.owed, loop.update.step.made, loop.collector.frames)))
        return after(self, loop, delivered, batch)

    monkeypatch.setattr(Hooks, "collect", collected)
    monkeypatch.setattr(Hooks, "after_batch", learned)
    run("run.dir=a", *DQN, *TWO, "optim.updates_per_frame=0.3")
    assert [name for name, _ in seen[:4]] == ["collect", "learned"] * 2
    for owed, made, frames in (told for name, told in seen if name == "learned"):
        assert 0 <= owed < 1 and made + owed == pytest.approx(0.3 * max(frames - 200, 0))


class Written(gym.Wrapper):
    """Writes a byte for every step."""

    def __init__(self, path):
        super().__init__(gym.make("CartPole-v1"))
        self.path = path

    def step(self, action):
        with open(self.path, "ab") as file:
            file.write(b".")
        return super().step(action)


def test_workers_go_on_while_the_learner_learns_and_not_further_than_it_can_follow(tmp_path):
    def steps(path):
        return path.stat().st_size if path.exists() else 0

    def settled(paths):
        """Once nobody has taken a step for a second."""
        before = None
        while (now := [steps(path) for path in paths]) != before:
            before = now
            time.sleep(1)
        return now

    paths = [tmp_path / "0", tmp_path / "1"]
    makers = [lambda path=path: GymEnv(Written(path)) for path in paths]
    with MultiAsyncCollector(makers, None, frames_per_batch=50) as c:
        for _ in range(3):
            c.next()
        # what was delivered, and what was asked for when the last batch was: two more of each worker, less that one
        assert sum(settled(paths)) == c.frames + (AHEAD * 2 - 1) * 50
        assert max(steps(path) - worker.frames for path, worker in zip(paths, c.workers, strict=True)) == AHEAD * 50


# ---- late weights ------------------------------------------------------------------------------------------------
def test_lag_is_in_the_log_on_the_console_and_in_the_summary(run, capsys):
    made = run("run.dir=a", *IMPALA)
    records, workers = made.metrics(), made.summary["workers"]
    assert len(records) == 32 and all(record["lag"] == int(record["lag"]) >= 0 for record in records)
    largest = max(record["lag"] for record in records)
    assert 1 <= largest == max(worker["largest_lag"] for worker in workers)
    assert sum(worker["frames"] for worker in workers) >= 4096 and [w["restarts"] for w in workers] == [0, 0]
    out = capsys.readouterr().out
    assert "workers     2, of " in out and f"batches at most {largest:.0f} weight version" in out
    assert " lag " in out.split("eta")[0]
    assert "| 1 | 2 to 3 |" in (made.path / "report.md").read_text()


@pytest.mark.parametrize(
    ("envs", "frames", "said_of_it"),
    [
        (9, 505, ["frames_per_batch 63 rounded up to 64, a multiple of 4 envs",
                  "frames_per_batch 63 rounded up to 65, a multiple of 5 envs",
                  "total_frames 505 may be exceeded by up to 4: workers step all their envs"]),
        (8, 506, ["frames_per_batch 63 rounded up to 64, a multiple of 4 envs",
                  "total_frames 506 rounded up to 508, a multiple of 4 envs"]),
    ],
)  # fmt: skip
def test_rounding_is_said_of_the_envs_whose_steps_make_a_batch(envs, frames, said_of_it, run, capsys):
    small = ["collector.frames_per_batch=63", "sampler.batch_size=32"]
    made = run("run.dir=a", *IMPALA, *small, f"env.num={envs}", f"total_frames={frames}")
    out = " ".join(capsys.readouterr().out.split())
    assert all(sentence in out for sentence in said_of_it)
    assert len(re.findall("a multiple of|exceeded by", out)) == len(said_of_it)
    assert frames <= made.summary["frames"] <= frames + 4 and (envs == 9 or made.summary["frames"] == 508)


def test_batches_that_come_too_late_are_said_in_both_reports_and_counted_on_after_a_resume(run, capsys):
    drop = [*IMPALA, "weights.max_lag=0", "weights.on_lag=drop", "run.checkpoint_every=512"]
    with stop_after(16):
        run("run.dir=a", *drop)
    before = open_run("a").summary
    assert before["late_batches"] > 0
    capsys.readouterr()
    made = resume("a")
    late, dropped = (made.summary[name] for name in ("late_batches", "dropped_frames"))
    assert late >= before["late_batches"] and dropped >= before["dropped_frames"] > 0
    assert sum(worker["frames"] for worker in made.summary["workers"]) >= made.summary["frames"] + dropped
    closing = f"{late:,} batches further behind than weights.max_lag and skipped ({dropped:,} frames"
    assert closing in " ".join(capsys.readouterr().out.split())
    report = (made.path / "report.md").read_text()
    assert f"| further behind than `weights.max_lag` | {late:,} | {dropped:,} |" in report
    assert "- frames skipped: not learned from" in report and "- frames collected: by the worker" in report


def test_old_batches_that_nothing_weighs_are_warned_of(run, capsys):
    run("run.dir=a", *IMPALA, "total_frames=512", "value=gae")
    assert "come from older weights, which neither loss=a2c nor value=gae corrects" in said(capsys)
    run("run.dir=b", *IMPALA, "total_frames=512")
    run("run.dir=c", *IMPALA, "total_frames=512", "value=gae", "collector=multi_sync")
    assert "older weights" not in said(capsys)


# ---- resumes -----------------------------------------------------------------------------------------------------
def test_counts_of_an_asynchronous_run_go_on_after_a_resume(run):
    """Which worker is first is chance, so bits are not; frames, updates, episodes and versions are counted on."""
    with stop_after(11):
        run("run.dir=cut", *DQN, *TWO, "total_frames=3000", "optim.updates_per_frame=0.3", "run.checkpoint_every=500")
    cut = final_state(open_run("cut"))
    made = resume("cut")
    state, summary = final_state(made), made.summary
    assert cut["collector"]["frames"] == 11 * 64 and summary["status"] == "done"
    assert summary["frames"] == state["collector"]["frames"] == 3000
    assert summary["learning"]["replay_ratio"] == pytest.approx(0.3, rel=0.02)
    assert int(state["update"]["counters"][0]) == pytest.approx(0.3 * (3000 - 200), abs=1)
    assert state["loop"]["iteration"] == state["collector"]["policy_version"] == 3000 // 64 + 1
    records = made.metrics()
    assert [record["frames"] for record in records] == [1024, 2048, 3000]
    assert summary["learning"]["episodes"] == records[-1]["episodes"] > records[0]["episodes"] > 0
    assert sum(worker["frames"] for worker in summary["workers"]) >= 3000
    assert len(state["buffer"]["rows"]["ring"]) > 0


def test_an_actor_critic_of_many_workers_goes_on_after_a_resume(run):
    with stop_after(9):
        run("run.dir=cut", *IMPALA)
    made = resume("cut")
    assert [record["frames"] for record in made.metrics()] == [128 * k for k in range(1, 33)]
    assert final_state(made)["collector"]["policy_version"] == 32
    assert made.summary["learning"]["episodes"] == made.metrics()[-1]["episodes"]


# ---- threads -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "threads"),
    [
        (["collector=sync"], 16),
        (["collector=multi_sync", "collector.num_workers=4"], 16),
        (["collector=multi_async", "collector.num_workers=4"], 12),
        (["collector=multi_async", "collector.num_workers=20", "env.num=20"], 1),
        (["collector=async"], 15),
        (["collector=async", "threads=3"], 3),
    ],
)
def test_who_learns_gets_the_cores_that_busy_workers_leave(monkeypatch, words, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    cfg = configure("train", words)
    assert choose_threads(cfg, nn.ModuleList([nn.Conv2d(1, 1, 3)])) == threads
    assert choose_threads(cfg, nn.ModuleList([nn.Linear(2, 2)])) == (threads if cfg.threads == 3 else 1)


def test_more_cores_are_another_number_of_threads_only_where_auto_took_all_to_spare(run, monkeypatch):
    with stop_after(2):
        run("run.dir=cut", *IMPALA, "total_frames=512")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    reseal(Path("cut"), versions={"threads": "6", "cores": "8"})
    refused(ConfigError, "62 threads", lambda: resume("cut"))
    reseal(Path("cut"), versions={"threads": "1", "cores": "8"})
    assert resume("cut").summary["status"] == "done"


def test_the_header_says_how_threads_were_dealt_out(run, capsys):
    run("run.dir=a", *IMPALA, "total_frames=256")
    cores = len(os.sched_getaffinity(0))
    assert f"threads 1 (auto) for learning, 1 in each of 2 workers, at the same time; {cores} cores" in said(capsys)
