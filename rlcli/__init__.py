"""rlcli: memory-efficient reinforcement learning from the command line. Importing it is cheap."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

# what `import rlcli` offers, fetched when it is first used
_LAZY = {
    "train": "rlcli.cli.api",
    "collect": "rlcli.cli.api",
    "resume": "rlcli.cli.api",
    "plan": "rlcli.cli.api",
    "inspect": "rlcli.cli.api",
    "evaluate": "rlcli.cli.api",
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
