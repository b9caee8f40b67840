"""Keeping the weights that act in step with those that are trained: nothing to do where they are the same tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from tensordict import TensorDictBase
from torch import Tensor, nn

from rlcli.collectors.policies import copy_weights
from rlcli.errors import ArgumentError

Source: TypeAlias = nn.Module | TensorDictBase | Mapping[str, Tensor]
POLICY = "policy"


class FollowedWeights:
    """Pairs of a model that is trained and the one that collecting uses.

    Parameters
    ----------
    given : nn.Module or callable or None
        The policy as the collector was given it.
    used : nn.Module or callable or None
        The policy that acts: `given` itself or a copy of it.
    """

    def __init__(self, given: Any, used: Any) -> None:
        self._pairs: dict[str, tuple[Any, Any]] = {POLICY: (given, used)}

    def register(self, name: str, trained: nn.Module, used: nn.Module | None) -> None:
        """Add a pair, or replace it; see `Collector.register_model`."""
        if name == POLICY:
            raise ArgumentError(f"the name '{POLICY}' is the collector's own policy", fix="Choose another name.")
        for module in (trained, used):
            if not isinstance(module, nn.Module | None):
                raise ArgumentError(
                    f"the model '{name}' has no weights to keep in step", why=f"it is a {type(module).__name__}"
                )
        self._pairs[name] = (trained, trained if used is None else used)

    def update(self, source: Source | None, model_id: str | None) -> None:
        """Copy weights to what collects: of all models from what is trained, or of one from `source`.

        Raises
        ------
        ArgumentError
            An unknown model, something that holds no weights, or weights that do not fit the model.
        """
        name = model_id or POLICY
        if name not in self._pairs:
            raise ArgumentError(f"no model is called '{name}'", why=f"there are {', '.join(self._pairs)}")
        if source is not None and not isinstance(self._pairs[name][1], nn.Module):
            raise ArgumentError(f"'{name}' has no weights to update", why=f"it is {_kind(self._pairs[name][1])}")
        for other, (trained, used) in self._pairs.items():
            if model_id is not None and other != name:
                continue
            new = source if other == name and source is not None else trained
            if new is not used:
                copy_weights(new, used)


def _kind(policy: Any) -> str:
    return "random actions" if policy is None else f"a {type(policy).__name__}"
