"""`rlcli train`: compose a configuration and train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlcli.cli.job import run_job
from rlcli.cli.loading import loading


def run(words: Sequence[str], recipe_dirs: Sequence[str]) -> int:
    """Run the verb."""
    return run_job("train", words, recipe_dirs, start)


def start(cfg: Any, overrides: list[str]) -> Any:
    """Train as a configuration says."""
    with loading(quiet=cfg.console.kind == "off"):
        from rlcli.jobs import train

    return train(cfg, overrides)
