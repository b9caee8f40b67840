"""The clipped PPO loss (arXiv:1707.06347, eq. 7 and 9) and its gradient at the nets' outputs.

Per row, with ratio `w`, advantage `A`, log-probability `l`, entropy `H` and `N` rows,
    d loss / d l = -push / N,   push = w A if the ratio may still move, else 0
    d loss / d H = -c_e / N
so a family adds only its own `d l` and `d H`.

`cpu` is compiled, and `triton` for a GPU; here both are one operation of torch, of which the host reads nothing.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

TERMS = (
    "loss_objective", "loss_critic", "loss_entropy", "entropy", "kl_approx", "clip_fraction", "ESS",
    "explained_variance", "value_clip_fraction",
)  # fmt: skip
FIGURES = ("loss", *TERMS)


def clipped_ppo(
    params: list[Tensor], action: Tensor, rows: list[Tensor], numbers: list[Tensor], critic: str, normalize: bool
) -> list[Tensor]:
    """Return the gradients of `params`, that of the value `[N]`, and `FIGURES`, float32 in one tensor.

    `params`: logits `[N, K]` of int64 actions `[N]`, or loc and scale of `[N, D]`, of any strides. `rows [N]`: value,
    old log-probability, advantage, target, and the old value if the value is clipped. `numbers []`, which are read
    where they lie: how far the ratio may move down and up, the weights of critic and entropy, and how far the value
    may. `critic`: "l2", "l1" or "smooth_l1".
    """
    _library()
    return torch.ops.rlcli.clipped_ppo(params, action, rows, numbers, critic, normalize)


def serves(x: Tensor) -> bool:
    """Say whether there is a kernel for tensors like `x`."""
    has_kernel = x.device.type == "cpu" or (x.is_cuda and importlib.util.find_spec("triton") is not None)
    return has_kernel and x.dtype in (torch.float32, torch.float64)


@cache
def _library() -> torch.library.Library:
    library = torch.library.Library("rlcli", "FRAGMENT")
    library.define(
        "clipped_ppo(Tensor[] params, Tensor action, Tensor[] rows, Tensor[] numbers, str critic, bool normalize)"
        " -> Tensor[]"
    )
    library.impl("clipped_ppo", lambda *given: _file("cpu").clipped_ppo(*given), "CPU")
    library.impl("clipped_ppo", _on_gpu, "CUDA")
    return library


def _on_gpu(params: list[Tensor], *given: Any) -> list[Tensor]:
    with torch.cuda.device_of(params[0]):  # Triton launches on the current one
        return _file("triton").clipped_ppo(params, *given)


def _file(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name}")  # loads a compiler
