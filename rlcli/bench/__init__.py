"""Benches for users: `rlcli bench NAME` measures their machine, env and nets beside hand-written loops and peers."""

from __future__ import annotations

import sys
from importlib import import_module

NAMES = {
    "collect": "frames a second against hand-written loops, bare envs and other frameworks",
    "update": "one PPO update against plain torch written by hand",
    "gae": "advantages of batches of many shapes against another framework's functions",
    "value": "the value stage by net size: two calls, one pass, shifted, chunks; time and peak memory",
    "extend": "writing rows to a buffer against other buffers and a bare copy",
    "sample": "drawing slices and images from a buffer against other buffers, by its size",
    "memory": "bytes of a stored step in every storage, and a run's memory against what plan said",
    "train": "wall time of a whole PPO, DQN or SAC run against SB3, the same hyper-parameters",
    "start": "how long the command line takes to answer",
}


def run(name: str, overrides: list[str]) -> int:
    """Measure, print the tables, and write `bench.json` in the working folder."""
    from rlcli.bench.harness import claim, publish
    from rlcli.bench.settings import SETTINGS, read

    read(SETTINGS[name], overrides)  # every mistake, before what is measured is loaded
    claim()
    print(f"measuring {NAMES[name]} ...", file=sys.stderr, flush=True)
    publish(import_module(f"rlcli.bench.{name}").measure(overrides))
    return 0
