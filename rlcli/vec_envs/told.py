"""Tell a worker what no pickle of an env maker carries: names that this program registered, the key of its Managers.

A script that registers an env and trains it in workers has no package that those could import.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import current_process
from typing import Any

import gymnasium as gym

from rlcli.config import registry
from rlcli.errors import in_words
from rlcli.vec_envs.building import register_known

_BY_THEMSELVES = ("gymnasium.", "ale_py.", "minigrid.")  # packages whose ids every process knows


@dataclass(frozen=True)
class Told:
    """Hold the facts that `told` collected for a worker."""

    authkey: bytes  # by which proxies of a multiprocessing.Manager know each other
    packages: tuple[str, ...]  # named by --import
    # kind, name and pickled object of what was registered, with gymnasium ("id") or rlcli
    names: tuple[tuple[str, str, bytes], ...]

    def learn(self) -> None:
        """Register it in this process; warn of what cannot be loaded here."""
        current_process().authkey = self.authkey
        for name in self.packages:
            registry.import_package(name)
        for kind, name, body in self.names:
            try:
                known = pickle.loads(body)
            except Exception as error:  # whatever a module of the user's does
                _warn(kind, name, error)
                continue
            if kind == "id":
                register_known(name)  # who registers it elsewhere would warn that it is there already
                gym.registry.setdefault(name, known)
            else:
                registry.learn(kind, name, known)


def told() -> Told:
    """Return what workers of this process are to know; warn of what was registered and cannot be pickled."""
    import cloudpickle  # what is of the program itself goes by value

    names = []
    for kind, name, known in _registered():
        try:
            names.append((kind, name, cloudpickle.dumps(known)))
        except Exception as error:  # whatever an object of the user's raises
            _warn(kind, name, error)
    return Told(bytes(current_process().authkey), tuple(registry.imported), tuple(names))


def _registered() -> Iterator[tuple[str, str, Any]]:
    for name, spec in gym.registry.items():
        entry = spec.entry_point
        home = entry if isinstance(entry, str) else getattr(entry, "__module__", "")
        if not f"{home}.".startswith(_BY_THEMSELVES):
            yield "id", name, spec
    yield from registry.registered("env", "wrapper", "transform")


def _warn(kind: str, name: str, error: Exception) -> None:
    warnings.warn(f"worker processes do not know the registered {kind} {name!r}: {in_words(error)}", stacklevel=4)
