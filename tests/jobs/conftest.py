"""Short training runs in a temporary folder."""

from __future__ import annotations

import pytest
from face import algorithm_of, build_collector, build_env, build_policy, configure

from rlcli.build import train

SHORT = ["total_frames=4096", "collector.frames_per_batch=512", "optim.epochs=2", "run.eval_episodes=0", "console=off"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """`run(*overrides) -> Run`: a training run in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def start(*words: str):
        return train(configure("train", list(words)), list(words))

    return start


@pytest.fixture
def short_run(tmp_path, monkeypatch):
    """`short_run(*overrides) -> Run`: a CartPole run of a few thousand frames."""
    monkeypatch.chdir(tmp_path)

    def run(*overrides: str):
        words = [*SHORT, *overrides]
        return train(configure("train", words), words)

    return run


@pytest.fixture
def weights_after():
    """`weights_after(*overrides) -> flat weights`: the plain loop without folder, report or checkpoint."""

    def run(*overrides: str):
        cfg = configure("train", [*SHORT, *overrides])
        env = build_env(cfg.env, gamma=cfg.value.gamma)
        policy, algorithm = build_policy(cfg, env), algorithm_of(cfg)
        advantage, loss = algorithm.estimator(policy), algorithm.loss(policy, env)
        collector = build_collector(cfg, env, policy, algorithm.keys(loss, advantage, env))
        update = algorithm.update(loss)
        while collector.steps_left():
            done = collector.frames / cfg.total_frames
            update(advantage(collector.rollout(collector.steps_left())), done)
        return update.flat.tensor.detach().clone()

    return run
