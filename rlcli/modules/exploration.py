"""How a policy's actions are taken (by its distribution's draw or mode), and a policy of uniform actions.

The setting is tensordict's interaction type under the field's name; a collector reads it when it binds a
policy, not at every step.
"""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType as ExplorationType
from tensordict.nn import set_interaction_type as set_exploration_type
from tensordict.nn.probabilistic import interaction_type as exploration_type

from rlcli.arguments import refuse
from rlcli.errors import ArgumentError
from rlcli.keys import ACTION, Key
from rlcli.specs import Composite, TensorSpec

__all__ = ["ExplorationType", "RandomPolicy", "exploration_type", "set_exploration_type"]

EXPLORATION = {name: ExplorationType[name.upper()] for name in ("random", "mode", "mean", "deterministic")}


class RandomPolicy:
    """Writes legal actions drawn from the action spec; reads nothing.

    Parameters
    ----------
    action_spec : TensorSpec or Composite, optional
        Batch dims included. A composite with one leaf gives its key too. Without one it is a collector's policy: random
        actions of that collector's env.
    action_key : key
        Where a plain spec's action goes.
    generator : torch.Generator, optional
        Defaults to torch's global one.
    action_mask_key : key, optional
        Of an observation that says which actions are allowed; for a collector's policy.
    """

    def __init__(
        self,
        action_spec: TensorSpec | None = None,
        action_key: Key = ACTION,
        *,
        generator: torch.Generator | None = None,
        action_mask_key: Key | None = None,
    ) -> None:
        if isinstance(action_spec, Composite):
            keys = action_spec.keys(True, True)
            refuse(len(keys) != 1, "RandomPolicy takes one action", why=f"the spec has {len(keys)}: {keys}")
            action_key, action_spec = keys[0], action_spec[keys[0]]
        refuse(action_mask_key is not None and action_spec is not None,
               "RandomPolicy draws from an action spec, or among the actions that a mask allows",
               why="it was given both",
               fix="Use RandomPolicy(action_mask_key=...) as the policy of a collector.")  # fmt: skip
        self.action_spec, self.action_key, self.generator = action_spec, action_key, generator
        self.action_mask_key = action_mask_key

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        if self.action_spec is None:
            raise ArgumentError("RandomPolicy was given no action spec", fix="Use RandomPolicy(env.action_spec).")
        return td.set(self.action_key, self.action_spec.rand(generator=self.generator))
