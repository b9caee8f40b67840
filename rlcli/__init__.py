"""rlcli: memory-efficient reinforcement learning from the command line. Importing it is cheap."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rlcli import compat, imports

if TYPE_CHECKING:  # what type checkers see; below is what happens
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

# what `import rlcli` offers, fetched when it is first used
_PARTS = ("algorithm", "env", "estimator", "logger", "policy", "sampler", "storage", "transform", "wrapper")
_LAZY = {
    **dict.fromkeys(["train", "collect", "resume", "plan", "inspect", "evaluate", "load", "verify"], "rlcli.api"),
    **{f"register_{part}": "rlcli.config.registry" for part in _PARTS},
}
__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'rlcli' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
