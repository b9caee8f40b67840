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


def resume(path: str | PathLike[str], overrides: Sequence[str] = (), *, force: bool = False) -> Any:
    """Go on with the run in a folder as `rlcli resume PATH OVERRIDES` does (`force`: `--force`), and return it."""
    from rlcli.jobs import resume as start

    return start(path, list(overrides), force=force)


def evaluate(path: str | PathLike[str], episodes: int = 20, **options: Any) -> Any:
    """Play episodes with a run's policy as `rlcli eval PATH` does; options are its flags."""
    from rlcli.jobs import evaluate as start

    return start(path, episodes=episodes, **options)
