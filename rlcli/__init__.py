"""rlcli: memory-efficient reinforcement learning from the command line. Importing it is cheap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers see; below is what happens
    from rlcli.cli.api import collect as collect
    from rlcli.cli.api import evaluate as evaluate
    from rlcli.cli.api import inspect as inspect
    from rlcli.cli.api import load as load
    from rlcli.cli.api import plan as plan
    from rlcli.cli.api import resume as resume
    from rlcli.cli.api import train as train
    from rlcli.cli.api import verify as verify
    from rlcli.config.registry import register_env as register_env
    from rlcli.config.registry import register_policy as register_policy
    from rlcli.config.registry import register_transform as register_transform
    from rlcli.config.registry import register_wrapper as register_wrapper

__version__ = "0.1.0"

# what `import rlcli` offers, fetched when it is first used
_LAZY = {
    "train": "rlcli.cli.api",
    "collect": "rlcli.cli.api",
    "resume": "rlcli.cli.api",
    "plan": "rlcli.cli.api",
    "inspect": "rlcli.cli.api",
    "evaluate": "rlcli.cli.api",
    "load": "rlcli.cli.api",
    "verify": "rlcli.cli.api",
    "register_env": "rlcli.config.registry",
    "register_policy": "rlcli.config.registry",
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
