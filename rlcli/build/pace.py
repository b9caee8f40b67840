"""How fast a run acts and learns on a device: its own policy and update, on envs that stand still, for a moment."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium as gym
import torch

from rlcli.build.algorithm import algorithm_of
from rlcli.build.collector import build_collector, devices, in_this_process
from rlcli.build.device_auto import Timed, on
from rlcli.build.env import build_transforms, make_single
from rlcli.build.plan import learning_of
from rlcli.build.policy import choose_threads
from rlcli.build.trained_run import policy_to_look_at
from rlcli.build.workload import workload_of
from rlcli.config.choices.collect import BatchOptions
from rlcli.config.option import as_choice
from rlcli.config.resolved import from_dict
from rlcli.config.schemas import CollectConfig, Config, is_off_policy
from rlcli.envs.base import EnvBase
from rlcli.envs.gym_env import GymEnv
from rlcli.envs.serial import SerialEnv
from rlcli.envs.transformed import TransformedEnv
from rlcli.errors import in_words
from rlcli.planning.forecast import CPU, of_a_step
from rlcli.planning.tensors import trial_batch, written_by
from rlcli.processes.channel import Channel, packed, unpacked

WARM = 4  # calls before one is timed: two plain ones, a recording, its proof
MOMENT, ROUNDS, ENOUGH = 0.1, 3, 1.0  # seconds of a round at least, rounds at most, seconds after which they end
STEPS = 32  # of all envs in a batch at most


def serve(channel: Channel) -> None:
    """Answer with the pace of each side, or with an error."""
    facts, verb, data, sides = unpacked(channel.receive()[2])
    try:
        facts.learn()
        found: list[Timed] | str = [pace(on(from_dict(verb, data), kind)) for kind in sides]
    except Exception as error:  # whatever a GPU's libraries or a module of the user's raises
        found = in_words(error)
    channel.send(0, 0, packed(found))


def pace(cfg: CollectConfig) -> Timed:
    """Return the device of a run, and how long what it has to do there takes for a frame: acting, and its updates."""
    here, places = in_this_process(cfg), devices(cfg)
    device = places["train_device"] if isinstance(cfg, Config) else places["policy_device"]
    device = torch.device("cpu") if device is None else device
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else (lambda: None)
    c = as_choice(BatchOptions, here.collector)
    frames = min(c.frames_per_batch, STEPS * cfg.env.num)
    short = dataclasses.replace(
        c, frames_per_batch=frames, init_random_frames=0, split_trajs=False, trajs_per_batch=None
    )  # fmt: skip
    endless: Any = dataclasses.replace(here, collector=short, total_frames=10**15)
    with _still(cfg) as env:
        policy = policy_to_look_at(cfg, env)
        torch.set_num_threads(choose_threads(cfg, policy))
        assert policy is not None
        if isinstance(cfg, Config):
            policy.to(device)
        learning, keep = learning_of(cfg, env, policy)
        collector = build_collector(endless, env, policy, keep)
        seconds = 0.0
        if cfg.collector.kind == "sync":  # workers act on the CPU, whoever learns
            seconds = timed(collector.next, wait) / collector.frames_in_batch
        if isinstance(cfg, Config):
            per_frame = cfg.optim.updates_per_frame if is_off_policy(cfg) else cfg.optim.epochs / cfg.sampler.batch_size
            seconds += per_frame * timed(_step(cfg, collector, learning, device), wait)
    return str(device), seconds


def _step(cfg: Config, collector: Any, learning: Any, device: torch.device) -> Callable[[], object]:
    """Return a step on a minibatch of zeros, as the run will make it."""
    asked, loss, estimator = workload_of(cfg).updates, learning.loss, learning.estimator
    assert asked is not None
    rows, _ = of_a_step(asked, collector.rows(cfg.env.num, -(-cfg.collector.frames_per_batch // cfg.env.num)), loss)
    added = {} if estimator is None else written_by(estimator, "full")
    batch = trial_batch(rows.with_states() if loss.recurrent else rows, "full", added, CPU).to(device)
    update = algorithm_of(cfg).update(loss)
    update.begin()
    columns = update.columns(batch)
    return partial(update.on, columns if asked.stored else next(update.minibatches.epoch(columns)))


class _Still(gym.Env):
    """Show always the same."""

    def __init__(self, like: gym.Env, shown: Any) -> None:
        self.observation_space, self.action_space, self.shown = like.observation_space, like.action_space, shown

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        return self.shown, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        return self.shown, 0.0, False, False, {}


@contextlib.contextmanager
def _still(cfg: CollectConfig) -> Iterator[EnvBase]:
    """Yield envs that show what the run's first one does, and cost nothing."""
    with contextlib.closing(make_single(cfg.env)) as first:
        shown, _ = first.gym.reset(seed=0)
        env: EnvBase = SerialEnv(
            cfg.env.num,
            lambda: GymEnv(_Still(first.gym, shown), categorical_action_encoding=True, narrow=True),
        )
        for transform in build_transforms(cfg.env, env, 0.99):
            env = TransformedEnv(env, transform)
        yield env


def timed(call: Callable[[], object], wait: Callable[[], object]) -> float:
    """Return the seconds of a call, many in a row: those of the fastest round."""
    for _ in range(WARM):
        call()
    wait()
    least, began, rounds = math.inf, time.perf_counter(), 0
    while rounds < ROUNDS and time.perf_counter() < began + ENOUGH:
        calls, start = 0, time.perf_counter()
        while time.perf_counter() < start + MOMENT:
            call()
            calls += 1
        wait()
        least, rounds = min(least, (time.perf_counter() - start) / calls), rounds + 1
    return least
