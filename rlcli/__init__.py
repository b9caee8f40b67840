"""rlcli: memory-efficient reinforcement learning from the command line. Importing it is cheap."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rlcli import compat, imports
from rlcli.exports import lazily

if TYPE_CHECKING:  # what it offers, fetched when it is first used
    from rlcli.api import collect as collect
    from rlcli.api import evaluate as evaluate
    from rlcli.api import inspect as inspect
    from rlcli.api import load as load
    from rlcli.api import plan as plan
    from rlcli.api import resume as resume
    from rlcli.api import train as train
    from rlcli.api import verify as verify
    from rlcli.config.registry import register_algorithm as register_algorithm
    from rlcli.config.registry import register_env as register_env
    from rlcli.config.registry import register_estimator as register_estimator
    from rlcli.config.registry import register_logger as register_logger
    from rlcli.config.registry import register_policy as register_policy
    from rlcli.config.registry import register_sampler as register_sampler
    from rlcli.config.registry import register_storage as register_storage
    from rlcli.config.registry import register_transform as register_transform
    from rlcli.config.registry import register_wrapper as register_wrapper

__version__ = "0.1.0"
# both find modules: paths of older versions, before a folder that one left behind, and what would load torch's compiler
sys.meta_path[:0] = [finder for finder in (compat, imports) if finder not in sys.meta_path]

filter_warnings_subprocess = True  # whether the workers of collectors are silent about warnings

__getattr__, __dir__, __all__ = lazily(__name__)
__all__ += ["__version__"]
