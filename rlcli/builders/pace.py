"""How long making many envs will take, and whether there is memory for them: told while the first are made."""

from __future__ import annotations

import sys
import time

from rlcli.errors import ResourceError
from rlcli.report import figures
from rlcli.report.process import free_memory, process_memory

SURE_AFTER = 2.0  # seconds, from which those made so far say something of the others
WORTH_A_WORD = 5.0  # seconds


class Pace:
    """Watches envs being made one after the other.

    Parameters
    ----------
    name : str
        Of the env.
    count : int
        How many there will be.
    """

    def __init__(self, name: str, count: int) -> None:
        self.name, self.count = name, count
        self.made, self.looked = 0, False
        self.began, self.held = time.monotonic(), process_memory()[0]

    def another(self) -> None:
        """One more is about to be made.

        Raises
        ------
        ResourceError
            Those that are left would not fit into memory.
        """
        spent = time.monotonic() - self.began
        if not self.looked and self.made and spent > SURE_AFTER:
            self.looked = True
            self._look(spent)
        self.made += 1

    def _look(self, spent: float) -> None:
        left = self.count - self.made
        now = process_memory()[0]
        needed, free = (now - self.held) // self.made * left, free_memory()[0] - now
        if needed > free:
            raise ResourceError(
                f"{self.count:,} envs do not fit into memory",
                where=f"env.num, {self.name}",
                why=f"the first {self.made:,} took {figures.size(now - self.held)}, so the others would take about "
                f"{figures.size(needed)}, and {figures.size(max(free, 0))} are free",
                fix="Use a smaller env.num.",
            )
        seconds = spent / self.made * left
        if seconds > WORTH_A_WORD:
            print(f"making {self.count:,} envs of {self.name}: about {seconds:.0f} s more ...", file=sys.stderr)
