"""The clipped PPO loss (arXiv:1707.06347, eq. 7 and 9) and its gradient at the nets' outputs.

Per row, with ratio `w`, advantage `A`, log-probability `l`, entropy `H` and `N` rows,
    d loss / d l = -push / N,   push = w A if the ratio may still move, else 0
    d loss / d H = -c_e / N
so a family adds only its own `d l` and `d H`.

`cpu` is compiled, and `triton` for a GPU; here both are one operation of torch, of which the host reads nothing.

`clipped_ppo` gives the gradients of `params`, that of the value `[N]`, and `FIGURES`, float32 in one tensor.
`params`: logits `[N, K]` of int64 actions `[N]`, or loc and scale of `[N, D]`, of any strides. `rows [N]`: value, old
log-probability, advantage, target, and the old value if the value is clipped. `numbers []`, which are read where they
lie: how far the ratio may move down and up, the weights of critic and entropy, and how far the value may. `critic`:
"l2", "l1" or "smooth_l1".
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlcli.kernels import operations

TERMS = (
    "loss_objective", "loss_critic", "loss_entropy", "entropy", "kl_approx", "clip_fraction", "ESS",
    "explained_variance", "value_clip_fraction",
)  # fmt: skip
FIGURES = ("loss", *TERMS)
OPERATIONS = operations.Operations(
    __name__,
    clipped_ppo="(Tensor[] params, Tensor action, Tensor[] rows, Tensor[] numbers, str critic, bool normalize)"
    " -> Tensor[]"
)  # fmt: skip


def serves(x: Tensor) -> bool:
    """Say whether there is a kernel for tensors like `x`."""
    return operations.serves(x) and x.dtype in (torch.float32, torch.float64)
