"""All problems of a composed configuration at once, before anything is built or torch is loaded.

What one group takes is checked in its dataclass (`Group.problems`), what one part takes in its constructor; here
stands what spans groups, or asks this machine. What is learned: `validate_learning.py`.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from importlib.util import find_spec
from typing import Any

from rlcli.config import installed, registry
from rlcli.config.choices import CHOICES
from rlcli.config.choices.collect import CheckpointOptions, GymOptions, MultiSyncOptions, WorkersOptions
from rlcli.config.choices.learn import TensorOptions
from rlcli.config.installed import accelerator, gymnasium_problem, known_ids, lacking
from rlcli.config.option import as_choice, changed, groups, held, value_at
from rlcli.config.problem import Problem, did_you_mean, raise_all, spell, unknown
from rlcli.config.registry import choices
from rlcli.config.resolved import from_dict, of_another_choice
from rlcli.config.schemas import CollectConfig, Config, draws, idle, in_words, is_off_policy
from rlcli.config.schemas import typed as spelled
from rlcli.config.validate_learning import check_learning, check_ranks, check_recurrence
from rlcli.config.words import key_of

_OF_GYMNASIUM = ("mujoco", "box2d")  # extras of envs that gymnasium holds in a module of this name
_OPTIONS = {"NormalizeObservation": "env.normalize_observation", "NormalizeReward": "env.normalize_reward"}
_FROM_WEIGHTS = (
    "to train on from a run's weights, write policy.init_from={0} in its place: rlcli train ... policy.init_from={0}"
)


def validate(cfg: Any, typed: Collection[str] | None = None, undecided: Collection[str] = ()) -> list[Problem]:
    """Return all problems of a configuration: values out of range, what does not fit together, what nothing reads.

    `typed`: keys of the command line, by default those changed. `undecided`: keys that could not be used, `"recipe"`
    for all, and hold their defaults: nothing is said that follows from them.
    """
    schema = type(cfg)
    outside = {}
    for key, leaf in held(cfg).items():
        value, group = value_at(cfg, key), key.removesuffix(".kind")
        if group != key and (known := choices(schema, group)):
            if value not in known:
                problem = unknown(group, str(value), known)
                fix = problem.fix + ". If a package of yours registers it, add --import PACKAGE"
                outside[key] = problem._replace(fix=fix)
        elif not leaf.option.accepts(value):
            outside[key] = Problem(f"{key} is {value!r}", f"allowed: {leaf.option.allowed() or 'finite numbers'}")
    found, undecided = [*outside.values()], {*undecided, *outside}
    if "recipe" in undecided:
        return found
    for group in groups(schema):
        if any(key.startswith(f"{group}.") for key in undecided):
            continue
        options, kind = getattr(cfg, group), registry.KIND_OF.get(group)
        found += options.problems()
        if kind and options.kwargs and options.kind not in registry.users_names(kind):
            what = f"{group}.kwargs has no meaning with {group}={options.kind}"
            found.append(Problem(what, f"it is for {'an' if kind[0] in 'ae' else 'a'} {kind} that you registered"))
    for check, read in CHECKS.items():
        if not any(f"{key}.".startswith(read) for key in undecided):
            found += check(cfg)
    return [*found, *_without_meaning(cfg, typed, undecided)]


def _without_meaning(cfg: Any, typed: Collection[str] | None, undecided: Collection[str]) -> Iterator[Problem]:
    """Refuse what was typed, or (None) changed, and nothing reads; not where it is `undecided` what reads it."""
    table = held(cfg)
    for key in sorted(typed or ()):
        if f"{key.partition('.')[0]}.kind" not in undecided:
            yield from of_another_choice(cfg, key)
    for key, (by, choice) in idle(cfg).items():
        if key not in table or by in undecided or f"{by}.kind" in undecided:
            continue
        group, value, whole = key.removesuffix(".kind"), value_at(cfg, key), key.rpartition(".")[0]
        differs = value != table[key].default
        if (
            differs if typed is None else group in typed or any(f"{x}.".startswith(f"{key}.") for x in typed)
            # a sweep may go over mappings: run={keep:2},{keep:3}
            or (differs and "." in whole and whole in typed)
        ):  # fmt: skip
            name = key if group == key else f"{group}={value}"
            instead = "" if by == "verb" else f"use {spelled(by, table[key].option.read_by[by])}, or "
            yield Problem(f"{name} has no meaning {in_words(by, choice)}", f"{instead}leave it out")


def as_resumed(verb: str, data: Mapping[str, Any], overrides: Sequence[str], where: str) -> CollectConfig:
    """Return the configuration of a run that goes on, from what its folder keeps and the overrides of this command."""
    problems: list[Problem] = []
    cfg = from_dict(verb, data, overrides, where, problems)
    # what the run began with, weights, policy and rows, is its own by now: where that came from may be gone
    begun = changed(cfg, "policy", init_from=None, init_strict=True)
    if isinstance(begun, Config) and is_off_policy(begun):
        begun = changed(begun, "storage", init_from=None)
    if isinstance(begun.policy, CheckpointOptions):
        begun = changed(begun, "policy", path=os.path.dirname(where))
    raise_all([*problems, *validate(begun, set(map(key_of, overrides)))])
    return cfg


# ---- how batches are collected --------------------------------------------------------------------------------------
def check_collector(cfg: Any) -> Iterator[Problem]:
    c = cfg.collector
    if not isinstance(cfg, Config):
        for key in ("split_trajs", "trajs_per_batch", "deliver_leftovers"):
            if getattr(c, key):
                what = f"collector.{key} has no meaning for rlcli collect, which writes every frame to disk"
                yield Problem(what, "leave it out, and cut what you read: rlcli.data.split_trajectories(batch)")
        return
    if max(cfg.total_frames, 1_000_000) < c.frames_per_batch:
        what = f"collector.frames_per_batch={c.frames_per_batch:,} is more than total_frames={cfg.total_frames:,}"
        yield Problem(what, f"use {cfg.total_frames} at most: the run is one batch then")
    if c.split_trajs and c.trajs_per_batch:
        yield Problem("collector.split_trajs and collector.trajs_per_batch both cut trajectories", "give one of them")
    by_ids = {"collector.trajs_per_batch": c.trajs_per_batch, "collector.split_trajs": c.split_trajs}
    by_ids[f"sampler={cfg.sampler.kind}"] = draws(cfg) == "slices"
    for name in (name for name, asked in by_ids.items() if asked and not c.track_traj_ids):
        yield Problem(f"{name} needs collector.track_traj_ids=true", "leave out track_traj_ids=false")
    if c.trajs_per_batch and c.set_truncated and not c.reset_at_each_iter:
        what = "collector.set_truncated ends trajectories with their batch, collector.trajs_per_batch wants whole ones"
        yield Problem(what, "give one of them, or collector.reset_at_each_iter=true as well")


def check_workers(cfg: Any) -> Iterator[Problem]:
    c, env = cfg.collector, cfg.env
    apart = isinstance(env, GymOptions) and bool(env.workers or env.mode == "parallel")
    if c.kind == "sync":
        if c.on_worker_error == "restart" and not apart:
            what = "collector.on_worker_error=restart is for worker processes, and there are none"
            yield Problem(what, "use env.mode=parallel, or collector=multi_sync")
        elif c.on_worker_error == "restart" and env.caller_steps == "true":
            what = (
                "env.caller_steps=true contradicts collector.on_worker_error=restart: this process cannot be replaced"
            )
            yield Problem(what, "leave out one of them")
        return
    workers = as_choice(WorkersOptions, c).num_workers
    if isinstance(workers, int) and workers > env.num:
        what = f"collector.num_workers={workers} are more than there are envs"
        yield Problem(what, f"use collector.num_workers={env.num} at most")
    if apart:
        name = "env.workers" if env.workers else "env.mode=parallel"
        what = f"{name} steps the envs of one process, and each worker of collector={c.kind} steps its own"
        yield Problem(what, "give one of them")
    scales = [f"env.{name}" for name in ("normalize_observation", "normalize_reward") if getattr(env, name)]
    listed = [
        entry if isinstance(entry, str) else next(iter(entry), "")
        for entry in env.transforms
        if isinstance(entry, str | dict)  # else it is refused already
    ]
    for name in [*scales, *(f"env.transforms={name}" for name in listed if name in ("RunningNorm", "RewardNorm"))]:
        what = f"{name} keeps statistics in one process, and each worker would have its own"
        yield Problem(what, "use collector=sync, with env.workers for slow envs")
    if isinstance(c, MultiSyncOptions) and c.preemptive_threshold is not None:
        yield from _check_preemption(cfg)
    if not isinstance(cfg, Config) and not (c.kind == "multi_sync" or getattr(c, "sync", False)):
        yield Problem(f"rlcli collect takes the steps of a batch again when it is resumed, and with collector={c.kind} "
                      "workers would have begun others",
                      f"use collector{'.sync=true' if hasattr(c, 'sync') else '=multi_sync'}")  # fmt: skip


def check_elsewhere(cfg: Any) -> Iterator[Problem]:
    c = cfg.collector
    if c.kind not in ("ray", "distributed"):
        return
    if cfg.weights.swap == "step":
        what = f"weights.swap=step cannot reach the workers of collector={c.kind} within a batch"
        yield Problem(what, "leave it out, or use collector=multi_async")
    if c.kind == "ray":
        yield from lacking("ray", "collector=ray")
        for name, amount in c.resources.items():
            if isinstance(amount, bool) or not isinstance(amount, int | float) or amount < 0:
                yield Problem(f"collector.resources.{name} is {amount!r}", "write a number, {CPU: 1}")
        if 1 in (c.num_workers, cfg.env.num) and not (c.address or os.environ.get("RAY_ADDRESS")):
            what = "collector=ray has one worker here, which takes a cluster to start and is no faster"
            yield Problem(what, "use collector=multi_sync, or name a cluster: collector.address=host:port")
        return
    if c.backend == "nccl" and not installed.torch_has_cuda():
        what = "collector.backend=nccl needs GPUs, and this torch has none"
        yield Problem(what, "use collector.backend=gloo", only_here=True)
    if c.launcher == "torchrun" and "WORLD_SIZE" not in os.environ:
        what = "collector.launcher=torchrun needs the ranks that torchrun starts"
        yield Problem(what, "write torchrun --nproc-per-node 3 -m rlcli train ...", only_here=True)
    if c.launcher == "submitit":
        yield from (missing := lacking("slurm", "collector.launcher=submitit"))
        if not missing and c.slurm.get("cluster", "slurm") == "slurm" and shutil.which("sbatch") is None:
            what = "collector.launcher=submitit submits jobs, and there is no sbatch on this machine"
            yield Problem(what, "submit from a node of the cluster, or use collector.launcher=mp", only_here=True)


def _check_preemption(cfg: Any) -> Iterator[Problem]:
    if not isinstance(cfg, Config):
        yield Problem("rlcli collect writes equally many steps of all envs, and preempted workers take fewer",
                      "leave out collector.preemptive_threshold")  # fmt: skip
        return
    if as_choice(MultiSyncOptions, cfg.collector).num_workers == 1:
        yield Problem("collector.preemptive_threshold has no meaning for one worker", "use two at least")
    if isinstance(cfg.storage, TensorOptions) and cfg.storage.ndim > 1:
        yield Problem(f"storage.ndim={cfg.storage.ndim} needs equally many steps of all envs; preempted workers differ",
                      "use storage.ndim=1")  # fmt: skip


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


# ---- what this machine has ------------------------------------------------------------------------------------------
def check_env(cfg: Any) -> list[Problem]:
    """Check that the env id exists here and its packages are installed."""
    env_id, kind = cfg.env.id, cfg.env.kind
    if (old := gymnasium_problem()) is not None:
        return [old]
    if kind == "envpool":
        return lacking("envpool", "env=envpool")
    if kind == "atari" or env_id.startswith("ALE/"):
        return lacking("atari", f"env.id={env_id}")
    if env_id.startswith(("MiniGrid-", "BabyAI-")):
        return lacking("minigrid", f"env.id={env_id}")
    if env_id in registry.names("env"):
        return []
    from gymnasium.envs.registration import registry as known

    # gymnasium accepts an id without version and takes the newest
    ids = {**known, **{re.sub(r"-v\d+$", "", name): spec for name, spec in known.items()}}
    if env_id not in ids:
        if game := re.fullmatch(r"(\w+?)(NoFrameskip|Deterministic)-v\d+", env_id):  # what ALE/ ids were called before
            return [Problem(f"unknown env id {env_id!r}", f"write env=atari env.id=ALE/{game[1]}-v5")]
        hint = did_you_mean(env_id, (*known_ids(), *registry.users_names("env")))
        if more := _of_packages(env_id, known, hint):
            return [Problem(f"unknown env id {env_id!r}", f"{hint} {more}".lstrip())]
        if not hint or env_id.isidentifier() or "/" in env_id:  # not the form of an id of gymnasium's
            hint = f"{hint or 'rlcli ls envs lists them.'} If a package of yours registers it, add --import PACKAGE"
        return [Problem(f"unknown env id {env_id!r}", hint)]
    entry = ids[env_id].entry_point
    module = entry if isinstance(entry, str) else getattr(entry, "__module__", "")
    extra = next((extra for extra in _OF_GYMNASIUM if module.startswith(f"gymnasium.envs.{extra}")), None)
    return lacking(extra, f"env.id={env_id}") if extra else []


def _of_packages(env_id: str, known: Mapping[str, Any], near: str) -> str:
    """Say what to do about an unknown id where packages were imported for it; else, or if they gave others, nothing."""
    if not registry.imported:
        return ""
    homes = {name: getattr(spec.entry_point, "__module__", str(spec.entry_point)) for name, spec in known.items()}
    for package in registry.imported:
        top = package.partition(".")[0]
        ids = [name for name, home in homes.items() if home.partition(":")[0].partition(".")[0] == top]
        ids += [name for name in registry.users_names("env") if registry.find("env", name).__module__ == package]
        if ids:
            if near:
                return ""
            shown = sorted(ids, key=lambda name: -SequenceMatcher(None, env_id, name).ratio())[:4]
            return f"{package} has {len(ids)} of them, such as {', '.join(shown)}"
    package, top = registry.imported[0], registry.imported[0].partition(".")[0]
    said = f"{package} was imported and registered no env id with gymnasium; "
    if callable(getattr(sys.modules.get(package), "register_envs", None)):
        call = f"'import {package}' and '{package}.register_envs()'"
        return f"{said}it has register_envs: --import my_envs, a file my_envs.py with {call}"
    if package == top and hasattr(sys.modules.get(top), "__path__") and find_spec(f"{top}.envs") is not None:
        return f"{said}try --import {top}.envs"
    return f"{said}register one yourself: rlcli help environments"


def check_devices(cfg: Any) -> list[Problem]:
    """Check that every named device could exist with this torch on this system; using it shows whether it does."""
    kind = cfg.device.kind
    wanted = [("device", kind, accelerator() if kind == "split" else "cpu" if kind == "auto" else kind)]
    for name in ("env_device", "policy_device", "storing_device", "train_device"):
        if (device := getattr(cfg.device, name)) is not None:
            wanted.append((f"device.{name}", device, device))
    if getattr(getattr(cfg, "storage", None), "device", None) == "cuda":
        wanted.append(("storage.device", "cuda", "cuda"))
        if cfg.storage.kind != "tensor":
            return [Problem(f"storage.device=cuda has no meaning for storage={cfg.storage.kind}", "use storage=tensor")]
    found = []
    for key, given, device in wanted:
        if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", device):
            found.append(Problem(f"{key}={given!r} is not a device", "use cpu, cuda, cuda:<number> or mps"))
        elif device.startswith("cuda") and not installed.torch_has_cuda():
            found.append(Problem(f"{key}={given} is not there: the installed torch is a CPU build", f"use {key}=cpu"))
        elif device == "mps" and sys.platform != "darwin":
            found.append(Problem(f"{key}={given} is not there: mps exists on macOS only", f"use {key}=cpu"))
    return [problem._replace(only_here=True) for problem in found]


def check_packages(cfg: Any) -> list[Problem]:
    compressed = lacking("compressed", "memory.compress=true") if cfg.memory.compress else []
    return [*compressed, *(lacking("tensorboard", "logger=tensorboard") if cfg.logger.kind == "tensorboard" else [])]


# ---- policy, parts of a user's, folder ------------------------------------------------------------------------------
def _is_folder(asked: str) -> bool:
    """Say whether a run's folder is named, or one with a checkpoint of it after a colon."""
    return os.path.isdir(asked) or os.path.isdir(asked.rpartition(":")[0])


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
    if policy.init_from is not None and not _is_folder(policy.init_from):
        yield Problem(f"policy.init_from={policy.init_from} is no run", "rlcli ls runs lists runs", only_here=True)
    if policy.kind == "checkpoint" and policy.path and not _is_folder(policy.path):
        yield Problem(f"policy.path={policy.path} does not exist", "rlcli ls runs lists runs", only_here=True)


# check -> where the keys begin that it reads, as far as one that cannot be used would have it say what is not so
CHECKS: dict[Callable[[Any], Iterable[Problem]], tuple[str, ...]] = {
    check_collector: ("collector.", "sampler.kind."),
    check_workers: ("collector.", "env.", "weights."),
    check_elsewhere: ("collector.", "weights.", "env.num."),
    check_wrappers: ("env.wrappers.", "env.transforms."),
    check_learning: ("",),  # any key
    check_recurrence: ("policy.", "loss.kind.", "device."),
    check_ranks: ("",),
    check_env: ("env.kind.", "env.id."),
    check_devices: ("device.",),
    check_packages: ("memory.compress.", "logger."),
    check_policy: ("policy.",),
}
