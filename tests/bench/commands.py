"""Commands of rlcli in processes of their own."""

from __future__ import annotations

import subprocess
import sys

from rlcli.errors import ResourceError


def rlcli(*words: str, code: int = 0) -> str:
    """Run a command in a process of its own; return what it printed, or raise where it ends with another exit code."""
    done = subprocess.run([sys.executable, "-m", "rlcli", *words], capture_output=True, text=True)
    if done.returncode != code:
        raise ResourceError(f"rlcli {' '.join(words)} exited {done.returncode}", why=done.stderr.strip()[-400:])
    return done.stdout
