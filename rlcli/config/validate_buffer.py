"""Whether storage and sampler fit the loss: how rows are kept, how they are drawn, what they begin with."""

from __future__ import annotations

import os
from collections.abc import Iterator

from rlcli.config.problem import Problem
from rlcli.config.schemas import Config, is_off_policy


def check_buffer(cfg: Config) -> Iterator[Problem]:
    """Storage, sampler and the form of rows."""
    yield from _of_off_policy(cfg) if is_off_policy(cfg) else _of_policy_gradient(cfg)
    yield from _slices(cfg)
    yield from _given(cfg)
    yield from _form(cfg)


def _of_off_policy(cfg: Config) -> Iterator[Problem]:
    kind = cfg.loss.kind
    if cfg.storage.kind == "none":
        yield Problem(f"loss={kind} learns from stored rows, and storage=none keeps none", "use storage=tensor")
    yield from _room(cfg)
    if cfg.sampler.kind == "minibatch":
        yield Problem(
            f"loss={kind} draws rows of a storage, and sampler=minibatch cuts one batch",
            "use sampler=random or sampler=prioritized",
        )


def _of_policy_gradient(cfg: Config) -> Iterator[Problem]:
    kind, storage, sampler = cfg.loss.kind, cfg.storage.kind, cfg.sampler.kind
    if sampler == "slice":
        yield from _gradient_of_slices(cfg)
    elif sampler != "minibatch":
        yield Problem(
            f"sampler={sampler} draws single rows, and loss={kind} values rows along their trajectories",
            "use sampler=slice with a storage, or sampler=minibatch without",
        )
    elif storage != "none":
        yield Problem(
            f"sampler=minibatch learns from each batch once, and storage={storage} would keep rows nobody draws",
            "use sampler=slice, or storage=none",
        )


def _gradient_of_slices(cfg: Config) -> Iterator[Problem]:
    c = cfg.collector
    if cfg.storage.kind == "none":
        yield Problem(
            "sampler=slice draws from stored rows, and storage=none keeps none",
            "use storage=tensor | memmap | compressed",
        )
    yield from _room(cfg)
    for name in ("split_trajs", "trajs_per_batch"):
        if getattr(c, name):
            yield Problem(f"collector.{name} has no meaning with sampler=slice, which cuts stored rows", "leave it out")
    if not c.track_traj_ids:
        yield Problem("sampler=slice needs collector.track_traj_ids=true", "leave out track_traj_ids=false")
    if cfg.loss.clip_value is not None:
        yield Problem(
            "loss.clip_value has no meaning with sampler=slice: the values of a sample are computed when it is drawn",
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
    if s.kind != "slice":
        return
    if is_off_policy(cfg):
        yield Problem(f"loss={cfg.loss.kind} learns from single rows", "use sampler=random or sampler=prioritized")
    if s.span and s.strict_length:
        yield Problem(
            "sampler.span cuts slices at the ends of trajectories, sampler.strict_length wants whole ones",
            "give one of them",
        )
    one, other = (s.slice_len or 0), (s.num_slices or 0)
    if not one and not other:
        yield Problem("sampler=slice needs sampler.slice_len or sampler.num_slices", "give one of them")
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


def _room(cfg: Config) -> Iterator[Problem]:
    """A storage that holds a batch."""
    frames, rows = cfg.collector.frames_per_batch, cfg.storage.max_size
    if cfg.storage.kind != "none" and rows < frames:
        yield Problem(
            f"storage.max_size={rows} is less than collector.frames_per_batch={frames}",
            f"use storage.max_size >= {frames}",
        )


def _given(cfg: Config) -> Iterator[Problem]:
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
    """How rows lie in the buffer."""
    if cfg.memory.frame_stack == "auto":
        return
    if cfg.storage.kind == "none":
        why = "storage=none, which stores no rows"
    elif cfg.memory.next_obs != "exact":
        why = f"memory={cfg.memory.next_obs}, which stores stacks whole in any case"
    elif (cfg.env.frame_stack or 1) < 2:
        why = "env.frame_stack=null: there are no stacks"
    else:
        return
    yield Problem(f"memory.frame_stack has no meaning with {why}", "leave it out")
