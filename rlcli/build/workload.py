"""What of a configuration decides how much memory its run needs."""

from __future__ import annotations

import dataclasses
import operator
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlcli.build.collector import devices, differences, frame_stacks, shares, shares_meanwhile, slices_of
from rlcli.build.env import build_env, evaluation_envs, lanes_of, stepped
from rlcli.build.policy import optimizer_options
from rlcli.collectors.options import AHEAD
from rlcli.collectors.schema import RowSchema
from rlcli.config import registry
from rlcli.config.choices import collect, learn
from rlcli.config.option import as_choice
from rlcli.config.schemas import CollectConfig, Config, by_priority, draws, is_off_policy, remembers
from rlcli.errors import ConfigError
from rlcli.planning.forecast import Updates, Workload
from rlcli.planning.tensors import CLUSTER, REMOTE_WORKER, RunEnvs, RunStorage, planned_buffer


def workload_of(cfg: CollectConfig, rows: RowSchema | None = None, init_rows: int = 0) -> Workload:
    """Return what a plan is made of; `rows`: what the collector delivers, `init_rows`: what the storage begins with."""
    c, m, meanwhile = cfg.collector, cfg.memory, shares_meanwhile(cfg)
    storage = cfg.storage if isinstance(cfg, Config) else None
    scratch = storage.scratch_dir if isinstance(storage, learn.MemmapOptions) else None
    delta = differences(cfg)
    device, acting = (devices(cfg)[name] for name in ("storing_device", "policy_device"))
    acts = acting is not None and acting.type == "cuda" and cfg.device.graphs != "off" and c.kind == "sync"
    stored = storage_of(cfg, storage, rows, init_rows) if isinstance(storage, learn.TensorOptions) else None
    return Workload(
        envs=envs_of(cfg), total_frames=cfg.total_frames, frames_per_batch=c.frames_per_batch,
        lanes=max(map(len, meanwhile)) if meanwhile else cfg.env.num, written_ahead=len(meanwhile) * (AHEAD + 1),
        mode=m.next_obs, delta_dtype=delta["delta_dtype"], keeps_overflows=delta["on_overflow"] == "keep",
        preemptive=as_choice(collect.MultiSyncOptions, c).preemptive_threshold is not None,
        trajectories=bool(c.split_trajs or c.trajs_per_batch), device=str(device or "cpu"),
        acting=str(acting) if acts else "", storage=stored,
        updates=_updates(cfg, stored) if isinstance(cfg, Config) else None,
        folder=Path(cfg.run.dir or "runs"), scratch=None if scratch is None else Path(scratch), kept=cfg.run.keep,
        recurrent_backend=as_choice(collect.RecurrentOptions, cfg.policy).recurrent_backend if remembers(cfg) else None,
    )  # fmt: skip


def envs_of(cfg: CollectConfig) -> RunEnvs:
    """Return how many envs a run has, which process steps them, and how more like them are made."""
    num, collecting, evaluated = cfg.env.num, len(shares(cfg)), 0
    in_process, workers = stepped(cfg.env, cfg.collector.on_worker_error) if cfg.collector.kind == "sync" else (0, 0)
    processes, away = collecting or workers, num - in_process
    if isinstance(cfg, Config) and cfg.run.eval_episodes:
        once = cfg.run.eval_every is None  # the only evaluation comes when the run's own are closed
        played = evaluation_envs(cfg, cfg.run.eval_episodes)
        evaluated, beside = stepped(played)
        together: Any = max if once else operator.add
        processes, away = together(processes, beside), together(away, played.num - evaluated)
        evaluated = max(evaluated - (in_process if once else 0), 0)
    one = dataclasses.replace(cfg.env, num=1)
    alone: Any = {"workers": 1, "per_worker": "auto", "caller_steps": "false"}
    apart = dataclasses.replace(one, **alone) if isinstance(one, collect.GymOptions) else one
    return RunEnvs(
        num, in_process, evaluated, collecting or workers, processes, away, collecting > 0,
        remote_bytes(cfg.collector, collecting),
        lambda count: build_env(lanes_of(cfg, count), offset=num),
        partial(build_env, one, offset=num), partial(build_env, apart, offset=num),
    )  # fmt: skip


def remote_bytes(c: collect.BatchOptions, workers: int) -> int | None:
    """Return what workers of another framework take on this machine, and their cluster; None where they are ours."""
    if isinstance(c, collect.RayOptions):
        return 0 if c.address or os.environ.get("RAY_ADDRESS") else CLUSTER + workers * REMOTE_WORKER
    launcher = getattr(c, "launcher", "mp")
    return None if launcher == "mp" else workers * REMOTE_WORKER * (launcher == "torchrun")


def storage_of(cfg: Any, s: learn.TensorOptions, rows: RowSchema | None, init_rows: int) -> RunStorage:
    from rlcli.data.storages import Storage

    stacks = {} if rows is None else frame_stacks(cfg, rows)
    kind: Any = registry.find("storage", s.kind)
    if not (isinstance(kind, type) and issubclass(kind, Storage)):  # a function: of what it makes nothing is known
        kind = Storage
    made = RunStorage(kind, s.max_size, s.ndim, init_rows + cfg.total_frames, s.codes, stacks, by_priority(cfg))
    asked, device = as_choice(learn.PlacedOptions, s).device, devices(cfg)["train_device"]
    learns_there = device is not None and device.type == "cuda"
    if asked == "cuda" and not learns_there:
        raise ConfigError(
            "rows lie where they are learned from, or in host memory", where="storage.device=cuda",
            why=f"this run learns on {device or 'cpu'}", fix="Use device=cuda, or storage.device=cpu.",
        )  # fmt: skip
    if s.kind != "tensor" or asked == "cpu" or not learns_there:
        return made
    there = dataclasses.replace(made, device=str(device))
    return there if asked == "cuda" or (rows is not None and _fits(there, rows, cfg.memory.next_obs)) else made


def _fits(storage: RunStorage, rows: RowSchema, mode: str) -> bool:
    """Say whether columns leave half of a GPU's free memory to what learns there."""
    need = sum(entry.bytes for entry in planned_buffer(storage, rows, mode) if entry.device == storage.device)
    return 2 * need <= torch.cuda.mem_get_info(storage.device)[0]


def _updates(cfg: Config, stored: RunStorage | None) -> Updates:
    s, off_policy = as_choice(learn.StoredSliceOptions, cfg.sampler), is_off_policy(cfg)
    even = s.kind == "random" and stored is not None and stored.device != "cpu"
    return Updates(
        optimizer=cfg.optim.kind, optimizer_options=optimizer_options(cfg.optim),
        device=str(devices(cfg)["train_device"] or "cpu"), draws=draws(cfg),
        together=cfg.optim.updates_per_frame if even else 0.0,
        stored=off_policy or draws(cfg) == "slices", off_policy=off_policy, batch_size=s.batch_size,
        num_slices=s.num_slices, slice_len=s.slice_len, slices=slices_of(cfg), burn_in=s.burn_in,
        graphs=cfg.device.graphs != "off" and not cfg.optim.compile, strict_length=s.strict_length,
        num_chunks=cfg.value.num_chunks, recompute=cfg.memory.recurrent_recompute,
    )  # fmt: skip
