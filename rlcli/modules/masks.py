"""Action masks: which actions an env allows, read from an observation beside what the networks see.

A mask holds a flag for every option, those of several choices side by side as in the logits; for bits, whether each
may be 0 and whether it may be 1. Logits of options that are not allowed become -inf, so that log-probabilities,
entropies, divergences and draws are those of the allowed ones alone. A row that allows nothing is left as it is, since
networks are shown such rows where an episode has ended; those who act refuse it (`refuse_no_option`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, nn

from rlcli.arguments import refuse
from rlcli.errors import ArgumentError, ConfigError
from rlcli.keys import ACTION_MASK, Key, as_tuple, show, unravel
from rlcli.modules.head import single_action
from rlcli.specs import Binary, Bounded, Categorical, Composite, MultiCategorical, MultiOneHot, OneHot, TensorSpec

LOWEST = torch.finfo(torch.float32).min  # the value of an action that is not allowed: finite, so 0 times it is 0


def allowed(mask: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the options `[*B, sum(sizes)]` that a mask allows; all of a choice where it allows none."""
    mask = mask if mask.dtype is torch.bool else mask != 0
    if len(sizes) == 1:
        return mask | ~mask.any(-1, keepdim=True)
    return torch.cat([part | ~part.any(-1, keepdim=True) for part in mask.split(list(sizes), -1)], -1)


class LogitMask(nn.Module):
    """Logits, or values, of the options that a mask allows; those of the others are `fill`.

    Parameters
    ----------
    sizes : sequence of int
        Options of each choice; none: a single choice of as many options as there are logits.
    bits : bool
        The choices are bits, with one log-odds each: what may not be 1 gets -inf, what may not be 0 gets inf.
    fill : float, optional
        By default -inf.

    Notes
    -----
    `forward(logits [*B, k], mask)`, the mask of any dtype and of as many numbers a row as there are options.
    """

    fast = True

    def __init__(self, sizes: Sequence[int], *, bits: bool = False, fill: float = -math.inf) -> None:
        super().__init__()
        self.sizes, self.bits, self.fill = tuple(sizes), bits, fill

    def forward(self, logits: Tensor, mask: Tensor) -> Tensor:
        sizes = self.sizes or logits.shape[-1:]
        mask = allowed(mask.reshape(*logits.shape[:-1], sum(sizes)), sizes)
        if not self.bits:
            return logits.masked_fill(~mask, self.fill)
        zero, one = mask.unflatten(-1, (-1, 2)).unbind(-1)
        return logits.masked_fill(~one, self.fill).masked_fill(~zero, -self.fill)

    def on_rows(self, source: list[Tensor], masks: list[Tensor], target: list[Tensor]) -> Callable[[int], None]:
        """`run(t)`: the same of `source[t]` and `masks[t]` into `target[t]`, in numpy; the source may be the target."""
        if self.bits or len(self.sizes) > 1:

            def call(t: int) -> None:
                target[t].copy_(self(source[t], masks[t]))

            return call
        triples = [
            (x.numpy(), mask.numpy().reshape(x.shape), out.numpy())
            for x, mask, out in zip(source, masks, target, strict=True)
        ]
        forbidden, fill, none = np.empty(triples[0][0].shape, np.bool_), np.float32(self.fill), np.logical_and.reduce

        def run(t: int) -> None:
            x, mask, out = triples[t]
            np.equal(mask, 0, out=forbidden)
            if out is not x:
                np.copyto(out, x)
            empty = none(forbidden, 1)
            if empty.any():
                forbidden[empty] = False
            np.copyto(out, fill, where=forbidden)

        return run

    def extra_repr(self) -> str:
        return f"sizes={self.sizes}"


ActionMask = LogitMask  # by which rlcli.modules offers it: a wrapper is called so as well


def pick(mask: np.ndarray, sizes: Sequence[int], u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a uniform allowed option of each choice and their count, int64 `[N, len(sizes)]`; u in [0, 1)."""
    index, count = np.empty(u.shape, np.int64), np.empty(u.shape, np.int64)
    for j, (start, stop) in enumerate(pairwise((0, *np.cumsum(sizes).tolist()))):
        so_far = (mask[:, start:stop] != 0).cumsum(1)
        count[:, j] = so_far[:, -1]
        index[:, j] = (so_far > (u[:, j] * count[:, j]).astype(np.int64)[:, None]).argmax(1)
    return index, count


def refuse_no_option(mask: np.ndarray, sizes: Sequence[int], key: Key, where: str) -> None:
    """Raise where a row of a mask `[N, sum(sizes)]` leaves a choice without an option."""
    starts = [0, *np.cumsum(sizes).tolist()[:-1]]
    some = np.logical_or.reduceat(mask != 0, starts, 1) if len(starts) > 1 else mask.any(1)
    if some.all():
        return
    row, *choice = np.argwhere(~some)[0].tolist()
    of = f" for choice {choice[0]}" if choice else ""
    raise ArgumentError(
        f"the action mask allows no action{of}", where=f"{show(key)}, environment {row}, {where}",
        why="every entry is false, and an action has to be taken",
        fix="Have the env allow one at least, or end the episode in the step before.",
    )  # fmt: skip


def mask_key_of(policy: Any) -> Key | None:
    """Return where a policy reads the mask that it keeps to; None where it keeps to none."""
    for part in policy.modules() if isinstance(policy, nn.Module) else (policy,):
        if isinstance(part, TensorDictModule) and isinstance(part.module, LogitMask):
            return unravel(part.in_keys[1])
        if (key := getattr(part, "action_mask_key", None)) is not None:
            return unravel(key)
    return None


def options_of(action_spec: TensorSpec) -> tuple[int, ...]:
    """Return the options of each choice that an action consists of; empty where it is none of several."""
    _, spec = single_action(action_spec)
    if isinstance(spec, Categorical | OneHot):
        return (spec.n,)
    if isinstance(spec, MultiCategorical | MultiOneHot):
        return tuple(spec.nvec)
    return (2,) * spec.n if isinstance(spec, Binary) else ()


def find_action_mask(asked: str | None, observation_spec: Composite, action_spec: TensorSpec) -> Key | None:
    """Return the observation that is an action mask: `asked` ("none" for none), else `action_mask`."""
    if asked == "none":
        return None
    keys = [unravel(key) for key in observation_spec.keys(True, True)]
    masks = [key for key in keys if (as_tuple(key)[-1] == ACTION_MASK if asked is None else show(key) == asked)]
    if asked is None and (not masks or (isinstance(action_spec, Composite) and len(action_spec.keys(True, True)) != 1)):
        return None
    sizes, where = options_of(action_spec), f"policy.action_mask_key={asked or show(masks[0])}"
    if not masks:
        raise ConfigError(
            f"there is no observation '{asked}'", where=where, why=f"the env has {', '.join(map(show, keys))}",
            fix="Give one of these; a mask in `info`, or from a method action_masks(), becomes one by "
            "env.wrappers=[ActionMask].",
        )  # fmt: skip
    if not sizes:
        if asked is None:
            return None
        raise ConfigError(
            "an action mask is for actions that are choices", where=where, why=f"the action is {action_spec!r}",
            fix="Leave policy.action_mask_key out.",
        )  # fmt: skip
    refuse(len(masks) > 1, "several observations are called action_mask", where="policy.action_mask_key",
           why=", ".join(map(show, masks)), fix=f"Say which: policy.action_mask_key={show(masks[0])}, or none.",
           error=ConfigError)  # fmt: skip
    spec = observation_spec[masks[0]]
    width = math.prod(spec.shape[len(observation_spec.shape) :])
    whole = not spec.dtype.is_floating_point and not spec.dtype.is_complex
    flags = whole or (isinstance(spec, Bounded) and bool((spec.low >= 0).all()) and bool((spec.high <= 1).all()))
    if width != sum(sizes) or not flags:
        raise ConfigError(
            f"the observation '{show(masks[0])}' is no mask of the env's actions", where=where,
            why=f"it is {spec!r}, and the action has {' + '.join(map(str, sizes))} options: a mask has a flag for each",
            fix="Use policy.action_mask_key=none if it is an ordinary observation.",
        )  # fmt: skip
    return masks[0]


def with_action_mask(
    actor: ProbabilisticTensorDictSequential, key: Key, action_spec: TensorSpec
) -> ProbabilisticTensorDictSequential:
    """An actor that takes allowed actions only: a mask is put between its network and its distribution.

    Parameters
    ----------
    actor : ProbabilisticTensorDictSequential
        Its last module draws an action from logits.
    key : key
        Of the mask.
    action_spec : TensorSpec

    Raises
    ------
    ArgumentError
        The actor chooses its actions in another way.
    """
    plain = isinstance(actor, ProbabilisticTensorDictSequential)
    *parts, head = actor.module if plain else [None]
    names = list(head.in_keys) if isinstance(head, ProbabilisticTensorDictModule) else []
    refuse(len(names) != 1 or not options_of(action_spec),
           "the policy does not draw its actions from logits, so no action mask can be put before them",
           where=show(key), why=f"it is a {type(actor).__name__}",
           fix=f"Read '{show(key)}' in the policy itself, or use policy.action_mask_key=none.")  # fmt: skip
    bits = isinstance(single_action(action_spec)[1], Binary)
    mask = TensorDictModule(LogitMask(options_of(action_spec), bits=bits), [names[0], key], names)
    return ProbabilisticTensorDictSequential(*parts, mask, head)
