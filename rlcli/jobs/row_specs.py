"""What one env observes and takes, in words: kept with collected frames, and compared by who learns from them."""

from __future__ import annotations

from rlcli.envs import EnvBase
from rlcli.keys import show, unravel


def row_specs(env: EnvBase) -> dict[str, str]:
    """Key -> its spec without the batch dims, of observations and action."""
    one = (0,) * len(env.batch_size)
    leaves = {**dict(env.full_observation_spec.items(True, True)), **dict(env.full_action_spec.items(True, True))}
    return {show(unravel(key)): repr(leaf[one] if one else leaf) for key, leaf in leaves.items()}
