"""Checks of how envs are stepped, and what they are wrapped in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlcli.config import registry
from rlcli.config.problem import Problem, check, did_you_mean

_OPTIONS = {"NormalizeObservation": "env.normalize_observation", "NormalizeReward": "env.normalize_reward"}


@check("env.")
def check_modes(cfg: Any) -> Iterator[Problem]:
    env = cfg.env
    if env.kind == "envpool" and env.mode == "serial":
        yield Problem("env=envpool and env.mode=serial contradict each other", "use env.mode=native or env=gym")
    if env.wrappers and (env.mode == "native" or env.kind == "envpool"):
        yield Problem("env.wrappers wrap single envs, and a native engine has none", "use env=gym env.mode=serial")
    if env.mode == "native" and env.kind == "gym" and env.id.startswith("ALE/"):
        yield Problem(
            f"env.mode=native would change the task {env.id}: its engine resizes frames and clips rewards",
            "use env=atari, or env.mode=serial",
        )
    if env.workers and env.workers > env.num:
        yield Problem(f"env.workers={env.workers} are more than there are envs", f"use env.workers={env.num} at most")
    apart = env.workers or env.mode == "parallel"
    for name in ("start_method", "per_worker", "caller_steps"):
        if getattr(env, name) != "auto" and not apart:
            yield Problem(f"env.{name} needs worker processes, and there are none", "give env.mode=parallel")
    if env.workers and env.per_worker != "auto":
        yield Problem("env.workers and env.per_worker both say how many processes there are", "give one of them")
    elif isinstance(env.per_worker, int) and env.per_worker > env.num:
        yield Problem(
            f"env.per_worker={env.per_worker} are more than there are envs", f"use env.per_worker={env.num} at most"
        )
    if env.caller_steps == "true" and cfg.collector.on_worker_error == "restart" and cfg.collector.kind == "sync":
        yield Problem(
            "env.caller_steps=true and collector.on_worker_error=restart contradict each other: what this process "
            "steps itself cannot be replaced",
            "leave out one of them",
        )
    if env.caller_steps == "true" and (env.workers or 0) >= env.num:
        yield Problem("env.caller_steps=true leaves the workers too few envs", f"use env.workers={env.num - 1} at most")
    if env.kind == "atari" and not env.id.startswith("ALE/"):
        yield Problem(f"env=atari and env.id={env.id} contradict each other", "ids of Atari games begin with ALE/")


@check("env.wrappers.", "env.transforms.")
def check_wrappers(cfg: Any) -> Iterator[Problem]:
    for kind, entries in (("wrapper", cfg.env.wrappers), ("transform", cfg.env.transforms)):
        for entry in entries:
            try:
                name, _ = registry.wrapper_call(entry, f"env.{kind}s")
            except ValueError as error:
                yield Problem(str(error), f"write env.{kind}s=[Name,{{Name:{{argument:value}}}}]")
                continue
            if name in registry.names(kind):
                continue
            if key := _OPTIONS.get(name):
                what = f"{name} keeps statistics, which would be lost in evaluations and on resume"
                yield Problem(f"{what} (env.wrappers)", f"write {key}=true instead")
                continue
            hint = did_you_mean(name, registry.names(kind)) or f"rlcli ls {kind}s lists them"
            lines = f"'from PACKAGE import {name}' and 'rlcli.register_{kind}(\"{name}\")({name})'"
            own = f"to add it, give --import my_{kind}s, a file my_{kind}s.py with 'import rlcli', {lines}"
            yield Problem(f"unknown {kind} {name!r} in env.{kind}s", f"{hint}; {own}")
