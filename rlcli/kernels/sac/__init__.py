"""Soft actor-critic between its networks: `cpu` is compiled, and `triton` for a GPU.

Here both are operations of torch, of which the host reads nothing. Shape letters: `N` rows, `C` critics, `d` action
dims. Rows of the actor, `both [2 N, 2 d]` (loc, log scale), are those of s, then those of s'.

`draw` gives the critics' rows `[3 N, obs + d]`, which are s with the stored action, s with the one drawn, s' with the
one drawn, and log-probabilities `[2 N]`. `noise [N, d]`: at s, at s'. `centre` and `half` width of the action, `[d]`,
`low` and `high` bound of the log scale.

`terms` gives the gradients of `values [C, 2 N]`, at s with the stored action and with the one drawn, errors `[N]`, the
gradient of `log_alpha`, and `FIGURES`. `next_values [C, N]` are the target critics'.

`actor_grad` gives the gradient `[N, 2 d]` at the actor's outputs at s, from the critics' `action_grads [C, N, d]`.
"""

from __future__ import annotations

from rlcli.kernels.operations import Operations

FIGURES = ("loss", "loss_actor", "loss_qvalue", "loss_alpha", "alpha", "entropy", "q_value")
_BOX = "Tensor centre, Tensor half, float low, float high"
OPERATIONS = Operations(
    __name__,
    draw=f"(Tensor both, Tensor states, Tensor action, Tensor[] noise, {_BOX}) -> Tensor[]",
    terms="(Tensor values, Tensor next_values, Tensor log_prob, Tensor log_alpha, Tensor reward, Tensor terminated,"
    " Tensor? steps, Tensor? weight, float gamma, float target_entropy, str distance) -> Tensor[]",
    actor_grad=f"(Tensor both, Tensor noise, Tensor action_grads, Tensor log_alpha, Tensor? weight, {_BOX})"
    " -> Tensor",
)  # fmt: skip
