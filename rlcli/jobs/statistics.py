"""What an env's transforms have learned (statistics of normalisations), put into another env's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlcli import transforms
from rlcli.envs import EnvBase
from rlcli.envs.transformed import transforms_on
from rlcli.transforms.compose import by_name


def learned_by_transforms(state: dict[str, Any]) -> dict[str, Any]:
    """Return what a saved run's transforms had learned, by name; of several workers, the first's."""
    saved = state["collector"]
    return saved.get("workers", [saved])[0]["engine"]["transforms"]


def adopt(env: EnvBase, learned: Mapping[str, Any], *, learn_on: bool = False) -> None:
    """Put what other transforms had learned, by name, into an env's, which keep it so or learn on from there."""
    for name, transform in by_name(transforms_on(env)).items():
        if name in learned:  # a run that collects may scale rewards otherwise than the one that trained
            transform.adopt(learned[name])
            if isinstance(transform, transforms.RunningNorm | transforms.RewardNorm):
                transform.freeze(not learn_on)
