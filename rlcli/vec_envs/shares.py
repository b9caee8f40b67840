"""Share lanes out over processes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from rlcli import arguments
from rlcli.errors import ArgumentError
from rlcli.processes.cores import cores
from rlcli.processes.restarts import POLICIES


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
    if restarts and caller_steps:
        raise ArgumentError(
            "caller_steps=True and on_worker_error='restart' contradict each other",
            why="an env in the caller's own process cannot be replaced", fix="Use caller_steps=False.",
        )  # fmt: skip
    most: Any = None if per_worker == "auto" else per_worker
    given = [each for each in (workers, most) if each is not None]
    if len(given) == 2:
        raise ArgumentError("per_worker says how many workers there are", why=f"got workers={workers} too")
    for number in given:
        arguments.count("workers" if workers is not None else "per_worker", number, 1, n)
    if caller_steps is None:
        caller_steps = not given and not restarts and min(n, cores()) > 1
    if workers is not None:
        shares = workers + caller_steps
    else:
        shares = max(min(n, cores()) if most is None else -(-n // most), 1 + caller_steps)
    if shares > n:
        raise ArgumentError(
            "caller_steps=True leaves the workers too few envs", why=f"{n} envs, {shares - 1} workers and the caller",
            fix="Use fewer workers, or caller_steps=False.",
        )  # fmt: skip
    return dealt(n, shares), caller_steps


def dealt(n: int, shares: int) -> list[range]:
    """Deal neighbouring envs out to shares, as many for each, or one more for the later ones."""
    return [range(first, last) for first, last in pairwise(n * place // shares for place in range(shares + 1))]
