"""Copies of policies: on the device where one acts, beside the one that is trained, and to try things on.

A copy to try things on has state and parameters of its own, since a call may write to either.  Functions keep state
too, in what they close over (hooks that count, lambdas inside of modules): it is copied with them.
"""

from __future__ import annotations

import copy
import pickle
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rlcli.errors import ArgumentError

NOT_COPIED = (
    TypeError, RuntimeError, ValueError, AttributeError, NotImplementedError, copy.Error, pickle.PickleError,
)  # what copying a policy may raise  # fmt: skip


def own_device(policy: Any) -> torch.device | None:
    """The accelerator a policy lies on; None for the CPU, and for what has no tensors."""
    if not isinstance(policy, nn.Module):
        return None
    places = {tensor.device for tensor in [*policy.parameters(), *policy.buffers()]}
    found = next((device for device in places if device.type != "cpu"), None)
    if found is not None and len(places) > 1:
        raise ArgumentError("the policy lies on several devices", fix="Say which one acts: policy_device=...")
    return found


def on_device(policy: Any, device: torch.device | None) -> tuple[Any, bool]:
    """The policy with all its tensors on `device`, and whether that took a copy.

    It is copied exactly when one of its parameters or buffers lies elsewhere; otherwise the very object is used.  A
    callable without parameters is never copied.
    """
    if device is None or not isinstance(policy, nn.Module):
        return policy, False
    tensors = [*policy.parameters(), *policy.buffers()]
    if all(tensor.device == device for tensor in tensors):
        return policy, False
    return own_copy(policy).to(device), True


def own_copy(policy: Any) -> Any:
    """A copy of modules, or of a tuple of them, with tensors of its own, which nobody trains."""
    copied = copy.deepcopy(policy)
    for module in copied if isinstance(copied, tuple) else (copied,):
        module.requires_grad_(False)
    return copied


# ---- to try things on ------------------------------------------------------------------------------------------------
def twin(policy: Any) -> nn.Module | None:
    """A copy of a module, or None: it is no module, or holds what cannot be copied."""
    if not isinstance(policy, nn.Module):
        return None
    memo: dict[int, Any] = {}
    try:
        for function in _closures(policy):
            memo[id(function)] = _copied(function, memo)
        return copy.deepcopy(policy, memo)
    except NOT_COPIED:
        return None


def twin_of_callable(policy: Any) -> Any:
    """A copy of an object, or of a function with what it closes over and the data of its module that it names; or None.

    Functions of its module that it calls are the same ones: what those keep beside is shared.
    """
    try:
        if not isinstance(policy, types.FunctionType):
            return copy.deepcopy(policy)
        memo: dict[int, Any] = {}
        named = {name: policy.__globals__[name] for name in _names(policy.__code__) if name in policy.__globals__}
        data = {name: copy.deepcopy(x, memo) for name, x in named.items() if not isinstance(x, types.ModuleType)}
        return _copied(policy, memo, policy.__globals__ | data)
    except NOT_COPIED:
        return None


def _names(code: types.CodeType) -> set[str]:
    """What a function, and those that it defines, may look up in their module."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return {*code.co_names}.union(*inner)


def _closures(policy: nn.Module) -> Iterator[types.FunctionType]:
    """Functions that the policy's modules hold: hooks, and attributes such as the function of a TensorDictModule."""
    for module in policy.modules():
        for value in [*vars(module).values()]:
            held = value.values() if isinstance(value, dict) else [value]
            yield from (f for f in held if isinstance(f, types.FunctionType) and f.__closure__)


def _copied(
    function: types.FunctionType, memo: dict[int, Any], names: dict[str, Any] | None = None
) -> types.FunctionType:
    cells = tuple(types.CellType(copy.deepcopy(cell.cell_contents, memo)) for cell in function.__closure__ or ())
    names = function.__globals__ if names is None else names
    defaults = copy.deepcopy(function.__defaults__, memo)
    new = types.FunctionType(function.__code__, names, function.__name__, defaults, cells)
    new.__kwdefaults__ = function.__kwdefaults__
    return new
