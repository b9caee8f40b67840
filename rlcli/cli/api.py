"""What the command line does, as functions: `rlcli.train(overrides=[...])` and its siblings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Any, cast


def train(overrides: Sequence[str] = (), recipe_dirs: Iterable[str] = ()) -> Any:
    """Train as `rlcli train OVERRIDES` does.

    Parameters
    ----------
    overrides : sequence of str
        `["recipe=ppo_exact", "seed=1"]`; no sweeps.
    recipe_dirs : iterable of str
        Folders that hold further recipes.

    Returns
    -------
    Run
        The finished run: its folder, summary and policy.

    Raises
    ------
    ConfigError
        Listing every problem of the configuration.
    """
    from rlcli.cli.compose import configure
    from rlcli.config.schemas import Config
    from rlcli.jobs import train as start

    return start(cast(Config, configure("train", overrides, recipe_dirs)), list(overrides))


def collect(overrides: Sequence[str] = (), recipe_dirs: Iterable[str] = ()) -> Any:
    """Write frames to disk as `rlcli collect OVERRIDES` does, and return the run; see `train`."""
    from rlcli.cli.compose import configure
    from rlcli.jobs import collect as start

    return start(configure("collect", overrides, recipe_dirs), list(overrides))


def plan(overrides: Sequence[str] = (), *, verb: str = "train", recipe_dirs: Iterable[str] = ()) -> Any:
    """What `rlcli VERB OVERRIDES` would need, as `rlcli plan` says it; nothing runs.

    Parameters
    ----------
    overrides, recipe_dirs
        As for `train`.
    verb : {"train", "collect"}

    Returns
    -------
    Plan
        Bytes of every key, of every mode, of the process at its peak; `fits`, `advice`, `warnings`.
    """
    from rlcli.cli.compose import configure
    from rlcli.config.schemas import VERBS
    from rlcli.errors import ConfigError

    if verb not in VERBS:
        raise ConfigError(f"plan is for {' and '.join(VERBS)}, not {verb!r}")
    cfg = configure(verb, overrides, recipe_dirs)

    from rlcli.jobs.plan import plan as work_out

    return work_out(cfg, verb)


def resume(path: str | PathLike[str], overrides: Sequence[str] = (), *, force: bool = False) -> Any:
    """Go on with the run in a folder as `rlcli resume PATH OVERRIDES` does (`force`: `--force`), and return it."""
    from rlcli.jobs import resume as start

    return start(path, list(overrides), force=force)


def evaluate(path: str | PathLike[str], episodes: int = 20, **options: Any) -> Any:
    """Play episodes with a run's policy as `rlcli eval PATH` does; options are its flags."""
    from rlcli.jobs import evaluate as start

    return start(path, episodes=episodes, **options)


def inspect(path: str | PathLike[str], trajectory: int | None = None) -> Any:
    """What `rlcli inspect PATH` shows: a list of `Inspection`, one for each thing found in the folder."""
    from rlcli.jobs.inspect import inspect as look

    return look(path, trajectory)
