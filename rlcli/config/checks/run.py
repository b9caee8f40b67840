"""What a run is made with: its policy, arguments for parts of a user's, and its folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from rlcli.config import registry
from rlcli.config.checks.check import check
from rlcli.config.parts import CHOICES
from rlcli.config.problem import Problem
from rlcli.config.schemas import Config


@check("policy.")
def check_policy(cfg: Any) -> Iterator[Problem]:
    policy = cfg.policy
    if policy.kind == "random" and isinstance(cfg, Config):
        yield Problem("policy=random has no weights to train", "use rlcli collect, or another policy")
    collects = not isinstance(cfg, Config) or cfg.loss.kind not in CHOICES["loss"]  # a loss of one's own may read it
    if policy.kind == "checkpoint" and not policy.path:
        given = "policy.path=RUN_FOLDER" if collects else "use rlcli collect policy.path=RUN_FOLDER, or another policy"
        yield Problem("policy=checkpoint needs policy.path", f"{given} (rlcli ls runs lists them)", only_here=True)
    elif policy.kind == "checkpoint" and not collects:
        yield Problem("policy=checkpoint acts with weights that are trained", "use rlcli collect, or another policy")
    if policy.kind == "checkpoint" and policy.path and not os.path.exists(policy.path.removesuffix(":best")):
        yield Problem(f"policy.path={policy.path} does not exist", "rlcli ls runs lists runs", only_here=True)


@check(*(f"{group}.kind." for group in registry.GROUPS.values()))
def check_kwargs(cfg: Any) -> Iterator[Problem]:
    for kind, group in registry.GROUPS.items():
        options = getattr(cfg, group, None)
        if options is None or not options.kwargs or options.kind in registry.users_names(kind):
            continue
        if f"{group}.kwargs" not in registry.part(kind, options.kind).uses:
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
