"""Benches for users: `rlcli bench NAME` measures their machine, env and nets beside hand-written loops and peers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlcli.bench.settings import read, settings_of

if TYPE_CHECKING:
    from rlcli.bench.harness import Report

NAMES = {
    "collect": "frames a second against hand-written loops, bare envs and other frameworks",
    "update": "one PPO update against plain torch written by hand",
    "gae": "advantages of batches of many shapes against another framework's functions",
    "value": "the value stage by net size: two calls, one pass, shifted, chunks; time and peak memory",
    "rnn": "GRU and LSTM with resets inside the sequence against torch.nn without any",
    "extend": "writing rows to a buffer against other buffers and a bare copy",
    "sample": "drawing slices and images from a buffer against other buffers, by its size",
    "memory": "bytes of a stored step in every storage, and a run's memory against what plan said",
    "weights": "new weights to two workers: published to adopted, against plain copies and peers",
    "workers": "envs in processes against other frameworks'; the best split of an env's work",
    "train": "wall time of a whole PPO, DQN or SAC run against SB3, the same hyper-parameters",
    "start": "how long the command line takes to answer",
}


def run(name: str, words: Sequence[str]) -> int:
    """Measure, print the tables, and write every round to `runs/bench/NAME.json`."""
    from rlcli.bench.harness import claim, publish

    settings = read(settings_of(name, words), words)  # every mistake, before what is measured is loaded
    path = f"runs/bench/{name}.json"
    claim(path)
    print(f"measuring {NAMES[name]} ...", file=sys.stderr, flush=True)
    publish(_measured(name, settings), path)
    return 0


def measure(name: str, words: Sequence[str]) -> Report:
    """Measure as `key=value` words say.

    Raises
    ------
    ConfigError
        Listing every mistake in them.
    """
    return _measured(name, read(settings_of(name, words), words))


def _measured(name: str, settings: dict[str, Any]) -> Report:
    if "threads" in settings:
        import torch

        torch.set_num_threads(settings["threads"])
    return import_module(f"rlcli.bench.{name}").measure(settings)
