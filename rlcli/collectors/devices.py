"""Devices of each stage of collection, decided once.

Rows lie in host memory, so a batch is copied at most twice, and on one device never:

| copy, waited for by `synchronize` | made when |
|---|---|
| of what the policy reads, to `policy_device` | `policy_is_elsewhere` |
| of the batch, to `storing_device` | `storing_is_elsewhere` |

What comes back (the policy's outputs, an accelerator env's observations) is read into host rows by a copy that waits by
itself, so there is nothing to wait for before the env reads an action.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from rlcli.arguments import refuse
from rlcli.errors import ArgumentError, ConfigError
from rlcli.specs.base import Device
from rlcli.specs.dtypes import torch_dtype

if TYPE_CHECKING:
    from rlcli.collectors.options import CollectorOptions

NOT_COPIED = (
    TypeError, RuntimeError, ValueError, AttributeError, NotImplementedError, copy.Error, pickle.PickleError,
)  # what copying a policy may raise  # fmt: skip


def synchronize(device: torch.device) -> None:
    """Wait until what was copied to an accelerator may be read; CUDA keeps the order of copies and reads itself."""
    if device.type not in ("cuda", "meta"):
        torch.get_device_module(device).synchronize()


def resolve(name: Device) -> torch.device | None:
    """Return a device that exists, with its index where there may be several of its kind."""
    if name is None:
        return None
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device '{name}'", where="device", why=str(error).splitlines()[0]) from error
    if device.type == "cuda":
        refuse(not torch.cuda.is_available(), f"device '{device}' is not there", where="device",
               why="no CUDA GPU is visible", fix="Use device=cpu.", error=ConfigError)  # fmt: skip
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        refuse(device.index >= torch.cuda.device_count(), f"device '{device}' is not there", where="device",
               why=f"this machine has {torch.cuda.device_count()} GPUs", error=ConfigError)  # fmt: skip
    if device.type == "cpu":
        return torch.device("cpu")  # cpu:0 is the same
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device 'mps' is not there", where="device", fix="Use device=cpu.")
    return device


@dataclass(frozen=True)
class Placement:
    env: torch.device | None
    policy: torch.device | None
    storing: torch.device | None
    non_blocking: bool  # leave out the waits for copies
    policy_is_elsewhere: bool  # not in host memory
    storing_is_elsewhere: bool


def same_device(one: torch.device, other: torch.device) -> bool:
    """Say whether two names are of one device: there is one CPU, whatever its index."""
    return one == other or one.type == other.type == "cpu"


def one_device(devices: Any) -> Device:
    """Return the one that a list of `devices` names: a single process acts on one."""
    listed = list(devices) if isinstance(devices, list | tuple) else [devices]
    refuse(not listed, "devices is empty", fix="Leave it out, or name a device.")
    resolved = {resolve(name) for name in listed}
    refuse(len(resolved) > 1, f"one process acts on one device, and devices names {len(resolved)}",
           why=", ".join(map(str, listed)),
           fix="Name one, or run a process for each, with a collector of its own.")  # fmt: skip
    return listed[0]


def place(options: CollectorOptions, env_own: torch.device | None = None, policy: Any = None) -> Placement:
    """Resolve a collector's devices: each before `device`; without any, env (on `env_own`) and policy stay in place."""
    of_all = options.device if options.devices is None else one_device(options.devices)
    named = options.env_device, options.policy_device, options.storing_device
    env, acting, storing = (resolve(of_all if device is None else device) for device in named)
    env = env or env_own
    if acting is None and isinstance(policy, nn.Module):  # the accelerator that it lies on
        places = {tensor.device for tensor in [*policy.parameters(), *policy.buffers()]}
        acting = next((device for device in places if device.type != "cpu"), None)
        if acting is not None and len(places) > 1:
            raise ArgumentError("the policy lies on several devices", fix="Say which one acts: policy_device=...")
    if storing is None and acting == env:
        storing = env
    elsewhere = [device is not None and device.type != "cpu" for device in (acting, storing)]
    return Placement(env, acting, storing, options.no_cuda_sync, *elsewhere)


def column_memory(placement: Placement) -> Callable[..., np.ndarray]:
    """Return `empty(shape, dtype)`: of pages that stay in place where a batch is copied to a GPU."""
    storing = placement.storing
    # such a copy goes on when it was ordered: where nobody waits for it, the next batch would be written into it
    if storing is None or storing.type != "cuda" or placement.non_blocking:
        return np.empty
    return lambda shape, dtype: torch.empty(shape, dtype=torch_dtype(dtype), pin_memory=True).numpy()


# ---- the policy on its device ---------------------------------------------------------------------------------------
def on_device(policy: Any, device: torch.device) -> Any:
    """Return the policy where all tensors are on `device`, else a copy."""
    tensors = [*policy.parameters(), *policy.buffers()] if isinstance(policy, nn.Module) else ()
    moved = not all(same_device(tensor.device, device) for tensor in tensors)
    return own_copy(policy).to(device) if moved else policy


def own_copy(policy: Any) -> Any:
    """Return a copy of modules, or of a tuple of them, with tensors of its own, which nobody trains."""
    copied = copy.deepcopy(policy)
    for module in copied if isinstance(copied, tuple) else (copied,):
        module.requires_grad_(False)
    return copied
