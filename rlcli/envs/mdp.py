"""From one step to the next: what `next` becomes the root."""

from __future__ import annotations

from tensordict import TensorDictBase
from torch import Tensor

from rlcli.keys import ACTION, DONE, NEXT, RESET


def step_mdp(td: TensorDictBase, *, keep_other: bool = True) -> TensorDictBase:
    """The root of the following step: everything under `next` but the reward, moved up.

    `keep_other` carries root entries that have no successor (a policy's hidden state in the root, collector metadata).
    The action and policy outputs of this step are not observations of the next one; they are overwritten by the policy.
    """
    following = td.get(NEXT).exclude("reward")
    if not keep_other:
        return following.clone(False)
    out = td.exclude(NEXT, ACTION, RESET)
    return out.clone(False).update(following)


def episode_over(td: TensorDictBase) -> Tensor:
    """`next.done`, bool `[*batch, 1]`."""
    return td.get(DONE)
