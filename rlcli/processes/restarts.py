"""Limit how often workers may be replaced: a few times now and then, not for ever."""

from __future__ import annotations

import time

from rlcli.errors import ArgumentError, ConfigError, EnvError, NumericsError, in_words
from rlcli.processes.crew import Lost

POLICIES = ("raise", "restart")  # what becomes of a worker that ends, hangs, or whose env raises
NOT_REPLACED = (ArgumentError, ConfigError, NumericsError)  # no env's fault: another process would raise them too
BUILDING = 60.0  # seconds at least; see `time_to_build`
RESTARTS, WINDOW = 5, 60.0  # each so many times in so many seconds, or with nothing collected: it would go on for ever


def time_to_build(step_timeout: float | None) -> float | None:
    """Return the seconds that a new worker has to make its envs in, where there is a limit on steps."""
    return None if step_timeout is None else max(BUILDING, step_timeout)


class Restarts:
    """Count replacements of each worker: what ends all of them (a killed fork server) is one event for each."""

    def __init__(self) -> None:
        self._times: dict[int, list[tuple[float, int]]] = {}
        self._first_causes: dict[int, str] = {}

    def another(self, name: str, worker: int, who: str, cause: BaseException, *, collected: int, fix: str) -> str:
        """Count a replacement; return what became of the worker, or raise EnvError for one time too many."""
        lost = isinstance(cause, Lost)
        sentence = f"{who} {cause.how if isinstance(cause, Lost) else f'raised {in_words(cause)}'}"
        now = time.monotonic()
        before = self._times.get(worker, [])
        times = [*((then, had) for then, had in before if now - then < WINDOW or had == collected), (now, collected)]
        self._times[worker] = times
        if len(times) == 1:
            self._first_causes[worker] = sentence
        if len(times) > RESTARTS:
            raise EnvError(
                f"a worker was restarted more than {RESTARTS} times "
                + (f"in {WINDOW:.0f} s" if now - times[0][0] < WINDOW else "without a result"), where=name,
                why=f"the first time: {self._first_causes[worker]}", fix=fix,
            ) from (None if lost else cause)  # fmt: skip
        return sentence
