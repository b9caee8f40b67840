"""Collecting by workers of a cluster or of a process group."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

from rlcli.bench.peers import torchrl_actor


def torchrl_cluster(env_id: str, workers: int, lanes: int, frames: int, *, ray: bool) -> Callable[[], Any] | None:
    """torchrl's synchronous RayCollector, or its DistributedCollector over gloo, with a 2x64 actor: its next batch.

    None where it is not installed.
    """
    try:
        from torchrl.collectors.distributed import DistributedCollector, RayCollector
        from torchrl.envs import GymEnv, SerialEnv
    except ImportError:
        return None
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    make = functools.partial(SerialEnv, lanes, functools.partial(GymEnv, env_id))
    one = GymEnv(env_id)
    options: dict[str, Any] = {"frames_per_batch": frames, "total_frames": 10**9, "sync": True}
    if ray:
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # loopback alone
        config = {"address": "local", "num_cpus": workers, "include_dashboard": False, "log_to_driver": False}
        asked = {"num_cpus": 1, "num_gpus": 0}
        collector = RayCollector([make] * workers, torchrl_actor(one), ray_init_config=config, remote_configs=asked,
                                 **options)  # fmt: skip
    else:
        collector = DistributedCollector([make] * workers, torchrl_actor(one), launcher="mp", backend="gloo", **options)
    return functools.partial(next, iter(collector))
