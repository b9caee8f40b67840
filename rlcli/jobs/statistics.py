"""What an env's transforms have learned (statistics of normalisations), put into another env's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlcli import transforms
from rlcli.envs import EnvBase
from rlcli.envs.transformed import transforms_on
from rlcli.transforms.compose import by_name


def restored_transforms(env: EnvBase, state: dict[str, Any]) -> None:
    """Put what a saved run's transforms had learned into an env's."""
    _adopt(env, learned_by_transforms(state))


def learned_by_transforms(state: dict[str, Any]) -> dict[str, Any]:
    """Return what a saved run's transforms had learned, by name; of several workers, the first's."""
    saved = state["collector"]
    return saved.get("workers", [saved])[0]["engine"]["transforms"]


def copy_transforms(source: EnvBase, target: EnvBase) -> None:
    """Put what a live env's transforms have learned into another's."""
    _adopt(target, {name: t.state_dict() for name, t in by_name(transforms_on(source)).items()})


def continue_transforms(env: EnvBase, saved: Mapping[str, Any]) -> None:
    """Have an env's transforms begin with what others had learned, and learn on from there."""
    _adopt(env, saved)
    for transform in transforms_on(env):
        if isinstance(transform, transforms.RunningNorm | transforms.RewardNorm):
            transform.freeze(False)


def _adopt(env: EnvBase, saved: Mapping[str, Any]) -> None:
    for name, transform in by_name(transforms_on(env)).items():
        if name in saved:  # a run that collects may scale rewards otherwise than the one that trained
            transform.adopt(saved[name])
