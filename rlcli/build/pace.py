"""How fast a run acts and learns on a device: its own policy and update, on envs that stand still, for a moment."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

import gymnasium as gym
import torch

from rlcli.build.algorithm import algorithm_of
from rlcli.build.collector import build_collector, devices, in_this_process
from rlcli.build.env import build_transforms, make_single
from rlcli.build.plan import learning_of
from rlcli.build.policy import choose_threads
from rlcli.build.trained_run import policy_to_look_at
from rlcli.build.workload import workload_of
from rlcli.collectors.base import BaseCollector
from rlcli.collectors.options import steps_of
from rlcli.config.choices.collect import BatchOptions
from rlcli.config.option import as_choice
from rlcli.config.schemas import CollectConfig, Config, is_off_policy
from rlcli.envs.base import EnvBase
from rlcli.envs.gym_env import GymEnv
from rlcli.envs.serial import SerialEnv
from rlcli.envs.transformed import TransformedEnv
from rlcli.errors import in_words
from rlcli.planning.forecast import CPU, Learning, of_a_step
from rlcli.planning.tensors import trial_batch, written_by
from rlcli.processes.channel import Channel, packed, unpacked

WARM = 5  # calls on a GPU before one is timed: plain ones, one that is recorded, and its proof
MOMENT, ROUNDS = 0.1, 3  # seconds of a round at least
STEPS = 32  # of all envs in a batch at most


def serve(channel: Channel) -> None:
    """Answer with the pace of runs that are alike but for their device, or with an error."""
    facts, runs = unpacked(channel.receive()[2])
    try:
        facts.learn()
        found: list[tuple[str, float]] | str = [pace(cfg) for cfg in runs]
    except Exception as error:  # whatever a GPU's libraries or a module of the user's raises
        found = in_words(error)
    channel.send(0, 0, packed(found))


def pace(cfg: CollectConfig) -> tuple[str, float]:
    """Return the device of a run, and how long what it has to do there takes for a frame: acting, and its updates."""
    here, places = in_this_process(cfg), devices(cfg)
    device = places["train_device" if isinstance(cfg, Config) else "policy_device"] or torch.device("cpu")
    c = dataclasses.replace(
        as_choice(BatchOptions, here.collector), init_random_frames=0, split_trajs=False, trajs_per_batch=None,
        frames_per_batch=min(cfg.collector.frames_per_batch, STEPS * cfg.env.num),
    )  # fmt: skip
    endless: Any = dataclasses.replace(here, collector=c, total_frames=10**15)
    env = still(cfg)
    policy = policy_to_look_at(cfg, env)
    assert policy is not None
    torch.set_num_threads(choose_threads(cfg, policy))
    if isinstance(cfg, Config):
        policy.to(device)
    learning, keep = learning_of(cfg, env, policy)
    collector, seconds = build_collector(endless, env, policy, keep), 0.0
    if cfg.collector.kind == "sync":  # workers act on the CPU, whoever learns
        seconds = timed(collector.next, device) / collector.frames_in_batch
    if isinstance(cfg, Config):
        per_frame = cfg.optim.updates_per_frame if is_off_policy(cfg) else cfg.optim.epochs / cfg.sampler.batch_size
        seconds += per_frame * timed(_step(cfg, collector, learning, device), device)
    return str(device), seconds


def _step(cfg: Config, collector: BaseCollector, learning: Learning, device: torch.device) -> Callable[[], object]:
    asked, loss, estimator = workload_of(cfg).updates, learning.loss, learning.estimator
    assert asked is not None
    rows, _ = of_a_step(asked, collector.rows(cfg.env.num, steps_of(cfg.collector.frames_per_batch, cfg.env.num)), loss)
    added = {} if estimator is None else written_by(estimator, "full")
    batch = trial_batch(rows.with_states() if loss.recurrent else rows, "full", added, CPU).to(device)
    update = algorithm_of(cfg).update(loss)
    update.begin()
    columns = update.columns(batch)
    return partial(update.on, columns if asked.stored else next(update.minibatches.epoch(columns)))


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call, many in a row: those of the fastest round."""
    cuda = device.type == "cuda"
    for _ in range(WARM if cuda else 1):
        call()
    least = math.inf
    for _ in range(ROUNDS):
        calls, start = 0, time.perf_counter()
        while time.perf_counter() < start + MOMENT:
            call()
            calls += 1
        if cuda:
            torch.cuda.synchronize(device)
        least = min(least, (time.perf_counter() - start) / calls)
    return least


class _Still(gym.Env):
    def __init__(self, like: gym.Env) -> None:
        self.observation_space, self.action_space = like.observation_space, like.action_space
        self.shown, _ = like.reset(seed=0)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        return self.shown, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        return self.shown, 0.0, False, False, {}


def still(cfg: CollectConfig) -> EnvBase:
    """Return envs that show what the run's first one does, and cost nothing."""
    with contextlib.closing(make_single(cfg.env)) as first:
        shows = _Still(first.gym)
    env: EnvBase = SerialEnv(cfg.env.num, lambda: GymEnv(copy(shows), categorical_action_encoding=True, narrow=True))
    for transform in build_transforms(cfg.env, env, 0.99):
        env = TransformedEnv(env, transform)
    return env
