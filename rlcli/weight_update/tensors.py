"""Weights by name: what a model's version consists of, how new values are checked against it, and how they are copied.

Nothing here waits for another process; `matched` looks and copies nothing, `snapshot` and `write` copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from rlcli.errors import ArgumentError

Source: TypeAlias = nn.Module | TensorDictBase | Mapping[str, Tensor]  # of weights
Target: TypeAlias = nn.Module | TensorDictBase


def named_tensors(model: Target) -> dict[str, Tensor]:
    """Return parameters and buffers of a module, or the entries of a TensorDict, by name."""
    if isinstance(model, TensorDictBase):
        return dict(model.flatten_keys(".").items())
    return dict(model.named_parameters()) | dict(model.named_buffers())


def matched(source: Source, target: Target) -> dict[str, Tensor]:
    """Return the source's tensors by the target's names, uncopied, but those that are the target's own memory."""
    if isinstance(source, nn.Module | TensorDictBase):
        values: Mapping[str, Any] = named_tensors(source)
    elif isinstance(source, Mapping):
        values = source
    else:
        raise ArgumentError(
            "these are no weights", why=f"got a {type(source).__name__}",
            fix="Pass a module, a TensorDict of parameters, or a state_dict.",
        )  # fmt: skip
    tensors = named_tensors(target)
    if values is source and isinstance(target, nn.Module):  # a mapping of what a checkpoint holds
        left_out = tensors.keys() - target.state_dict().keys() - values.keys()
        tensors = {name: tensor for name, tensor in tensors.items() if name not in left_out}
    new = {}
    for name, tensor in tensors.items():
        if name not in values:
            raise ArgumentError(f"the new weights have no '{name}'", fix="Pass the module the collector was made with.")
        value = values[name]
        if not isinstance(value, Tensor | np.ndarray | np.generic):
            raise ArgumentError(f"the new weights' '{name}' is no tensor", why=f"it is a {type(value).__name__}")
        if tuple(value.shape) != tuple(tensor.shape):
            raise ArgumentError(
                f"the new weights do not fit: '{name}' is {tuple(tensor.shape)}", why=f"got {tuple(value.shape)}"
            )
        new[name] = torch.as_tensor(value).detach()
    # a copy of the target's own memory, made now and written later, would undo what was learned between
    return {name: value for name, value in new.items() if not _is_same_memory(value, tensors[name])}


def check_apart(model_id: str, model: Any, others: Mapping[str, Any]) -> None:
    """Refuse one module as the place of two models' weights."""
    for other, used in others.items():
        if other != model_id and used is model:
            raise ArgumentError(
                f"the weights of '{model_id}' would be written over those of '{other}'",
                why="both are used in one place", fix="Give the place of another module.",
            )  # fmt: skip


def snapshot(values: Mapping[str, Tensor], target: Target) -> dict[str, Tensor]:
    """Copy `values` to the devices and dtypes of the target's tensors."""
    tensors = named_tensors(target)
    with torch.inference_mode(False):
        copies = {
            name: value.to(tensors[name].device, tensors[name].dtype, copy=True, memory_format=torch.contiguous_format)
            for name, value in values.items()
        }
    wait(copies.values())
    return copies


def wait(copies: Iterable[Tensor]) -> None:
    """Wait for copies on an accelerator: whoever reads them or reuses their source may be on another stream."""
    for device in {tensor.device for tensor in copies if tensor.device.type != "cpu"}:
        torch.accelerator.synchronize(device)


def write(values: Mapping[str, Tensor], target: Target) -> None:
    """Overwrite the target's tensors of the same names in place."""
    tensors = named_tensors(target)
    written = {_storage(tensors[name]) for name in values}
    if any(_storage(value) in written for value in values.values()):  # or one copy would change what the next one reads
        values = snapshot(values, target)
    with torch.inference_mode(False), torch.no_grad():
        for name, value in values.items():
            part(tensors[name]).copy_(value)


def part(tensor: Tensor) -> Tensor:
    """Return the tensor, moved to memory of its own if elements shared some (expanded ones cannot be written)."""
    if tensor.is_contiguous():
        return tensor
    span = 0  # between the first and the last element, in the dimensions of the smaller strides
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= span:
            tensor.data = tensor.detach().clone(memory_format=torch.contiguous_format)
            break
        span += (size - 1) * stride
    return tensor


def _storage(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _is_same_memory(a: Tensor, b: Tensor) -> bool:
    return (a.data_ptr(), a.stride(), a.dtype, a.device) == (b.data_ptr(), b.stride(), b.dtype, b.device)
