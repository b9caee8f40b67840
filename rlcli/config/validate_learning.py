"""Which options belong to learning from each batch once, and which to learning from stored rows."""

from __future__ import annotations

import os
from collections.abc import Iterator

from rlcli.config.problem import Problem
from rlcli.config.schemas import Config
from rlcli.config.schemas_learn import POLICY_GRADIENTS

OFF_POLICY = ("dqn", "sac")


def is_off_policy(cfg: Config) -> bool:
    """Whether the run learns from stored rows."""
    return cfg.loss.kind in OFF_POLICY


def draws_slices(cfg: Config) -> bool:
    """Whether a policy gradient learns from slices of stored rows."""
    return not is_off_policy(cfg) and cfg.sampler.kind == "slice"


def check_learning(cfg: Config) -> Iterator[Problem]:
    """Loss, storage, sampler and memory that do not fit together."""
    yield from _stored(cfg) if is_off_policy(cfg) else _policy_gradient(cfg)
    yield from _slices(cfg)
    yield from _no_meaning(cfg)
    yield from _given(cfg)
    yield from _form(cfg)
    if cfg.storage.scratch_dir is not None and cfg.storage.kind != "memmap":
        yield Problem(f"storage.scratch_dir has no meaning with storage={cfg.storage.kind}", "use storage=memmap")


def _form(cfg: Config) -> Iterator[Problem]:
    """How rows lie in the buffer."""
    if not cfg.storage.codes and cfg.storage.kind == "none":
        yield Problem("storage.codes has no meaning with storage=none", "leave it out")
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


def _policy_gradient(cfg: Config) -> Iterator[Problem]:
    kind, storage, sampler = cfg.loss.kind, cfg.storage.kind, cfg.sampler.kind
    yield from _values(cfg)
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
            "sampler=slice draws from stored rows, and storage=none keeps none", "use storage=tensor | memmap"
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
        given = (("slice_len", s.slice_len), ("num_slices", s.num_slices), ("strict_length", s.strict_length))
        for name, value in (*given, ("span", s.span), ("weighting", s.weighting != "transition")):
            if value:
                yield Problem(f"sampler.{name} has no meaning with sampler={s.kind}", "use sampler=slice")
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


def _values(cfg: Config) -> Iterator[Problem]:
    v = cfg.value
    if v.shifted and v.two_calls:
        yield Problem("value.shifted and value.two_calls exclude each other", "leave one out")
    if not v.shifted and v.shifted_budget != 1:
        yield Problem("value.shifted_budget has no meaning without value.shifted", "use value.shifted=true")
    if v.kind == "vtrace" and v.c_thresh > v.rho_thresh:
        yield Problem(
            f"value.c_thresh={v.c_thresh} is more than value.rho_thresh={v.rho_thresh}",
            "use value.c_thresh <= value.rho_thresh",
        )
    if cfg.loss.kind == "reinforce" and not cfg.loss.baseline:
        if v.kind == "vtrace" or v.shifted or v.normaliser != "none":
            yield Problem("loss.baseline=false has no value net for value options to act on", "use loss.baseline=true")
        if cfg.policy.shared:
            yield Problem("policy.shared has no meaning with loss.baseline=false", "leave it out")


def _room(cfg: Config) -> Iterator[Problem]:
    """A storage that holds a batch."""
    frames, rows = cfg.collector.frames_per_batch, cfg.storage.max_size
    if cfg.storage.kind != "none" and rows < frames:
        yield Problem(
            f"storage.max_size={rows} is less than collector.frames_per_batch={frames}",
            f"use storage.max_size >= {frames}",
        )


def _stored(cfg: Config) -> Iterator[Problem]:
    kind, c = cfg.loss.kind, cfg.collector
    if cfg.storage.kind == "none":
        yield Problem(f"loss={kind} learns from stored rows, and storage=none keeps none", "use storage=tensor")
    yield from _room(cfg)
    if cfg.sampler.kind == "minibatch":
        yield Problem(
            f"loss={kind} draws rows of a storage, and sampler=minibatch cuts one batch",
            "use sampler=random or sampler=prioritized",
        )
    if cfg.memory.next_obs == "compact":
        yield Problem(
            f"loss={kind} reads every row's next observation, and memory=compact keeps none", "use memory=exact"
        )
    if cfg.policy.distribution not in ("auto", "tanh_normal" if kind == "sac" else "auto"):
        only = " draws from tanh_normal" if kind == "sac" else " chooses by value"
        yield Problem(
            f"policy.distribution={cfg.policy.distribution} has no meaning: loss={kind}{only}", "leave it out"
        )
    for name in ("split_trajs", "trajs_per_batch"):
        if getattr(c, name):
            yield Problem(f"collector.{name} has no meaning with loss={kind}, which learns from rows", "leave it out")
    if c.init_random_frames >= cfg.total_frames and cfg.storage.init_from is None:
        yield Problem(
            f"collector.init_random_frames={c.init_random_frames} leaves nothing of total_frames={cfg.total_frames} "
            "to learn in",
            f"use collector.init_random_frames < {cfg.total_frames}",
        )
    if kind == "dqn" and cfg.policy.eps_end > cfg.policy.eps_init:
        yield Problem(
            f"policy.eps_end={cfg.policy.eps_end} is more than policy.eps_init={cfg.policy.eps_init}",
            "epsilon falls: use policy.eps_end <= policy.eps_init",
        )
    if kind == "sac" and cfg.loss.alpha != "auto" and cfg.loss.target_entropy != "auto":
        yield Problem("loss.target_entropy has no meaning with a fixed loss.alpha", "use loss.alpha=auto")


def _no_meaning(cfg: Config) -> Iterator[Problem]:
    """Options that change nothing for this loss, where they were set."""
    given = (
        ("loss.double", cfg.loss.double, ("dqn",)),
        ("policy.dueling", cfg.policy.dueling, ("dqn",)),
        ("loss.n_steps", cfg.loss.n_steps > 1, OFF_POLICY),
        ("policy.shared", cfg.policy.shared and cfg.policy.kind != "cnn", POLICY_GRADIENTS),
        ("loss.clip_value", cfg.loss.clip_value is not None, POLICY_GRADIENTS),
        ("loss.target_kl", cfg.loss.target_kl is not None, ("ppo_clip", "ppo_kl")),
        ("loss.anneal_clip", cfg.loss.anneal_clip, ("ppo_clip",)),
        ("loss.baseline", not cfg.loss.baseline, ("reinforce",)),
        ("value.shifted", cfg.value.shifted, POLICY_GRADIENTS),
        ("value.normaliser", cfg.value.normaliser != "none", POLICY_GRADIENTS),
        ("value.kind", cfg.value.kind != "gae", POLICY_GRADIENTS),
        ("loss.target_entropy", cfg.loss.target_entropy != "auto" and cfg.loss.alpha == "auto", ("sac",)),
        ("loss.alpha", cfg.loss.alpha != "auto", ("sac",)),
    )
    for key, is_given, kinds in given:
        if is_given and cfg.loss.kind not in kinds:
            yield Problem(
                f"{key} has no meaning with loss={cfg.loss.kind}", f"leave it out, or use loss={' | '.join(kinds)}"
            )
