"""The whole tree: one dataclass per verb that runs a job, groups as fields, in the order of `--help`.

`Config` is what `rlcli train` composes and `CollectConfig` what `rlcli collect` does; the rest of the
program sees instances of these and nothing of Hydra. A train config is a collect config with more in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlcli.config.option import option
from rlcli.config.schemas_collect import (
    CollectorConfig,
    DeviceConfig,
    MemoryConfig,
    SamplerConfig,
    StorageConfig,
)
from rlcli.config.schemas_env import AtariConfig, EnvConfig, PolicyConfig
from rlcli.config.schemas_learn import OFF_POLICY, LossConfig, OptimConfig, ValueConfig

__all__ = [
    "VERBS",
    "AtariConfig",
    "CollectConfig",
    "CollectorConfig",
    "Config",
    "ConsoleConfig",
    "DeviceConfig",
    "EnvConfig",
    "LoggerConfig",
    "LossConfig",
    "MemoryConfig",
    "OptimConfig",
    "PolicyConfig",
    "RunConfig",
    "SamplerConfig",
    "StorageConfig",
    "ValueConfig",
    "draws_slices",
    "is_off_policy",
]


@dataclass
class LoggerConfig:
    """Where metrics go beside `metrics.jsonl`, which is always written."""

    kind: str = option("auto", "auto: tensorboard when it is installed", choices=("auto", "none", "tensorboard"))


@dataclass
class ConsoleConfig:
    """What the terminal shows while a run is going."""

    kind: str = option("auto", "auto: live on a terminal, else plain lines", choices=("auto", "live", "plain", "off"))


@dataclass
class RunConfig:
    """The run folder, checkpoints, and evaluation along the way."""

    dir: str | None = option(None, "folder of the run; null: runs/<verb>/<recipe, or env>/<date>_<time>_s<seed>")
    checkpoint_every: int = option(50_000, "frames between checkpoints", ge=1)
    keep: int = option(2, "checkpoints kept", ge=2)
    max_replay_steps: int = option(10_000, "longest open episode that a resume replays", ge=0)
    eval_every: int | None = option(None, "frames between evaluations; null never evaluates", ge=1)
    eval_episodes: int = option(20, "episodes of an evaluation; 0 plays none at the end", ge=0)
    eval_max_steps: int | None = option(
        None, "steps after which an evaluation cuts an episode off; null: total_frames / 4, from 1,000 to 30,000", ge=1
    )


@dataclass
class CollectConfig:
    """Everything `rlcli collect` reads."""

    seed: int = option(0, "every random number of the run derives from it", ge=0, le=2**32 - 1)
    total_frames: int = option(100_000, "frames to collect, exact to one step of all envs", ge=1, le=10**15)
    threads: int | str = option("auto", "threads of one torch operation", ge=1, le=1024, words=("auto",))
    recipe: str | None = option(None, "the recipe this run follows")
    env: EnvConfig = option(EnvConfig, "the world")
    policy: PolicyConfig = option(PolicyConfig, "who acts")
    collector: CollectorConfig = option(CollectorConfig, "how batches are gathered")
    memory: MemoryConfig = option(MemoryConfig, "how the next observation is kept")
    device: DeviceConfig = option(DeviceConfig, "where things live")
    logger: LoggerConfig = option(LoggerConfig, "where metrics go")
    console: ConsoleConfig = option(ConsoleConfig, "what the terminal shows")
    run: RunConfig = option(RunConfig, "folder, checkpoints, evaluation")


@dataclass
class Config(CollectConfig):
    """Everything `rlcli train` reads: what collecting reads, and how batches become better weights."""

    storage: StorageConfig = option(StorageConfig, "where rows wait")
    sampler: SamplerConfig = option(SamplerConfig, "how rows are drawn")
    value: ValueConfig = option(ValueConfig, "advantages")
    loss: LossConfig = option(LossConfig, "what is minimised")
    optim: OptimConfig = option(OptimConfig, "how weights move")


def is_off_policy(cfg: Config) -> bool:
    """Whether the run learns from stored rows, whoever collected them."""
    return cfg.loss.kind in OFF_POLICY


def draws_slices(cfg: Config) -> bool:
    """Whether a policy gradient learns from slices of stored rows."""
    return not is_off_policy(cfg) and cfg.sampler.kind == "slice"


VERBS: dict[str, type[Any]] = {"train": Config, "collect": CollectConfig}
