"""Where each stage of collection runs, decided once.

| flag | meaning |
|---|---|
| `cast_to_policy_device` | the carrier is copied to `policy_device` before the policy reads it |
| `cast_to_env_device` | the carrier is copied to `env_device` before the env reads it |
| `sync_policy`, `sync_env`, `sync_storage` | what waits for that copy to land |

On one device every flag is False and every sync does nothing, so the loop has no device branch.  Rows always lie in
host memory: `policy_is_elsewhere` says whether a policy needs them copied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rlcli.errors import ConfigError

Device = torch.device | None


def _do_nothing() -> None:
    """No copy is in flight, or the destination orders it itself."""


def _cuda_sync_if_initialized() -> None:
    """Wait for copies off the GPU; a forked child that never touched CUDA does nothing."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def sync_function(device: Device) -> Callable[[], None]:
    """What makes a copy to `device` safe to read (the table of the collector's documentation)."""
    if device is None or device.type == "cuda":
        return _do_nothing
    if torch.cuda.is_available():
        return _cuda_sync_if_initialized
    if torch.backends.mps.is_available():
        return torch.mps.synchronize
    npu = getattr(torch, "npu", None)
    if npu is not None and npu.is_available():
        return npu.synchronize
    return _do_nothing


def resolve(name: str | torch.device | None) -> Device:
    """A device that exists, with its index.

    Raises
    ------
    ConfigError
        The device is unknown or not present on this machine.
    """
    if name is None:
        return None
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device '{name}'", where="device", why=str(error).splitlines()[0]) from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                f"device '{device}' is not there", where="device", why="no CUDA GPU is visible", fix="Use device=cpu."
            )
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if device.index >= torch.cuda.device_count():
            raise ConfigError(
                f"device '{device}' is not there",
                where="device",
                why=f"this machine has {torch.cuda.device_count()} GPUs",
            )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device 'mps' is not there", where="device", fix="Use device=cpu.")
    return device


@dataclass(frozen=True)
class Placement:
    """The devices of one collector and what follows from them."""

    env: Device
    policy: Device
    storing: Device
    cast_to_policy_device: bool
    cast_to_env_device: bool
    sync_policy: Callable[[], None]
    sync_env: Callable[[], None]
    sync_storage: Callable[[], None]
    non_blocking: bool

    @property
    def policy_is_elsewhere(self) -> bool:
        """Whether rows must be copied before the policy can read them."""
        return self.policy is not None and self.policy.type != "cpu"


def place(
    *,
    device=None,
    env_device=None,
    policy_device=None,
    storing_device=None,
    env_own: Device = None,
    policy_own: Device = None,
    no_cuda_sync=False,
) -> Placement:
    """Resolve the four device arguments of a collector.

    Parameters
    ----------
    device
        Sets the other three at once; each may override it.
    env_own : torch.device, optional
        The device the env has by itself, used where neither `device` nor `env_device` is given.
    policy_own : torch.device, optional
        The same for the policy.
    no_cuda_sync : bool
        Leave out the explicit waits: only where transfers are already ordered.
    """
    env = resolve(env_device if env_device is not None else device) or env_own
    policy = resolve(policy_device if policy_device is not None else device) or policy_own
    storing = resolve(storing_device if storing_device is not None else device)
    if storing is None and policy == env:
        storing = env
    to_policy = policy is not None and policy != (env or torch.device("cpu"))
    to_env = to_policy or (storing is not None and (env or torch.device("cpu")) != storing)

    def sync(target: Device) -> Callable[[], None]:
        return _do_nothing if no_cuda_sync else sync_function(target)

    return Placement(env, policy, storing, to_policy, to_env, sync(policy), sync(env), sync(storing), no_cuda_sync)
