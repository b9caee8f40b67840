"""Options of `device`, `logger`, `console` and `run`: where things live, what is shown, and the run's folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlcli.config.option import Options, option
from rlcli.config.problem import Problem

_DEVICE = "device for {}; null follows the choice of `device`"


class DeviceConfig(Options, group="device"):
    """Where things live. `split` steps envs on the CPU and acts and learns on the accelerator."""

    kind: str = option("auto", "which device choice this is", choices=("auto", "cpu", "cuda", "mps", "split"))
    env_device: str | None = option(None, _DEVICE.format("env outputs"))
    policy_device: str | None = option(None, _DEVICE.format("acting"))
    storing_device: str | None = option(None, _DEVICE.format("the batch"))
    train_device: str | None = option(None, _DEVICE.format("learning"))
    no_cuda_sync: bool = option(False, "do not wait for copies between host and device")


class LoggerConfig(Options, group="logger"):
    """Where metrics go in addition to `metrics.jsonl`, which is always written."""

    kind: str = option("auto", "auto: tensorboard when it is installed")
    kwargs: dict[str, Any] = option({}, "arguments for a registered logger of your own")


LOGGERS: dict[str, type[Options]] = {
    "auto": LoggerConfig, "none": LoggerConfig, "tensorboard": LoggerConfig.at("rlcli.report.events:EventsWriter")
}  # fmt: skip


class ConsoleConfig(Options, group="console"):
    """What the terminal shows while a run is going."""

    kind: str = option("auto", "auto: live on a terminal, else plain lines", choices=("auto", "live", "plain", "off"))


class TrainedRun(Options, group="run"):  # what `rlcli train` does along the way
    checkpoint_every: int = option(50_000, "frames between checkpoints", ge=1)
    checkpoint_minutes: float | None = option(5.0, "minutes between checkpoints; null: by frames alone", gt=0)
    keep: int = option(2, "checkpoints kept", ge=2)
    keep_best: bool = option(False, "keep the weights of the best evaluation, too: RUN:best")
    eval_every: int | None = option(None, "frames between evaluations; null never evaluates", ge=1)
    eval_episodes: int = option(20, "episodes of an evaluation; 0: no evaluation at the end", ge=0)
    eval_envs: int | None = option(
        None, "envs of an evaluation, each for one episode after another; null: env.num, 32 at most", ge=1
    )
    eval_max_steps: int | None = option(
        None, "steps after which an evaluation cuts an episode off; null: total_frames / 4, from 1,000 to 30,000", ge=1
    )


class RunConfig(TrainedRun):
    """The run folder, checkpoints, and evaluation along the way."""

    dir: str | None = option(None, "folder of the run; null: runs/<verb>/<recipe, or env>/<date>_<time>_s<seed>")
    max_replay_steps: int = option(10_000, "longest open episode that a resume replays", ge=0)

    def problems(self) -> Iterator[Problem]:
        if self.eval_every is not None and not self.eval_episodes:
            yield Problem("run.eval_every needs run.eval_episodes >= 1", "leave out run.eval_episodes=0")
        if self.dir is not None and not self.dir.isprintable():
            yield Problem(f"run.dir={self.dir!r} holds a character that cannot be printed", "choose a plain name")
        if self.dir == "":
            yield Problem("run.dir is empty", "name a folder, or leave it out")
