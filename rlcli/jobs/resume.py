"""`rlcli resume RUN`: go on as if the run had never stopped."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, cast

from rlcli.config.problem import raise_all
from rlcli.config.resolved import from_dict, to_dict
from rlcli.config.schemas import Config
from rlcli.config.validate import validate
from rlcli.errors import ConfigError
from rlcli.jobs.learner import Learner
from rlcli.jobs.train import go
from rlcli.training import checkpoint
from rlcli.training.evidence import kept_in
from rlcli.training.run_folder import CHECKPOINTS, Run, open_run
from rlcli.training.run_lock import RunLock
from rlcli.training.signals import StopSignals

# what may change without changing what the remaining frames would have been
HARMLESS = ("total_frames", "run", "console", "logger")


def resume(path: str | PathLike[str], overrides: Sequence[str] = (), *, force: bool = False) -> Run:
    """Continue the run in a folder from its newest checkpoint that verifies.

    Parameters
    ----------
    overrides : sequence of str
        `key=value` changes from here on.
    force : bool
        Accept changes after which the run is no longer the one that was begun.

    Raises
    ------
    ConfigError
        A change that breaks exactness, without `force`; all of them are listed.
    StoppedSafely
        Stopped once more.
    """
    run = open_run(Path(path))
    if run.info.get("verb") != "train":
        raise ConfigError("only training runs can be resumed", where=str(path))
    cfg = cast(Config, from_dict("train", run.config, overrides, where=str(run.path / "config.json")))
    raise_all(validate(cfg))
    with StopSignals() as stop, RunLock(run.path), kept_in(run.path):
        # the reporter says it too, and keeps it in the closing report
        with warnings.catch_warnings(action="default" if cfg.console.kind == "off" else "ignore"):
            found = checkpoint.load_latest(run.path / CHECKPOINTS)
        changed = _changed(found.manifest["config"], run.config, cfg, overrides)
        if changed and not force:
            raise ConfigError(
                f"{_some(changed)} would make this another run",
                where=str(path),
                why="a resumed run is exact; only total_frames, run.*, console.kind and logger.kind may change",
                fix="Take the change back, add --force to make it all the same, or start a new run.",
            )
        if found.manifest["number"] >= cfg.total_frames and run.summary.get("status") == "done":
            print(f"{run.path} is finished at {cfg.total_frames:,} frames; total_frames=... would go on")
            return run
        learner = Learner(cfg, run, stop, resume_at=found.manifest["number"])
        with learner.reporter:
            learner.load(found)
            go(learner)
    return run


def _changed(was: Mapping[str, Any], now: Mapping[str, Any], cfg: Config, overrides: Sequence[str]) -> list[str]:
    """What differs from the configuration that the checkpoint was written under, by hand or by override."""
    before, after = dict(_flat(was)), dict(_flat(now))
    typed = dict(_flat(to_dict(cfg)))
    for text in overrides:
        key = text.partition("=")[0].lstrip("+")
        after |= {name: value for name, value in typed.items() if name == key or name.startswith(f"{key}.")}
    return [
        f"{key} {before.get(key)!r} -> {after.get(key)!r}"
        for key in sorted(before.keys() | after.keys())
        if key.split(".")[0] not in HARMLESS and before.get(key) != after.get(key)
    ]


def _some(changed: list[str], most: int = 6) -> str:
    return ", ".join(changed[:most]) + (f" and {len(changed) - most} more" if len(changed) > most else "")


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
