"""Soft actor-critic between its networks: `cpu` is compiled, and `triton` for a GPU.

Here both are operations of torch, of which the host reads nothing. Shape letters: `N` rows, `C` critics, `d` action
dims. Rows of the actor are those of s, then those of s'.
"""

from __future__ import annotations

import importlib.util
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

FIGURES = ("loss", "loss_actor", "loss_qvalue", "loss_alpha", "alpha", "entropy", "q_value")
_BOX = "Tensor centre, Tensor half, float low, float high"
_SCHEMAS = {
    "draw": f"(Tensor both, Tensor states, Tensor action, Tensor[] noise, {_BOX}) -> Tensor[]",
    "terms": "(Tensor values, Tensor next_values, Tensor log_prob, Tensor log_alpha, Tensor reward, Tensor terminated,"
    " Tensor? steps, Tensor? weight, float gamma, float target_entropy, str distance) -> Tensor[]",
    "actor_grad": f"(Tensor both, Tensor noise, Tensor action_grads, Tensor log_alpha, Tensor? weight, {_BOX})"
    " -> Tensor",
}


def draw(
    both: Tensor, states: Tensor, action: Tensor, noise: list[Tensor], box: tuple[Tensor, Tensor, float, float]
) -> list[Tensor]:
    """Return the critics' rows `[3 N, obs + d]` and log-probabilities `[2 N]`, of `both [2 N, 2 d]`: loc, log scale.

    The rows: s with the stored action, s with the one drawn, s' with the one drawn. `noise [N, d]`: at s, at s'. `box`:
    centre and half width of the action, `[d]`, and the bounds of the log scale.
    """
    return _operations()[0].draw(both, states, action, noise, *box)


def terms(
    values: Tensor, next_values: Tensor, log_prob: Tensor, log_alpha: Tensor, reward: Tensor, terminated: Tensor,
    steps: Tensor | None, weight: Tensor | None, gamma: float, target_entropy: float, distance: str,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of `values [C, 2 N]`, errors `[N]`, the gradient of `log_alpha`, and `FIGURES`.

    `values`: at s with the stored action, at s with the one drawn; `next_values [C, N]` of the target critics.
    """
    return _operations()[0].terms(
        values, next_values, log_prob, log_alpha, reward, terminated, steps, weight, gamma, target_entropy, distance
    )


def actor_grad(
    both: Tensor, noise: Tensor, action_grads: Tensor, log_alpha: Tensor, weight: Tensor | None,
    box: tuple[Tensor, Tensor, float, float],
) -> Tensor:  # fmt: skip
    """Return the gradient `[N, 2 d]` at the actor's outputs at s, from the critics' `action_grads [C, N, d]`."""
    return _operations()[0].actor_grad(both, noise, action_grads, log_alpha, weight, *box)


def serves(x: Tensor) -> bool:
    """Say whether there is a kernel for tensors like `x`."""
    return x.device.type == "cpu" or (x.is_cuda and importlib.util.find_spec("triton") is not None)


def _made(file: str, name: str, like: Tensor, *given: Any) -> Any:
    """Call an operation of a file, which loads a compiler."""
    with torch.cuda.device_of(like):  # Triton launches on the current one
        return getattr(importlib.import_module(f"{__name__}.{file}"), f"{name}_of")(like, *given)


@cache
def _operations() -> Any:
    library = torch.library.Library("rlcli_sac", "DEF")
    for name, schema in _SCHEMAS.items():
        library.define(name + schema)
        for key, file in (("CPU", "cpu"), ("CUDA", "triton")):
            library.impl(name, partial(_made, file, name), key)
    return torch.ops.rlcli_sac, library  # they live as long as it does
