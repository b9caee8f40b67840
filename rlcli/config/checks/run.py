"""Checks of what a run is made with: its policy, arguments for parts of a user's, and its folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from rlcli.config import registry
from rlcli.config.choices import CHOICES
from rlcli.config.problem import Problem, check, spell
from rlcli.config.schemas import Config

_FROM_WEIGHTS = (
    "to train on from a run's weights, write policy.init_from={0} in its place: rlcli train ... policy.init_from={0}"
)


def _is_folder(asked: str) -> bool:
    """Say whether a run's folder is named, or one with a checkpoint of it after a colon."""
    return os.path.isdir(asked) or os.path.isdir(asked.rpartition(":")[0])


@check("policy.")
def check_policy(cfg: Any) -> Iterator[Problem]:
    policy = cfg.policy
    if policy.kind == "random" and isinstance(cfg, Config):
        yield Problem("policy=random has no weights to train", "use rlcli collect, or another policy")
    collects = not isinstance(cfg, Config) or cfg.loss.kind not in CHOICES["loss"]  # a loss of one's own may read it
    if policy.kind == "checkpoint" and not policy.path:
        given = "policy.path=RUN_FOLDER" if collects else _FROM_WEIGHTS.format("RUN")
        yield Problem("policy=checkpoint needs policy.path", f"{given} (rlcli ls runs lists them)", only_here=True)
    elif policy.kind == "checkpoint" and not collects:
        yield Problem("policy=checkpoint acts, and does not learn", _FROM_WEIGHTS.format(spell(policy.path)))
    if policy.init_from is None and not policy.init_strict:
        yield Problem("policy.init_strict has no meaning without policy.init_from", "leave it out")
    elif policy.init_from is not None and not _is_folder(policy.init_from):
        yield Problem(f"policy.init_from={policy.init_from} is no run", "rlcli ls runs lists runs", only_here=True)
    if policy.kind == "checkpoint" and policy.path and not _is_folder(policy.path):
        yield Problem(f"policy.path={policy.path} does not exist", "rlcli ls runs lists runs", only_here=True)


@check(*(f"{group}.kind." for group in registry.GROUPS.values()))
def check_kwargs(cfg: Any) -> Iterator[Problem]:
    for kind, group in registry.GROUPS.items():
        options = getattr(cfg, group, None)
        if options is None or not options.kwargs or options.kind in registry.users_names(kind):
            continue
        what = f"{group}.kwargs has no meaning with {group}={options.kind}"
        yield Problem(what, f"it is for {'an' if kind[0] in 'ae' else 'a'} {kind} that you registered")


@check("run.")
def check_run(cfg: Any) -> Iterator[Problem]:
    run = cfg.run
    if run.dir is not None and not run.dir.isprintable():
        yield Problem(f"run.dir={run.dir!r} holds a character that cannot be printed", "choose a plain name")
    if run.dir == "":
        yield Problem("run.dir is empty", "name a folder, or leave it out")
    if run.eval_every is not None and not run.eval_episodes and isinstance(cfg, Config):
        yield Problem("run.eval_every needs run.eval_episodes >= 1", "leave out run.eval_episodes=0")
