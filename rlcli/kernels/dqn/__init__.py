"""Q-learning between its networks: `cpu` is compiled, and `triton` for a GPU; here both are one operation of torch.

`q_learning` gives the gradient of `values [N, A]`, errors `[N]`, and in one tensor the loss and the mean value taken.
`action`: an index a row. `next_values` and `choosing [N, A]`: what values the next action, and what chooses it.
"""

from __future__ import annotations

from rlcli.kernels.operations import Operations

OPERATIONS = Operations(
    __name__,
    q_learning="(Tensor values, Tensor action, Tensor next_values, Tensor choosing, Tensor reward,"
    " Tensor terminated, Tensor? steps, Tensor? weight, float gamma, str distance) -> Tensor[]"
)  # fmt: skip
