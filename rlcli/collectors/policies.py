"""What a collector accepts as a policy, brought to one form: a callable on tensordicts, on the right device."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

from rlcli.collectors.recurrent_wiring import refuse_lost_states
from rlcli.errors import ArgumentError
from rlcli.keys import ACTION, Key, as_tuple, show

_TENSORDICT_NAMES = {"td", "tensordict", "tensordict_in", "data"}


def on_tensordicts(policy: Any, observation_keys: list[Key]) -> Callable[[TensorDictBase], TensorDictBase]:
    """A policy as a callable on tensordicts.

    - anything with `in_keys` (a TensorDictModule), and any callable that is not an `nn.Module`, is used as it is;
    - an `nn.Module` whose `forward` has one argument named like a tensordict, likewise;
    - any other `nn.Module` reads observations, by the names of its arguments or, where the count fits, in order, and
      returns the action.

    Raises
    ------
    ArgumentError
        Not callable, a module whose arguments are not observation keys, or one with a state that nothing carries.
    """
    if not callable(policy):
        raise ArgumentError("the policy cannot be called", why=f"it is a {type(policy).__name__}")
    refuse_lost_states(policy, observation_keys)
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
    return copy.deepcopy(policy).to(device).requires_grad_(False), True


def copy_weights(source: nn.Module | TensorDictBase | Mapping[str, torch.Tensor], target: nn.Module) -> None:
    """Overwrite the target's parameters and buffers with the source's, in place.

    Parameters
    ----------
    source : nn.Module, TensorDict or mapping
        A module of the same structure, `TensorDict.from_module` of one, or a `state_dict`.

    Raises
    ------
    ArgumentError
        A name is missing or a shape differs; then nothing was changed.  A `state_dict` may lack what it never holds, a
        buffer that is not persistent: that stays as it is.
    """
    if isinstance(source, nn.Module):
        values: Mapping[str, Any] = dict(source.named_parameters()) | dict(source.named_buffers())
    elif isinstance(source, TensorDictBase):
        values = dict(source.flatten_keys(".").items())
    elif isinstance(source, Mapping):
        values = source
    else:
        raise ArgumentError(
            "these are no weights", why=f"got a {type(source).__name__}",
            fix="Pass a module, a TensorDict of parameters, or a state_dict.",
        )  # fmt: skip
    tensors = dict(target.named_parameters()) | dict(target.named_buffers())
    if values is source:  # a mapping of what a checkpoint holds
        left_out = tensors.keys() - target.state_dict().keys() - values.keys()
        tensors = {name: tensor for name, tensor in tensors.items() if name not in left_out}
    for name, tensor in tensors.items():
        if name not in values:
            raise ArgumentError(f"the new weights have no '{name}'", fix="Pass the module the collector was made with.")
        if values[name].shape != tensor.shape:
            raise ArgumentError(
                f"the new weights do not fit: '{name}' is {tuple(tensor.shape)}", why=f"got {tuple(values[name].shape)}"
            )
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(values[name])
