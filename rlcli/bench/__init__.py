"""Benches for users: `rlcli bench NAME` measures their machine and env beside hand-written loops and peers."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from rlcli.bench.settings import OWN, SETTINGS, Defaults, Settings, read

if TYPE_CHECKING:
    from rlcli.bench.harness import Report


class Benches(NamedTuple):
    """The benches of one command: modules of `package` with `measure(settings)`; `own` defaults by another setting."""

    command: str
    package: str
    about: Mapping[str, str]
    settings: Mapping[str, Settings]
    own: Mapping[str, tuple[str, Defaults]]
    elsewhere: str

    def settings_of(self, name: str, words: Sequence[str]) -> Settings:
        """Return a bench's settings; defaults that depend on another setting follow the words."""
        settings = self.settings[name]
        if name not in self.own:
            return settings
        by, defaults = self.own[name]
        given = (word.partition("=")[2] for word in reversed(words) if word.startswith(f"{by}="))
        overridden = defaults.get(next(given, settings[by].default), {})
        return {
            key: setting._replace(default=overridden.get(key, setting.default)) for key, setting in settings.items()
        }

    def run(self, name: str, words: Sequence[str]) -> int:
        """Measure, print the tables, and write every round to `runs/bench/NAME.json`."""
        from rlcli.bench.harness import claim, publish

        read(self.settings_of(name, words), words)  # every mistake, before what is measured is loaded
        path = f"runs/bench/{name}.json"
        claim(path)
        print(f"measuring {self.about[name]} ...", file=sys.stderr, flush=True)
        publish(self.measure(name, words), path)
        return 0

    def measure(self, name: str, words: Sequence[str]) -> Report:
        """Measure as `key=value` words say, or raise ConfigError with every mistake in them."""
        settings = read(self.settings_of(name, words), words)
        if "threads" in settings:
            import torch

            torch.set_num_threads(settings["threads"])
        return import_module(f"{self.package}.{name}").measure(settings)


BENCHES = Benches(
    "rlcli bench",
    "rlcli.bench",
    {
        "collect": "frames a second against hand-written loops, bare envs and other frameworks",
        "workers": "the best split of an env's work: in one process, in workers, in workers that act",
        "train": "wall time of a whole PPO, DQN or SAC run against SB3, the same hyper-parameters",
    },
    SETTINGS,
    OWN,
    elsewhere="benches of rlcli's own parts run from a checkout: python -m tests.bench NAME",
)
