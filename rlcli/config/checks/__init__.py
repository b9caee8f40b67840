"""What spans the parts of a configuration, a file an area: importing them fills `CHECKS`.

What one part takes is for its constructor to check. A check yields all problems that it finds, each with its remedy,
before anything is built or torch is loaded.
"""

from rlcli.config.checks import collector, envs, learning, machine, rows, run
from rlcli.config.checks.check import CHECKS

__all__ = ["CHECKS", "collector", "envs", "learning", "machine", "rows", "run"]
