"""Deal envs out to worker processes, and tell those what no pickle of an env maker carries.

That is the names that this program registered and the key of its Managers: a script that registers an env and trains it
in workers has no package that those could import.
"""

from __future__ import annotations

import dataclasses
import pickle
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import current_process
from typing import Any

import gymnasium as gym

from rlcli import arguments
from rlcli.arguments import refuse
from rlcli.config import registry
from rlcli.errors import in_words
from rlcli.processes.process import cores
from rlcli.processes.replacing import POLICIES
from rlcli.vec_envs.building import register_known

_BY_THEMSELVES = ("gymnasium.", "ale_py.", "minigrid.")  # packages whose ids every process knows


def shared_out(
    n: int,
    workers: int | None = None,
    per_worker: int | str | None = None,
    caller_steps: bool | None = None,
    on_worker_error: str = "raise",
) -> tuple[list[range], bool]:
    """Deal `n` lanes out over processes, and say whether the caller steps the first part; see `ParallelEnv`."""
    arguments.choice("on_worker_error", on_worker_error, POLICIES)
    restarts = on_worker_error == "restart"
    refuse(
        restarts and caller_steps, "caller_steps=True and on_worker_error='restart' contradict each other",
        why="an env in the caller's own process cannot be replaced", fix="Use caller_steps=False.",
    )  # fmt: skip
    most: Any = None if per_worker in (None, "auto") else arguments.count("per_worker", per_worker, 1, n)
    workers = None if workers is None else arguments.count("workers", workers, 1, n)
    both = workers is not None and most is not None
    refuse(both, "per_worker says how many workers there are", why=f"got workers={workers} too")
    if caller_steps is None:
        caller_steps = workers is None and most is None and not restarts and min(n, cores()) > 1
    if workers is not None:
        shares = workers + caller_steps
    else:
        shares = max(min(n, cores()) if most is None else -(-n // most), 1 + caller_steps)
    refuse(
        shares > n, "caller_steps=True leaves the workers too few envs",
        why=f"{n} envs, {shares - 1} workers and the caller", fix="Use fewer workers, or caller_steps=False.",
    )  # fmt: skip
    return dealt(n, shares), caller_steps


def dealt(n: int, shares: int) -> list[range]:
    """Deal neighbouring envs out to shares, as many for each, or one more for the later ones."""
    return [range(first, last) for first, last in pairwise(n * place // shares for place in range(shares + 1))]


@dataclass(frozen=True)
class Told:
    """Hold the facts that `told` collected for a worker."""

    authkey: bytes  # by which proxies of a multiprocessing.Manager know each other
    packages: tuple[str, ...]  # named by --import
    # kind, name and pickled object of what was registered, with gymnasium ("id") or rlcli
    names: tuple[tuple[str, str, bytes], ...]

    def learn(self) -> None:
        """Register it in this process; warn of what cannot be loaded here."""
        if self.authkey:
            current_process().authkey = self.authkey
        for name in self.packages:
            registry.import_package(name)
        for kind, name, body in self.names:
            try:
                value = pickle.loads(body)
            except Exception as error:  # whatever a module of the user's does
                _warn(kind, name, error)
                continue
            if kind == "id":
                register_known(name)  # who registers it elsewhere would warn that it is there already
                gym.registry.setdefault(name, value)
            else:
                registry.learn(kind, name, value)

    def elsewhere(self) -> Told:
        """Return what workers of other machines are to know, which no proxy works on."""
        return dataclasses.replace(self, authkey=b"")


def told() -> Told:
    """Return what workers of this process are to know; warn of what was registered and cannot be pickled."""
    import cloudpickle  # what is of the program itself goes by value

    names = []
    for kind, name, value in _registered():
        try:
            names.append((kind, name, cloudpickle.dumps(value)))
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
