"""rlcli: memory-efficient reinforcement learning from the command line. Importing it is cheap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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

# what `import rlcli` offers, fetched when it is first used
_LAZY = {
    "train": "rlcli.api",
    "collect": "rlcli.api",
    "resume": "rlcli.api",
    "plan": "rlcli.api",
    "inspect": "rlcli.api",
    "evaluate": "rlcli.api",
    "load": "rlcli.api",
    "verify": "rlcli.api",
    "register_algorithm": "rlcli.config.registry",
    "register_env": "rlcli.config.registry",
    "register_estimator": "rlcli.config.registry",
    "register_logger": "rlcli.config.registry",
    "register_policy": "rlcli.config.registry",
    "register_sampler": "rlcli.config.registry",
    "register_storage": "rlcli.config.registry",
    "register_transform": "rlcli.config.registry",
    "register_wrapper": "rlcli.config.registry",
}
__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'rlcli' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
