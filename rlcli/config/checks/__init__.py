"""Checks that span the parts of a configuration, a file an area: importing them fills `CHECKS`.

What one part takes is for its constructor to check. A check yields all problems that it finds, each with its remedy,
before anything is built or torch is loaded.
"""

from rlcli.config.checks import collector as collector
from rlcli.config.checks import envs as envs
from rlcli.config.checks import learning as learning
from rlcli.config.checks import machine as machine
from rlcli.config.checks import rows as rows
from rlcli.config.checks import run as run
from rlcli.config.problem import CHECKS as CHECKS
