"""Options of `device`, `logger`, `console` and `run`; and the tree of all groups, a dataclass for each verb with a job.

`Config` is what `rlcli train` composes and `CollectConfig` what `rlcli collect` does; the rest of the program sees
instances of these and nothing of Hydra. A train config is a collect config with more in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlcli.config.choices import TRAIN
from rlcli.config.choices.collect import CollectorConfig, EnvConfig, PolicyConfig, WeightsConfig
from rlcli.config.choices.loss import LossConfig, OptimConfig, ValueConfig
from rlcli.config.choices.rows import MemoryConfig, SamplerConfig, StorageConfig
from rlcli.config.option import Group, option
from rlcli.config.problem import Problem

_DEVICE = "device for {}; null follows the choice of `device`"


@dataclass
class DeviceConfig(Group):
    """Where things live. `split` steps envs on the CPU and acts and learns on the accelerator."""

    kind: str = option("auto", "which device choice this is", choices=("auto", "cpu", "cuda", "mps", "split"))
    env_device: str | None = option(None, _DEVICE.format("env outputs"))
    policy_device: str | None = option(None, _DEVICE.format("acting"))
    storing_device: str | None = option(None, _DEVICE.format("the batch"))
    train_device: str | None = option(None, _DEVICE.format("learning"), read_by=TRAIN)
    no_cuda_sync: bool = option(False, "do not wait for copies between host and device")


@dataclass
class LoggerConfig(Group):
    """Where metrics go in addition to `metrics.jsonl`, which is always written."""

    kind: str = option("auto", "auto: tensorboard when it is installed")
    kwargs: dict[str, Any] = option({}, "arguments for a registered logger of your own")


@dataclass
class ConsoleConfig(Group):
    """What the terminal shows while a run is going."""

    kind: str = option("auto", "auto: live on a terminal, else plain lines", choices=("auto", "live", "plain", "off"))


@dataclass
class RunConfig(Group):
    """The run folder, checkpoints, and evaluation along the way."""

    checkpoint_every: int = option(50_000, "frames between checkpoints", ge=1, read_by=TRAIN)
    checkpoint_minutes: float | None = option(
        5.0, "minutes between checkpoints; null: by frames alone", gt=0, read_by=TRAIN
    )
    keep: int = option(2, "checkpoints kept", ge=2, read_by=TRAIN)
    keep_best: bool = option(False, "keep the weights of the best evaluation, too: RUN:best", read_by=TRAIN)
    eval_every: int | None = option(None, "frames between evaluations; null never evaluates", ge=1, read_by=TRAIN)
    eval_episodes: int = option(20, "episodes of an evaluation; 0: no evaluation at the end", ge=0, read_by=TRAIN)
    eval_envs: int | None = option(
        None,
        "envs of an evaluation, each for one episode after another; null: env.num, 32 at most",
        ge=1,
        read_by=TRAIN,
    )
    eval_max_steps: int | None = option(
        None,
        "steps after which an evaluation cuts an episode off; null: total_frames / 4, from 1,000 to 30,000",
        ge=1,
        read_by=TRAIN,
    )
    dir: str | None = option(None, "folder of the run; null: runs/<verb>/<recipe, or env>/<date>_<time>_s<seed>")
    max_replay_steps: int = option(10_000, "longest open episode that a resume replays", ge=0)

    def problems(self) -> Iterator[Problem]:
        if self.eval_every is not None and not self.eval_episodes:
            yield Problem("run.eval_every needs run.eval_episodes >= 1", "leave out run.eval_episodes=0")
        if self.dir is not None and not self.dir.isprintable():
            yield Problem(f"run.dir={self.dir!r} holds a character that cannot be printed", "choose a plain name")
        if self.dir == "":
            yield Problem("run.dir is empty", "name a folder, or leave it out")


# ---- the tree -------------------------------------------------------------------------------------------------------
@dataclass
class CollectConfig:
    """Everything `rlcli collect` reads."""

    seed: int = option(0, "every random number of the run derives from it", ge=0, le=2**32 - 1)
    total_frames: int = option(100_000, "frames to collect, exact to one step of all envs", ge=1, le=10**15)
    threads: int | str = option("auto", "threads of one torch operation", ge=1, le=1024, words=("auto",))
    recipe: str | None = option(None, "the recipe this run follows")
    env: EnvConfig = option(EnvConfig, "the environment")
    policy: PolicyConfig = option(PolicyConfig, "the policy")
    collector: CollectorConfig = option(CollectorConfig, "how batches are collected")
    weights: WeightsConfig = option(
        WeightsConfig, "how new weights reach the acting policy", read_by={"collector": ("multi_async", "async")}
    )
    memory: MemoryConfig = option(MemoryConfig, "how the next observation is stored")
    device: DeviceConfig = option(DeviceConfig, "devices")
    logger: LoggerConfig = option(LoggerConfig, "where metrics go")
    console: ConsoleConfig = option(ConsoleConfig, "what the terminal shows")
    run: RunConfig = option(RunConfig, "folder, checkpoints, evaluation")


@dataclass
class Config(CollectConfig):
    """Everything `rlcli train` reads: what collecting reads, and how batches become better weights."""

    storage: StorageConfig = option(StorageConfig, "replay storage")
    sampler: SamplerConfig = option(SamplerConfig, "how updates sample rows")
    value: ValueConfig = option(ValueConfig, "advantages")
    loss: LossConfig = option(LossConfig, "loss and algorithm")
    optim: OptimConfig = option(OptimConfig, "optimizer")
