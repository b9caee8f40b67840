"""From one step to the next: what `next` becomes the root."""

from __future__ import annotations

from tensordict import TensorDictBase
from torch import Tensor

from rlcli.keys import ACTION, DONE, NEXT, RESET


def step_mdp(
    tensordict: TensorDictBase,
    next_tensordict: TensorDictBase | None = None,
    keep_other: bool = True,
    exclude_reward: bool = True,
    exclude_done: bool = False,
    exclude_action: bool = True,
) -> TensorDictBase:
    """The root of the following step: everything under `next` but the reward, moved up.

    Parameters
    ----------
    tensordict : TensorDictBase
    next_tensordict : TensorDictBase, optional
        Where it is written; a new one by default.
    keep_other : bool
        Carry root entries that have no successor (a policy's hidden state in the root, collector metadata).
    exclude_reward, exclude_done, exclude_action : bool
        Leave the reward, `done` (of the three flags) and the action out. The action is that of this step: it is no
        observation of the next one, and the policy writes over it.
    """
    following = tensordict.get(NEXT)
    left_out = (["reward"] if exclude_reward else []) + (["done"] if exclude_done else [])
    following = following.exclude(*left_out) if left_out else following
    if keep_other:
        own = tensordict.exclude(NEXT, RESET, *left_out, *([ACTION] if exclude_action else []))
        out = own.clone(False).update(following)
    else:
        out = following.clone(False)
        if not exclude_action and (action := tensordict.get(ACTION, None)) is not None:
            out.set(ACTION, action)
    return out if next_tensordict is None else next_tensordict.update(out)


def episode_over(td: TensorDictBase) -> Tensor:
    """`next.done`, bool `[*batch, 1]`."""
    return td.get(DONE)
