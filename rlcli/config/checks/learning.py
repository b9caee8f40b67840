"""Checks of what is learned: options of values, loss and optimizer that do not fit the loss, or each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlcli.config import installed
from rlcli.config.problem import Problem, check
from rlcli.config.schemas import Config, convolves, draws, is_off_policy, remembers


@check("")
def check_learning(cfg: Config) -> Iterator[Problem]:
    """Options that do not fit the loss, or each other."""
    if not isinstance(cfg, Config):
        return
    if is_off_policy(cfg):
        yield from _off_policy(cfg)
    else:
        yield from _values(cfg)
        yield from _batches(cfg)
    yield from _optim(cfg)


def _off_policy(cfg: Config) -> Iterator[Problem]:
    kind, c = cfg.loss.kind, cfg.collector
    if cfg.memory.next_obs == "compact":
        yield Problem(f"loss={kind} needs every next observation, and memory=compact stores none", "use memory=exact")
    if kind in ("dqn", "sac") and cfg.policy.distribution not in ("auto", "tanh_normal" if kind == "sac" else "auto"):
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


def _learns_on(cfg: Config) -> tuple[str, str]:
    """Return the device that learns, and which key says so; with device=auto the one where there is a GPU."""
    given, kind = cfg.device.train_device, cfg.device.kind
    if given is not None:
        return given, f"device.train_device={given}"
    found = {"split": installed.accelerator(), "auto": "cuda" if convolves(cfg) else "cpu"}
    return found.get(kind, kind), f"device={kind}"


def _without_gpu(cfg: Config) -> bool:
    return not (installed.torch_has_cuda() and _learns_on(cfg)[0].startswith("cuda"))


def _values(cfg: Config) -> Iterator[Problem]:
    v = cfg.value
    if v.shifted and v.two_calls:
        yield Problem("value.shifted and value.two_calls exclude each other", "leave one out")
    if v.num_chunks is not None and v.value_chunk_size is not None:
        yield Problem("value.num_chunks and value.value_chunk_size are two ways to say one thing", "give one of them")
    if v.backend == "triton" and _without_gpu(cfg):
        yield Problem("value.backend=triton runs on a GPU", "use value.backend=auto, or device=cuda")
    if v.kind == "vtrace" and v.c_thresh > v.rho_thresh:
        yield Problem(
            f"value.c_thresh={v.c_thresh} is more than value.rho_thresh={v.rho_thresh}",
            "use value.c_thresh <= value.rho_thresh",
        )
    if cfg.loss.kind == "reinforce" and not cfg.loss.baseline:
        if v.kind != "td1":
            yield Problem(
                f"loss.baseline=false learns from whole returns, and value={v.kind} gives others", "use value=td1"
            )
        acting = {"shifted": v.shifted, "normaliser": v.normaliser != "none", "two_calls": v.two_calls,
                  "num_chunks": v.num_chunks, "value_chunk_size": v.value_chunk_size,
                  "compute_dtype": v.compute_dtype != "float32"}  # fmt: skip
        for name in (name for name, given in acting.items() if given):
            yield Problem(f"value.{name} acts on a value net, and loss.baseline=false has none", "leave it out")
        if cfg.policy.shared:
            yield Problem("policy.shared has no meaning with loss.baseline=false", "leave it out")


def _batches(cfg: Config) -> Iterator[Problem]:
    rows, batch = cfg.collector.frames_per_batch, cfg.sampler.batch_size
    if batch > rows and draws(cfg) == "batch" and not cfg.collector.trajs_per_batch:
        yield Problem(
            f"sampler.batch_size={batch} is more than collector.frames_per_batch={rows} holds",
            f"use sampler.batch_size <= {rows}",
        )
    if cfg.value.average and cfg.value.average_over == "minibatch" and batch == 1:
        yield Problem(
            "one row has no deviation to normalise its advantage by",
            "use sampler.batch_size >= 2, value.average_over=batch or value.average=false",
        )


def _optim(cfg: Config) -> Iterator[Problem]:
    optim = cfg.optim
    if len(optim.betas) != 2:
        yield Problem(f"optim.betas is a pair, not {optim.betas}", "such as optim.betas=[0.9,0.999]")


@check("policy.", "loss.kind.", "device.")
def check_recurrence(cfg: Any) -> Iterator[Problem]:
    """A recurrent policy: who shares its trunk, and what runs it over sequences."""
    if not remembers(cfg):
        return
    policy = cfg.policy
    if policy.shared is False and not (isinstance(cfg, Config) and is_off_policy(cfg)):  # they do not read it
        yield Problem(
            f"policy.shared=false has no meaning with policy={policy.kind}: a critic with a state of its own is not "
            "stepped while frames are collected",
            "leave it out",
        )
    if not isinstance(cfg, Config):
        return  # one step of the policy is the same with all backends
    if policy.recurrent_backend == "triton" and _without_gpu(cfg):
        yield Problem(
            "policy.recurrent_backend=triton runs on a GPU", "use policy.recurrent_backend=auto, or device=cuda"
        )
    device, said = _learns_on(cfg)
    if policy.recurrent_backend == "cpu" and device.startswith(("cuda", "mps")):
        yield Problem(
            f"policy.recurrent_backend=cpu does not run on {said}",
            "use policy.recurrent_backend=auto",
        )
