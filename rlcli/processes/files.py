"""Raise the number of files that this process may open: what processes share takes a descriptor or two each."""

from __future__ import annotations

import os
import resource

from rlcli.errors import ResourceError

_SPARE = 16  # for whatever else is opened meanwhile


def room_for(more: int) -> None:
    """Raise the soft limit, if need be, so that so many more files can be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = len(os.listdir("/dev/fd")) + more + _SPARE
    if soft == resource.RLIM_INFINITY or need <= soft:
        return
    if hard != resource.RLIM_INFINITY and need > hard:
        raise ResourceError(
            f"{need:,} files would be open, and this process may open {hard:,}",
            why="each worker process, and each batch that is held, takes a few descriptors",
            fix="Use fewer workers, release batches, or raise the limit (`ulimit -Hn`, LimitNOFILE=).",
        )
    most = max(need, 2 * soft)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
