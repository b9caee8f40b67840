"""What the files of these tests import; the fork server does so once, and not each of hundreds of workers."""

# ruff: noqa: F401, F403
import psutil
import pytest

from rlcli.collectors import *
from rlcli.data import *
from rlcli.envs import *
from rlcli.modules import *
from rlcli.transforms import *
from rlcli.weight_update import *
