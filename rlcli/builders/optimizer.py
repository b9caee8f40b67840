"""What the optimizer of a run is told: for both kinds of update."""

from __future__ import annotations

from typing import Any

from rlcli.config.schemas_learn import OptimConfig


def optimizer_options(o: OptimConfig) -> dict[str, Any]:
    """What the chosen optimizer is told, beside its learning rate."""
    options: dict[str, Any] = {"weight_decay": o.weight_decay}
    if o.kind in ("adam", "adamw"):
        return options | {"eps": o.eps, "betas": tuple(o.betas)}
    if o.kind == "rmsprop":
        return options | {"eps": o.eps, "alpha": o.alpha, "momentum": o.momentum}
    return options | {"momentum": o.momentum}
