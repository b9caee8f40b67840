"""Every check of a composed configuration: all problems at once, each with its remedy.

Here is what collecting and training share; how rows are kept and drawn, and what is learned from them, are checked in
`validate_buffer` and `validate_learning`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from typing import Any

from rlcli.config import registry
from rlcli.config.installed import check_devices, check_env, has, missing
from rlcli.config.problem import Problem
from rlcli.config.schemas import Config
from rlcli.config.suggest import did_you_mean, unknown
from rlcli.config.tree import Leaf, leaves
from rlcli.config.unread import check_typed
from rlcli.config.validate_buffer import check_buffer
from rlcli.config.validate_learning import check_learning
from rlcli.config.wrapper_call import wrapper_call


def validate(cfg: Any, typed: Collection[str] | None = None) -> list[Problem]:
    """All problems of a typed configuration: values out of range, then options that do not fit together.

    Parameters
    ----------
    cfg : Config or CollectConfig
        The typed tree.
    typed : collection of str, optional
        Keys that the command line set: those that nothing reads are refused. By default all whose value is not their
        default.

    Returns
    -------
    list of Problem
        Empty when the configuration can be used.
    """
    found = [problem for leaf in leaves(type(cfg)).values() for problem in _out_of_range(cfg, leaf)]
    checks = [check_memory, check_collector, check_policy, check_modes, check_wrappers, check_logger, check_run]
    if isinstance(cfg, Config):
        checks += [check_buffer, check_learning]
    for check in (*checks, check_env, check_devices):
        found += check(cfg)
    return [*found, *check_typed(cfg, typed)]


def value_at(cfg: Any, key: str) -> Any:
    """The value under a dotted key."""
    for part in key.split("."):
        cfg = getattr(cfg, part)
    return cfg


def _out_of_range(cfg: Any, leaf: Leaf) -> Iterator[Problem]:
    value = value_at(cfg, leaf.key)
    if leaf.option.accepts(value):
        return
    group = leaf.key.removesuffix(".kind")
    if value in registry.names(group):
        return
    if group != leaf.key:
        problem = unknown(group, str(value), (*leaf.option.choices, *registry.users_names(group)))
        yield problem._replace(fix=problem.fix + "; if a package of yours registers it, add --import PACKAGE")
    else:
        yield Problem(f"{leaf.key} is {value!r}", f"allowed: {leaf.option.allowed() or 'finite numbers'}")


def check_memory(cfg: Any) -> Iterator[Problem]:
    memory = cfg.memory
    if memory.kind != memory.next_obs:
        yield Problem(
            f"memory={memory.kind} and memory.next_obs={memory.next_obs} contradict each other",
            f"choose one: memory={memory.kind} or memory={memory.next_obs}",
        )
    if memory.frame_stack != "auto" and not isinstance(cfg, Config):
        yield Problem("memory.frame_stack has no meaning for rlcli collect", "leave it out")
    for entry in memory.keep:
        parts = entry if isinstance(entry, list) and entry else [entry]
        if not all(isinstance(part, str) and part for part in parts):
            yield Problem(f"memory.keep holds {entry!r}, which is not a key", "write memory.keep=[logits,[a,b]]")


def check_collector(cfg: Any) -> Iterator[Problem]:
    c = cfg.collector
    if not isinstance(cfg, Config):
        for key in ("split_trajs", "trajs_per_batch", "deliver_leftovers"):
            if getattr(c, key):
                yield Problem(
                    f"collector.{key} has no meaning for rlcli collect, which puts every frame on the disk as it comes",
                    "leave it out, and cut what you read: rlcli.data.split_trajectories(batch)",
                )
        return
    if c.deliver_leftovers and not c.trajs_per_batch:
        yield Problem("collector.deliver_leftovers needs collector.trajs_per_batch", "give both, or neither")
    if c.split_trajs and c.trajs_per_batch:
        yield Problem("collector.split_trajs and collector.trajs_per_batch both cut trajectories", "give one of them")
    if c.trajs_per_batch and not c.track_traj_ids:
        yield Problem("collector.trajs_per_batch needs collector.track_traj_ids=true", "leave out track_traj_ids=false")
    if c.trajs_per_batch and c.set_truncated and not c.reset_at_each_iter:
        yield Problem(
            "collector.set_truncated ends every trajectory with its batch, collector.trajs_per_batch wants whole ones",
            "give one of them, or collector.reset_at_each_iter=true as well",
        )
    if c.split_trajs and not c.track_traj_ids:
        yield Problem("collector.split_trajs needs collector.track_traj_ids=true", "leave out track_traj_ids=false")


def check_policy(cfg: Any) -> Iterator[Problem]:
    policy = cfg.policy
    if policy.kind == "random" and isinstance(cfg, Config):
        yield Problem("policy=random has no weights to train", "use rlcli collect, or another policy")
    if policy.kind == "checkpoint" and not policy.path:
        yield Problem(
            "policy=checkpoint needs policy.path",
            "policy.path=RUN_FOLDER (rlcli ls runs lists them)",
            only_here=True,
        )
    if policy.kind == "checkpoint" and policy.path and not os.path.exists(policy.path):
        yield Problem(f"policy.path={policy.path} does not exist", "rlcli ls runs lists runs", only_here=True)
    if policy.kwargs and policy.kind not in registry.users_names("policy"):
        yield Problem(
            f"policy.kwargs has no meaning with policy={policy.kind}",
            "it is for a policy that you registered",
        )


def check_modes(cfg: Any) -> Iterator[Problem]:
    env = cfg.env
    if env.kind == "envpool" and env.mode == "serial":
        yield Problem("env=envpool and env.mode=serial contradict each other", "use env.mode=native or env=gym")
    if env.wrappers and (env.mode == "native" or env.kind == "envpool"):
        yield Problem("env.wrappers wrap single envs, and a native engine has none", "use env=gym env.mode=serial")
    if env.kind == "atari" and not env.id.startswith("ALE/"):
        yield Problem(f"env=atari and env.id={env.id} contradict each other", "ids of Atari games begin with ALE/")


def check_run(cfg: Any) -> Iterator[Problem]:
    run = cfg.run
    if run.dir is not None and not run.dir.isprintable():
        yield Problem(f"run.dir={run.dir!r} holds a character that cannot be printed", "choose a plain name")
    if run.dir == "":
        yield Problem("run.dir is empty", "name a folder, or leave it out")
    if run.eval_every is not None and not run.eval_episodes and isinstance(cfg, Config):
        yield Problem("run.eval_every needs run.eval_episodes >= 1", "leave out run.eval_episodes=0")


def check_wrappers(cfg: Any) -> Iterator[Problem]:
    for kind, entries in (("wrapper", cfg.env.wrappers), ("transform", cfg.env.transforms)):
        for entry in entries:
            try:
                name, _ = wrapper_call(entry, f"env.{kind}s")
            except ValueError as error:
                yield Problem(str(error), f"write env.{kind}s=[Name,{{Name:{{argument:value}}}}]")
                continue
            if name not in registry.names(kind):
                hint = did_you_mean(name, registry.names(kind))
                yield Problem(f"unknown {kind} {name!r} in env.{kind}s", hint or f"rlcli ls {kind}s lists them")


def check_logger(cfg: Any) -> Iterator[Problem]:
    if cfg.logger.kind == "tensorboard" and not has("tensorboard"):
        yield missing("tensorboard", "logger=tensorboard")
