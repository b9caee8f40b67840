"""What a recurrent policy needs of its env: a marker of first steps and a place for its state."""

from __future__ import annotations

from typing import Any

from torch import nn

from rlcli.envs import EnvBase
from rlcli.keys import IS_INIT
from rlcli.transforms import InitTracker, Transform


def missing_transforms(env: EnvBase, policy: Any) -> list[Transform]:
    """InitTracker and primers for every recurrent part of the policy, unless the env's specs hold their keys already.

    A part is recurrent when it has `make_tensordict_primer()`.
    """
    if not isinstance(policy, nn.Module):
        return []
    parts: list[Any] = [module for module in policy.modules() if hasattr(module, "make_tensordict_primer")]
    present = set(env.full_observation_spec.keys(True, True)) | set(env.full_state_spec.keys(True, True))
    found: list[Transform] = []
    if parts and IS_INIT not in present:
        found.append(InitTracker())
    for part in parts:
        primer = part.make_tensordict_primer()
        if not set(primer.out_keys) <= present:
            found.append(primer)
    return found
