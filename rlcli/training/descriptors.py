"""The sentence for a run under which somebody closed files that are not theirs."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from rlcli.errors import EnvError


@contextlib.contextmanager
def own_descriptors() -> Iterator[None]:
    """While a run is going on: "bad file descriptor" is said as what it is.

    rlcli closes nothing that it still writes, so an env, a wrapper or a policy did (`os.closerange`, a daemon's start).
    """
    try:
        yield
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        raise EnvError(
            "a file that rlcli had open was closed under it",
            why="an env, a wrapper or a policy closed descriptors that are not its own",
            fix="Look there for os.close, os.closerange and what turns a process into a daemon; what was saved before "
            "can be resumed.",
        ) from error
