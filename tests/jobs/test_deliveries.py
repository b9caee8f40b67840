"""Training and `rlcli collect` go through the collector's delivery: hooks, `postproc` and buffers as in any loop."""

from __future__ import annotations

import pytest
from face import algorithm_of, build_collector, build_env, build_policy, configure

from rlcli.build import algorithm, collect, collecting
from rlcli.data import ReplayBuffer, open_buffer
from rlcli.keys import REWARD

SHORT = ["total_frames=1024", "collector.frames_per_batch=256", "run.eval_episodes=0", "console=off"]


class Watch:
    """Sets hooks and a `postproc` on a collector, and keeps what they are given."""

    def __init__(self) -> None:
        self.before, self.pieces = 0, []

    def __call__(self, collector):
        collector.set_pre_collect_hook(self.begin)
        collector.set_post_collect_hook(lambda piece: self.pieces.append(piece.to_tensordict().clone()))
        collector.postproc = self.process
        return collector

    def begin(self) -> None:
        self.before += 1

    def process(self, piece):
        return piece.set(REWARD, piece[REWARD] * 0.5)


@pytest.fixture
def watched(monkeypatch):
    """The collector of the next run is watched."""
    watch = Watch()
    for job in (algorithm, collecting):
        monkeypatch.setattr(job, "build_collector", lambda *given: watch(build_collector(*given)))
    return watch


def same(found: list, expected: list) -> bool:
    keys = [set(x.keys(True, True)) for x in (*found, *expected)]
    return len(found) == len(expected) and len({frozenset(k) for k in keys}) == 1 and all(
        bool((a == b).all()) for a, b in zip(found, expected, strict=True)
    )  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [[], ["collector.trajs_per_batch=5", "collector.deliver_leftovers=true"], ["collector.set_truncated=true"]],
    ids=["batches", "whole trajectories", "truncated"],
)
def test_on_policy_training_learns_from_what_iteration_yields(watched, run, words):
    words = [*SHORT, "recipe=ppo_exact", *words]
    run("run.dir=a", *words)
    cfg, plain = configure("train", words), Watch()
    env = build_env(cfg.env, gamma=cfg.value.gamma)
    policy, way = build_policy(cfg, env), algorithm_of(cfg)
    advantage, loss = way.estimator(policy), way.loss(policy, env)
    collector = plain(build_collector(cfg, env, policy, way.keys(loss, advantage, env)))
    update = way.update(loss)
    for piece in collector:
        update(advantage(piece), (collector.frames - 256) / cfg.total_frames)
    assert watched.before == plain.before > 3 and same(watched.pieces, plain.pieces)


def test_off_policy_training_stores_what_the_hooks_were_shown(watched, run, monkeypatch):
    held, close = [], ReplayBuffer.close
    monkeypatch.setattr(ReplayBuffer, "close", lambda rb: held.append(rb[:]) or close(rb))
    run("run.dir=a", *SHORT, "recipe=dqn_cartpole", "collector.init_random_frames=200", "memory=full")
    (rows,), shown = held, watched.pieces
    assert watched.before == len(shown) > 3
    stored = rows[REWARD].reshape(-1)
    assert len(stored) == 1024 and bool((stored == 0.5).all())  # CartPole gives 1 a step


def test_reported_returns_are_the_envs_own_whatever_postproc_makes_of_rewards(watched, run):
    last = run("run.dir=a", *SHORT, "recipe=ppo_exact").metrics()[-1]
    assert last["batch_return"] == last["batch_length"]


def test_collecting_writes_what_the_hooks_were_shown(watched, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = collect(
        configure("collect", ["total_frames=512", "collector.frames_per_batch=128", "run.dir=a", "console=off"])
    )
    assert watched.before == len(watched.pieces) == 4
    assert bool((open_buffer(made.path)[:][REWARD] == 0.5).all())
