"""Options of the chosen optimizer."""

from __future__ import annotations

from typing import Any

from rlcli.config.choices import CHOICES, readers
from rlcli.config.schemas import OptimConfig


def optimizer_options(o: OptimConfig) -> dict[str, Any]:
    """Return what the chosen optimizer is made with, beside its learning rate."""
    own = (key.removeprefix("optim.") for key in CHOICES["optim"][o.kind].option_keys() if "optim" in readers(key))
    options = {"weight_decay": o.weight_decay, **{name: getattr(o, name) for name in own}}
    return options | ({"betas": tuple(o.betas)} if "betas" in options else {})
