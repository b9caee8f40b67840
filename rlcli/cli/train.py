"""`rlcli train`: compose a configuration and train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlcli.cli.job import run_job


def run(words: Sequence[str], recipe_dirs: Sequence[str]) -> int:
    """Run the verb."""
    return run_job("train", words, recipe_dirs, start)


def start(cfg: Any, overrides: list[str]) -> Any:
    """Train as a configuration says."""
    from rlcli.jobs import train

    return train(cfg, overrides)
