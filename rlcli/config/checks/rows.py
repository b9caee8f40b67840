"""Storage and sampler fit the loss: how rows are kept, how they are drawn, what they begin with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from rlcli.config import registry
from rlcli.config.problem import Problem, check
from rlcli.config.schemas import Config, by_priority, draws, draws_slices, is_off_policy, remembers


@check("memory.kind.", "memory.next_obs.")
def check_memory(cfg: Any) -> Iterator[Problem]:
    memory = cfg.memory
    if memory.kind != memory.next_obs:
        yield Problem(
            f"memory={memory.kind} and memory.next_obs={memory.next_obs} contradict each other",
            f"choose one: memory={memory.kind} or memory={memory.next_obs}",
        )
    for entry in memory.keep:
        parts = entry if isinstance(entry, list) and entry else [entry]
        if not all(isinstance(part, str) and part for part in parts):
            yield Problem(f"memory.keep holds {entry!r}, which is not a key", "write memory.keep=[logits,[a,b]]")


@check("")
def check_buffer(cfg: Config) -> Iterator[Problem]:
    """Storage, sampler and the form of rows."""
    if not isinstance(cfg, Config):
        return
    yield from _rows_of_off_policy(cfg) if is_off_policy(cfg) else _rows_of_policy_gradient(cfg)
    yield from _slices(cfg)
    yield from _rows_to_begin_with(cfg)
    yield from _form(cfg)


def _rows_of_off_policy(cfg: Config) -> Iterator[Problem]:
    kind = cfg.loss.kind
    if cfg.storage.kind == "none":
        yield Problem(f"loss={kind} learns from a replay buffer, and storage=none has none", "use storage=tensor")
    yield from _room(cfg)
    yield from _draws_of_off_policy(cfg)


def _draws_of_off_policy(cfg: Config) -> Iterator[Problem]:
    """Single rows, or slices where the policy remembers."""
    kind, policy, sampler = cfg.loss.kind, cfg.policy.kind, cfg.sampler.kind
    drawn, users = draws(cfg), policy in registry.users_names("policy")
    along = remembers(cfg) and kind != "sac"
    instead = f"use sampler={'slice' if along else 'random'} or sampler=prioritized{'_slice' * along}"
    if remembers(cfg) and kind == "sac":
        yield Problem(
            f"policy={policy} is recurrent, and loss=sac has no recurrent networks", "use loss=dqn, or policy=mlp"
        )
    elif drawn == "batch":
        yield Problem(f"loss={kind} draws rows of a storage, and sampler={sampler} cuts one batch", instead)
    elif along and drawn == "rows":
        yield Problem(f"policy={policy} learns along trajectories, and sampler={sampler} draws single rows", instead)
    elif drawn == "slices" and not (along or users):
        yield Problem(f"loss={kind} learns from single rows with policy={policy}", instead)
    if drawn == "slices" and not cfg.collector.track_traj_ids:
        yield Problem(f"sampler={sampler} needs collector.track_traj_ids=true", "leave out track_traj_ids=false")
    if cfg.loss.start_state != "stored" and not (remembers(cfg) or users):
        yield Problem(
            f"loss.start_state={cfg.loss.start_state} is of a state that policy={policy} lacks", "leave it out"
        )


def _rows_of_policy_gradient(cfg: Config) -> Iterator[Problem]:
    kind, storage, sampler = cfg.loss.kind, cfg.storage.kind, cfg.sampler.kind
    if draws_slices(cfg):
        yield from _gradient_of_slices(cfg)
    elif draws(cfg) == "rows":
        yield Problem(
            f"sampler={sampler} draws single rows, and loss={kind} values rows along their trajectories",
            "use sampler=slice with a storage, or sampler=minibatch without",
        )
    elif storage != "none":
        yield Problem(
            f"sampler={sampler} learns from each batch once, and would never sample from storage={storage}",
            "use sampler=slice, or storage=none",
        )


def _gradient_of_slices(cfg: Config) -> Iterator[Problem]:
    c, by = cfg.collector, f"sampler={cfg.sampler.kind}"
    if by_priority(cfg):
        yield Problem(f"{by} draws by the errors of rows, and loss={cfg.loss.kind} gives none", "use sampler=slice")
    if cfg.storage.kind == "none":
        yield Problem(
            f"{by} samples a replay buffer, and storage=none has none",
            "use storage=tensor | memmap | compressed",
        )
    yield from _room(cfg)
    for name in ("split_trajs", "trajs_per_batch"):
        if getattr(c, name):
            yield Problem(f"collector.{name} has no meaning with {by}, which cuts stored rows", "leave it out")
    if not c.track_traj_ids:
        yield Problem(f"{by} needs collector.track_traj_ids=true", "leave out track_traj_ids=false")
    if cfg.loss.clip_value is not None:
        yield Problem(
            f"loss.clip_value has no meaning with {by}: the values of a sample are computed when it is drawn",
            "leave it out",
        )
    if not cfg.loss.baseline:
        yield Problem(
            "loss.baseline=false sums the rewards of whole trajectories, and a slice ends before its trajectory",
            "use loss.baseline=true, or sampler=minibatch",
        )


def _slices(cfg: Config) -> Iterator[Problem]:
    """Slices: how many, how long, and who learns from them."""
    s = cfg.sampler
    if "sampler.slice_len" not in registry.part("sampler", s.kind).keys:
        return
    if draws(cfg) == "batch":
        yield from _slices_of_batches(cfg)
        return
    if s.burn_in and not is_off_policy(cfg):
        yield Problem(
            f"sampler.burn_in has no meaning with loss={cfg.loss.kind}, which begins slices from their stored states",
            "leave it out, or use loss=dqn",
        )
    if s.span and s.strict_length:
        yield Problem(
            "sampler.span cuts slices at the ends of trajectories, sampler.strict_length wants whole ones",
            "give one of them",
        )
    one, other = (s.slice_len or 0), (s.num_slices or 0)
    if not one and not other:
        yield Problem(f"sampler={s.kind} needs sampler.slice_len or sampler.num_slices", "give one of them")
    elif one and other and one * other != s.batch_size:
        yield Problem(
            f"sampler.num_slices={other} of sampler.slice_len={one} are not sampler.batch_size={s.batch_size} rows",
            f"use sampler.batch_size={one * other}, or give one of the two",
        )
    elif s.batch_size % (one or other) or s.batch_size < (one or other):
        name = "slice_len" if one else "num_slices"
        yield Problem(
            f"sampler.batch_size={s.batch_size} is no multiple of sampler.{name}={one or other}",
            f"use sampler.batch_size={max(1, s.batch_size // (one or other)) * (one or other)}",
        )
    elif cfg.storage.kind != "none":
        length, held = one or s.batch_size // other, cfg.storage.max_size
        steps = held // cfg.env.num if cfg.storage.ndim == 2 else held
        if length > steps:
            yield Problem(
                f"a slice of {length} rows is longer than the {steps} rows of an env that the storage holds",
                "use a shorter sampler.slice_len or a larger storage.max_size",
            )
        elif s.burn_in and length + s.burn_in > steps:
            yield Problem(
                f"sampler.burn_in={s.burn_in} and a slice of {length} rows are more than the {steps} rows of an env "
                "that the storage holds",
                f"use sampler.burn_in <= {steps - length}, or a larger storage.max_size",
            )


def _slices_of_batches(cfg: Config) -> Iterator[Problem]:
    """Slices that minibatches are made of, which begin from stored states."""
    length, stride = cfg.sampler.slice_len, cfg.memory.recurrent_state_stride
    if length is None or is_off_policy(cfg):
        return
    if not remembers(cfg) and cfg.policy.kind not in registry.users_names("policy"):
        yield Problem(
            f"sampler.slice_len has no meaning with sampler={cfg.sampler.kind} and policy={cfg.policy.kind}, which "
            "learns from single rows",
            "use policy=gru | lstm, or sampler=slice with a storage, or sampler.slice_len=null",
        )
    elif isinstance(stride, int) and length % stride:
        yield Problem(
            f"slices of sampler.slice_len={length} begin from stored states, and "
            f"memory.recurrent_state_stride={stride} keeps none there",
            f"use memory.recurrent_state_stride=auto, or sampler.slice_len={max(1, length // stride) * stride}",
        )


def _room(cfg: Config) -> Iterator[Problem]:
    """A storage that holds a batch."""
    frames, rows = cfg.collector.frames_per_batch, cfg.storage.max_size
    if cfg.storage.kind != "none" and rows < frames:
        yield Problem(
            f"storage.max_size={rows} is less than collector.frames_per_batch={frames}",
            f"use storage.max_size >= {frames}",
        )


def _rows_to_begin_with(cfg: Config) -> Iterator[Problem]:
    path = cfg.storage.init_from
    if path is None:
        return
    if not is_off_policy(cfg):
        yield Problem(
            f"storage.init_from has no meaning with loss={cfg.loss.kind}, which learns only from what its own policies "
            "have just collected",
            "leave it out, or use loss=dqn | sac",
        )
    elif not os.path.isdir(path):
        yield Problem(f"storage.init_from={path} is no folder", "rlcli ls runs lists runs", only_here=True)


def _form(cfg: Config) -> Iterator[Problem]:
    """Check how rows lie in the buffer."""
    if cfg.memory.frame_stack != "auto" and (cfg.env.frame_stack or 1) < 2:
        yield Problem(
            "memory.frame_stack has no meaning with env.frame_stack=null: there are no stacks", "leave it out"
        )
