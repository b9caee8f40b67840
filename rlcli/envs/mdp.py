"""One step on tensordicts: a policy that acts on the root, end flags made whole, what of `next` becomes the root."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from rlcli.errors import ArgumentError
from rlcli.keys import ACTION, NEXT, RESET, Key, as_tuple, show

_TENSORDICT_NAMES = {"td", "tensordict", "tensordict_in", "data"}


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
    following = tensordict.get(NEXT, None) if isinstance(tensordict, TensorDictBase) else None
    if following is None:
        raise ArgumentError(
            "step_mdp takes the tensordict of a step, which holds 'next'",
            why=f"got {', '.join(map(show, tensordict.keys())) or 'no keys'}" if isinstance(tensordict, TensorDictBase)
            else f"got a {type(tensordict).__name__}",
            fix="Give it what env.step returned.",
        )  # fmt: skip
    left_out = (["reward"] if exclude_reward else []) + (["done"] if exclude_done else [])
    following = following.exclude(*left_out) if left_out else following
    if keep_other:
        root = tensordict.exclude(NEXT, RESET, *left_out, *([ACTION] if exclude_action else []))
        out = root.clone(False).update(following)
    else:
        out = following.clone(False)
        if not exclude_action and (action := tensordict.get(ACTION, None)) is not None:
            out.set(ACTION, action)
    return out if next_tensordict is None else next_tensordict.update(out)


def complete_flags(out: TensorDictBase, batch_size: torch.Size, before: Tensor | None = None) -> None:
    """Fill in missing end flags: `done` alone is truncated, or terminated if that is missing, beyond `before`."""
    terminated, truncated, done = (out.get(name, None) for name in ("terminated", "truncated", "done"))
    shape = (*batch_size, 1)

    def flag(value: Tensor | None) -> Tensor:
        if value is None:
            return torch.zeros(shape, dtype=torch.bool, device=out.device)
        return value.reshape(shape).bool()

    ends_itself = terminated is None  # an env that only says "done" means the episode is over by its own rules
    terminated, truncated = flag(terminated), flag(truncated)
    union = terminated | truncated
    if done is not None and not torch.equal(declared := flag(done), union if before is None else flag(before)):
        if before is not None:
            was = flag(before)
            terminated, truncated = terminated & (declared | ~was), truncated & (declared | ~was)
            declared = declared & ~was
        rest = declared & ~(terminated | truncated)
        terminated, truncated = (terminated | rest, truncated) if ends_itself else (terminated, truncated | rest)
        union = terminated | truncated
    out.set("terminated", terminated)
    out.set("truncated", truncated)
    out.set("done", union)


def promoted(root: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
    """Return the root of the next step: every key of this one, with its value under `next` where there is one."""
    return root.clone(False).update(following.select(*root.keys(True, True), strict=False))


def merged(old: TensorDictBase, new: TensorDictBase, mask: Tensor) -> TensorDictBase:
    """Return `new` where the mask `[*batch, 1]` is set, `old` elsewhere."""
    out = old.clone(False)
    lanes = mask.squeeze(-1)
    for key in new.keys(True, True):
        fresh, kept = new.get(key), old.get(key, None)
        if kept is None:
            out.set(key, fresh)
            continue
        out.set(key, torch.where(lanes.reshape(*lanes.shape, *[1] * (fresh.ndim - lanes.ndim)), fresh, kept))
    return out


# ---- what acts ---------------------------------------------------------------------------------------------------
def on_tensordicts(policy: Any, observation_keys: list[Key]) -> Callable[[TensorDictBase], TensorDictBase]:
    """Return a policy as a callable on tensordicts; a plain module reads observations by argument name or order."""
    if not callable(policy):
        raise ArgumentError("the policy cannot be called", why=f"it is a {type(policy).__name__}")
    if hasattr(policy, "in_keys") or not isinstance(policy, nn.Module):
        return policy
    wanted = [
        p.name
        for p in inspect.signature(policy.forward).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(wanted) == 1 and wanted[0] in _TENSORDICT_NAMES:
        return policy
    by_name = {as_tuple(key)[-1]: key for key in observation_keys}
    if wanted and all(name in by_name for name in wanted):
        return TensorDictModule(policy, in_keys=[by_name[name] for name in wanted], out_keys=[ACTION])
    if len(wanted) == len(observation_keys):
        return TensorDictModule(policy, in_keys=list(observation_keys), out_keys=[ACTION])
    raise ArgumentError(
        f"{type(policy).__name__}.forward({', '.join(wanted)}) does not fit the env's observations",
        why=f"the env offers {', '.join(map(show, observation_keys))}",
        fix="Name the arguments like the observations, or wrap it in a TensorDictModule with in_keys and out_keys.",
    )


def acted(policy: Callable[[TensorDictBase], TensorDictBase | None], root: TensorDictBase) -> TensorDictBase:
    """Return `root` and what the policy writes beside; the policy is given a copy."""
    given = root.clone()
    out = policy(given)
    return (given if out is None else out).clone(False).update(root)
