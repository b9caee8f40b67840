"""How often workers may be replaced: a few times now and then, not for ever."""

from __future__ import annotations

import time

from rlcli.errors import EnvError

POLICIES = ("raise", "restart")  # what becomes of a worker that ends, hangs, or whose env raises
RESTARTS, WINDOW = 5, 60.0  # so many in so many seconds: it would go on for ever


class Restarts:
    """The times at which the workers of one parent were replaced."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._first_cause = ""

    def another(self, name: str, cause: str, error: BaseException | None = None, *, fix: str) -> None:
        """A worker is to be replaced.

        Parameters
        ----------
        name : str
            Of the env.
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
        self._times = [*(then for then in self._times if now - then < WINDOW), now]
        if len(self._times) == 1:
            self._first_cause = cause
        if len(self._times) > RESTARTS:
            raise EnvError(
                f"workers had to be replaced more than {RESTARTS} times in {WINDOW:.0f} s", where=name,
                why=f"the first time, {self._first_cause}", fix=fix,
            ) from error  # fmt: skip
