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
    """Counts when the workers of one parent were replaced.

    Each is counted apart: what ends all of them, a killed fork server say, is one event for each, however long it takes
    to replace the others.
    """

    def __init__(self) -> None:
        self._times: dict[int, list[tuple[float, int]]] = {}
        self._first_causes: dict[int, str] = {}

    def another(self, name: str, worker: int, who: str, cause: BaseException, *, collected: int, fix: str) -> str:
        """Count that a worker is to be replaced; return what became of it: `worker 1, ... was killed by SIGKILL`.

        `collected`: how much had come of this worker, and those before it: where that is as it was when it was replaced
        last, that counts however long ago it is.
        Raise EnvError, with the first cause, where it is one time too many for this worker.
        """
        lost = isinstance(cause, Lost)
        said = f"{who} {cause.how if isinstance(cause, Lost) else f'raised {in_words(cause)}'}"
        now = time.monotonic()
        before = self._times.get(worker, [])
        times = [*((then, had) for then, had in before if now - then < WINDOW or had == collected), (now, collected)]
        self._times[worker] = times
        if len(times) == 1:
            self._first_causes[worker] = said
        if len(times) > RESTARTS:
            raise EnvError(
                f"a worker was restarted more than {RESTARTS} times "
                + (f"in {WINDOW:.0f} s" if now - times[0][0] < WINDOW else "without a result"), where=name,
                why=f"the first time: {self._first_causes[worker]}", fix=fix,
            ) from (None if lost else cause)  # fmt: skip
        return said
