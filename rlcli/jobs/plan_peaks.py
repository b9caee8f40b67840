"""What an update holds for a moment, on top of what stays: run on tensors without memory.

The modules are copied to the meta device, parameters and all, so that a net of any size costs nothing here.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from rlcli.data.fields import Field
from rlcli.keys import Key
from rlcli.report.live_bytes import LiveBytes

Module = TypeVar("Module", bound=nn.Module)
META = torch.device("meta")


def on_meta(module: Module) -> Module:
    """A copy whose parameters and buffers have shapes and no memory; gradients are there already."""
    memo: dict[int, Any] = {}
    for p in module.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device=META), requires_grad=p.requires_grad)
        memo[id(p)].grad = torch.empty_like(p, device=META) if p.requires_grad else None
    for b in module.buffers():
        memo[id(b)] = torch.empty_like(b, device=META)
    return copy.deepcopy(module, memo)


def update_peak(loss: Any, fields: Mapping[Key, Field], rows: int, device: str) -> LiveBytes:
    """The most that one minibatch step holds: activations, their gradients, temporaries.

    Parameters
    ----------
    loss : module from a tensordict to `loss...` terms
    fields : mapping
        Must hold the loss's in_keys.
    """
    copied = on_meta(loss)
    columns = {key: fields[key].empty(rows, META) for key in copied.in_keys if key in fields}
    with LiveBytes(reorders=device == "cpu") as live:
        terms = copied(TensorDict(columns, batch_size=[rows]))
        total = sum(terms[name] for name in terms.keys() if name.startswith("loss"))  # noqa: SIM118
        assert isinstance(total, Tensor)
        total.mean().backward()
        del terms, total
    return live
