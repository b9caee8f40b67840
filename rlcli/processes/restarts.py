"""How often workers may be replaced: a few times now and then, not for ever."""

from __future__ import annotations

import time

from rlcli.errors import EnvError

POLICIES = ("raise", "restart")  # what becomes of a worker that ends, hangs, or whose env raises
RESTARTS, WINDOW = 5, 60.0  # so many in so many seconds: it would go on for ever
TOGETHER = 1.0  # seconds from one to the next in which several that are lost, each once, have one cause


class Restarts:
    """The times at which the workers of one parent were replaced."""

    def __init__(self) -> None:
        self._occasions: list[tuple[float, set[int]]] = []  # when, and which workers
        self._first_cause = ""

    def another(self, name: str, worker: int, cause: str, error: BaseException | None = None, *, fix: str) -> None:
        """A worker is to be replaced.

        Parameters
        ----------
        name : str
            Of the env.
        worker : int
            Its number. What ends several at once, a killed fork server say, counts once.
        cause : str
            What became of the worker: `worker 1, ... was killed by SIGKILL`.
        error : exception, optional
            What it raised.

        Raises
        ------
        EnvError
            It is one too many; with the first cause.
        """
        now = time.monotonic()
        self._occasions = [(then, workers) for then, workers in self._occasions if now - then < WINDOW]
        if self._occasions and now - self._occasions[-1][0] < TOGETHER and worker not in self._occasions[-1][1]:
            self._occasions[-1] = now, self._occasions[-1][1] | {worker}
            return
        self._occasions.append((now, {worker}))
        if len(self._occasions) == 1:
            self._first_cause = cause
        if len(self._occasions) > RESTARTS:
            raise EnvError(
                f"workers had to be replaced more than {RESTARTS} times in {WINDOW:.0f} s", where=name,
                why=f"the first time, {self._first_cause}", fix=fix,
            ) from error  # fmt: skip
