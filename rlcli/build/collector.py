"""The collector of a run, the keys of its batches and the devices of its stages, from a configuration."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from rlcli import modules
from rlcli.build.env import build_env
from rlcli.build.ranks import first_lane, ranks_of
from rlcli.collectors.base import BaseCollector
from rlcli.collectors.collector import Collector
from rlcli.collectors.devices import resolve
from rlcli.collectors.options import AHEAD, FIELDS
from rlcli.collectors.schema import RowSchema
from rlcli.config.choices import collect, learn
from rlcli.config.installed import accelerator
from rlcli.config.option import as_choice
from rlcli.config.schemas import CollectConfig, Config, draws, is_off_policy
from rlcli.data.next_obs.modes import KEEPS, SHARED
from rlcli.envs import EnvBase
from rlcli.graphs import graph
from rlcli.keys import Key, under_next
from rlcli.modules import ActorCritic
from rlcli.modules.masks import find_action_mask
from rlcli.processes.memory import free_memory
from rlcli.processes.process import cores
from rlcli.runs import random_streams

_RAYS_SHARE = 0.3  # of free memory, which Ray's store is by itself
C = TypeVar("C", bound=CollectConfig)
SLICED = 16  # every so many states are kept where slices are drawn


def build_collector(
    cfg: CollectConfig, env: EnvBase, policy: ActorCritic | None, keep_keys: Sequence[Key] | None
) -> BaseCollector:
    """Return the collector of a run: seeded, every episode on its own, so that it can be resumed exactly."""
    c, p, places = cfg.collector, as_choice(collect.UsersPolicyOptions, cfg.policy), devices(cfg)
    actor: Any = None if policy is None else policy.actor
    graph.use(cfg.device.graphs)
    if actor is None:
        mask = find_action_mask(p.action_mask_key, env.observation_spec, env.action_spec)
        actor = None if mask is None else modules.RandomPolicy(action_mask_key=mask)
    options: dict[str, Any] = {name: value for name, value in vars(c).items() if name in FIELDS} | {
        "total_frames": cfg.total_frames, "next_obs": cfg.memory.next_obs, **differences(cfg), "keep_keys": keep_keys,
        "traj_format": "cat" if c.trajs_per_batch else None, "weights_swap": cfg.weights.swap,
        "deliver_leftovers": c.deliver_leftovers and c.trajs_per_batch is not None,
        "exploration_type": p.exploration,
        "storing_device": places["storing_device"], "env_device": places["env_device"],
        "policy_device": places["policy_device"], "no_cuda_sync": cfg.device.no_cuda_sync, "seed": cfg.seed,
        "episode_seeds": True, "recurrent_state_stride": state_stride(cfg),
    }  # fmt: skip
    first = first_lane(cfg)
    if (ranks := ranks_of(cfg)) > 1:
        options |= {
            "first_lane": first, "all_lanes": ranks * cfg.env.num, "init_random_frames": c.init_random_frames // ranks,
            "total_frames": -(-cfg.total_frames // (ranks * cfg.env.num)) * cfg.env.num,
        }  # fmt: skip
    if c.kind == "sync":
        return Collector(env, actor, **options)
    from rlcli.collectors import MultiAsyncCollector, MultiSyncCollector

    if isinstance(c, collect.RayOptions):
        with random_streams.kept():
            width = Collector(env, actor, **options).schema.width
        frames = c.frames_per_batch + cfg.env.num  # to whole steps
        options["ray_init_config"] = ray_cluster(c, width * frames * (1 if c.sync else AHEAD * len(shares(cfg))))
    several = as_choice(collect.MultiSyncOptions, c)
    if cfg.device.policy_device is None and places["policy_device"] is not None:
        options["policy_device"] = torch.device("cpu")  # each would have a context of its own on a GPU
    start_method = None if several.start_method == "auto" else several.start_method
    options |= {"start_method": start_method, "on_worker_error": c.on_worker_error}
    makers = [
        partial(build_env, dataclasses.replace(cfg.env, num=len(share)), offset=first + share.start)
        for share in shares(cfg)
    ]
    together: dict[str, Any] = {"cat_results": 0}
    w = cfg.weights
    apart: dict[str, Any] = {"max_lag": w.max_lag, "on_lag": "report" if w.max_lag is None else w.on_lag}
    if isinstance(c, collect.ElsewhereOptions):
        options |= {**(together if c.sync else apart), "sync": c.sync, "timeout": c.timeout}
        return elsewhere(c, makers, actor, options)
    if c.kind == "multi_sync":
        options["preemptive_threshold"] = several.preemptive_threshold
        return MultiSyncCollector(makers, actor, **together, **options)
    return MultiAsyncCollector(makers, actor, **apart, **options)


TRAIN_AS_RANK = "rlcli.build.training:train_as_rank"  # what another rank of a learner does


def serve_as_rank(cfg: CollectConfig) -> None:
    """Serve the run of rank 0, and exit, where torchrun started this process for that."""
    c = cfg.collector
    if (size := ranks_of(cfg)) > 1:
        from rlcli.jobs.ranks import serve_torchrun

        serve_torchrun(size, TRAIN_AS_RANK)
    if not isinstance(c, collect.DistributedOptions):
        return
    from rlcli.collectors.distributed.launch import REMOTE, SERVE, Peer, check_backend, torchrun

    check_backend(c.backend)
    if c.launcher == "torchrun" and os.environ.get("RANK", "0") != "0":
        size = len(shares(cfg)) + 1
        torchrun(Peer(SERVE["distributed"], REMOTE, size, c.backend, c.timeout, path=tuple(sys.path)), {}).own.run()
        sys.exit(0)


def ray_cluster(c: collect.RayOptions, ordered: int) -> dict[str, Any]:
    """Return where Ray's cluster is; one on this machine has a store for the bytes of all that is `ordered`."""
    if c.address or os.environ.get("RAY_ADDRESS", "local") != "local":
        return {"address": c.address} if c.address else {}
    return {"object_store_memory": ordered} if ordered > _RAYS_SHARE * free_memory()[0] else {}


def elsewhere(c: collect.ElsewhereOptions, makers: Sequence[Any], actor: Any, options: dict[str, Any]) -> BaseCollector:
    """Return a collector whose workers are, or could be, on other machines."""
    from rlcli.collectors import distributed

    options.pop("start_method")
    if isinstance(c, collect.RayOptions):
        names = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
        resources = {names[name]: amount for name, amount in c.resources.items() if name in names}
        others = {name: amount for name, amount in c.resources.items() if name not in names}
        wants = {**resources, "resources": others}
        return distributed.RayCollector(makers, actor, remote_configs=wants, **options)
    assert isinstance(c, collect.DistributedOptions)
    options |= {"backend": c.backend, "launcher": c.launcher, "slurm_kwargs": c.slurm}
    return distributed.DistributedCollector(makers, actor, **options)


def differences(cfg: CollectConfig) -> dict[str, Any]:
    """Return how differences of next observations are stored, where they are."""
    m = as_choice(collect.DeltaOptions, cfg.memory)
    return {"delta_dtype": getattr(torch, m.delta_dtype), "on_overflow": m.on_overflow}


def state_stride(cfg: CollectConfig) -> int:
    """Every how many rows of an episode a recurrent state is kept, beside first rows."""
    asked, c = cfg.memory.recurrent_state_stride, cfg.collector
    if isinstance(asked, int):
        return asked
    if not isinstance(cfg, Config):  # frames on disk, for whoever reads them
        return 1
    if is_off_policy(cfg):  # batches of few steps, of which most rows would be first ones; shared buffers take all
        return 1
    whole = draws(cfg) == "batch"
    return (as_choice(learn.StoredSliceOptions, cfg.sampler).slice_len or c.frames_per_batch) if whole else SLICED


def in_this_process(cfg: CollectConfig) -> CollectConfig:
    """Return the same run without workers."""
    return dataclasses.replace(cfg, collector=as_choice(collect.BatchOptions, cfg.collector, kind="sync"))


def shares(cfg: CollectConfig) -> list[range]:
    """Return the lanes of each worker, neighbours together; none where this process collects."""
    c, asked = cfg.collector, as_choice(collect.MultiSyncOptions, cfg.collector).num_workers
    if c.kind == "sync":
        return []
    if c.kind == "async":
        count = 1
    elif isinstance(asked, int):
        count = asked
    elif getattr(c, "launcher", "") == "torchrun":  # as many as it has started
        count = max(1, min(int(os.environ.get("WORLD_SIZE", "1")) - 1, cfg.env.num))
    else:  # who learns while others collect needs a core as well
        count = max(1, min(cores() // ranks_of(cfg) - (c.kind == "multi_async"), cfg.env.num))
    from rlcli.vec_envs.workers import dealt

    return dealt(cfg.env.num, count)


def shares_meanwhile(cfg: CollectConfig) -> list[range]:
    """Return the same of workers that collect while this process learns; none where it waits for them."""
    return shares(cfg) if cfg.collector.kind != "multi_sync" and not getattr(cfg.collector, "sync", False) else []


def slices_of(cfg: Config) -> tuple[int, int]:
    """Return number and length of a sample's slices; what is not given follows from the batch size."""
    s = as_choice(learn.StoredSliceOptions, cfg.sampler)
    length = s.slice_len or s.batch_size // (s.num_slices or s.batch_size)
    return s.num_slices or s.batch_size // length, length


def frame_stacks(cfg: CollectConfig, rows: RowSchema) -> dict[Key, int]:
    """Return observations stored as their newest frame, and the frames in a stack; transformed ones are not."""
    frames, memory = cfg.env.frame_stack, cfg.memory
    whole = as_choice(collect.ExactOptions, memory).frame_stack != "auto"
    if frames is None or frames < 2 or whole or KEEPS[memory.next_obs] != SHARED:
        return {}
    stackable = {key: field for key, field in rows.fields.items() if under_next(key) in rows.successors}
    return {key: frames for key, field in stackable.items() if len(field.shape) > 1 and field.shape[0] == frames}


def settled_device(cfg: C) -> tuple[C, list[str]]:
    """Return a new run's configuration with what `device=auto` came to, where there is a GPU, and why in a line."""
    if cfg.device.kind != "auto" or not torch.cuda.is_available():
        return cfg, []
    from rlcli.build.device_auto import chosen

    return chosen(cfg)


def devices(cfg: CollectConfig) -> dict[str, torch.device | None]:
    """Return where each stage runs; None for env and storage is the CPU without a stamp on tensordicts."""
    d = cfg.device
    kind = "cpu" if d.kind == "auto" else d.kind  # `settled_device` has said where another is faster
    here = None if kind == "cpu" else accelerator() if kind == "split" else kind
    chosen = {
        "env_device": d.env_device,
        "policy_device": d.policy_device or here,
        "storing_device": d.storing_device or (None if kind == "split" else here),
        "train_device": d.train_device or here,
    }
    found = {name: resolve(device) for name, device in chosen.items()}
    if isinstance(cfg, Config) and draws(cfg) != "batch" and d.storing_device is None:
        found["storing_device"] = None  # rows go into a storage here
    elif found["storing_device"] is None and kind == "split":
        found["storing_device"] = found["train_device"]  # the batch goes where it is learned from
    for name in ("env_device", "storing_device"):
        device = found[name]
        found[name] = None if device is not None and device.type == "cpu" else device
    return found
