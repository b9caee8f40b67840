"""Every check of a composed configuration: all problems at once, each with its remedy.

What one part takes is for its constructor to check; here is what spans parts, before anything is built or torch is
loaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from rlcli.config import installed, registry
from rlcli.config.installed import check_devices, check_env, lacking
from rlcli.config.option import Leaf, choices, leaves, value_at
from rlcli.config.parts import CHOICES
from rlcli.config.problem import Problem, did_you_mean, unknown
from rlcli.config.schemas import Config, by_priority, draws_slices, is_off_policy, remembers
from rlcli.config.unread import check_typed


def validate(cfg: Any, typed: Collection[str] | None = None, undecided: Collection[str] = ()) -> list[Problem]:
    """All problems of a typed configuration: values out of range, then options that do not fit together.

    Parameters
    ----------
    cfg : Config or CollectConfig
        The typed tree.
    typed : collection of str, optional
        Keys that the command line set: those that nothing reads are refused. By default all whose value is not their
        default.
    undecided : collection of str
        Keys that were given what cannot be used, `"storage.kind"`, and hold their defaults in `cfg`: nothing is said
        that follows from those. `"recipe"` stands for every key.

    Returns
    -------
    list of Problem
        Empty when the configuration can be used.
    """
    found = [problem for leaf in leaves(type(cfg)).values() for problem in _out_of_range(cfg, leaf)]
    for check, read in _READ.items():
        if not any(key == "recipe" or f"{key}.".startswith(read) for key in undecided):
            found += check(cfg)
    return found if "recipe" in undecided else [*found, *check_typed(cfg, typed, undecided)]


def _out_of_range(cfg: Any, leaf: Leaf) -> Iterator[Problem]:
    value = value_at(cfg, leaf.key)
    if leaf.option.accepts(value):
        return
    group = leaf.key.removesuffix(".kind")
    if group != leaf.key:
        if value in (known := choices(type(cfg), group)):
            return
        problem = unknown(group, str(value), known)
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
    for entry in memory.keep:
        parts = entry if isinstance(entry, list) and entry else [entry]
        if not all(isinstance(part, str) and part for part in parts):
            yield Problem(f"memory.keep holds {entry!r}, which is not a key", "write memory.keep=[logits,[a,b]]")


def check_workers(cfg: Any) -> Iterator[Problem]:
    c, env = cfg.collector, cfg.env
    if c.kind == "sync":
        if c.on_worker_error == "restart" and not (env.workers or env.mode == "parallel"):
            yield Problem(
                "collector.on_worker_error=restart is for worker processes, and there are none",
                "use env.mode=parallel, or collector=multi_sync",
            )
        return
    if isinstance(c.num_workers, int) and c.num_workers > env.num:
        yield Problem(
            f"collector.num_workers={c.num_workers} are more than there are envs",
            f"use collector.num_workers={env.num} at most",
        )
    if env.workers or env.mode == "parallel":
        name = "env.workers" if env.workers else "env.mode=parallel"
        yield Problem(
            f"{name} steps envs for one process, and collector={c.kind} has several that step their own",
            "give one of them",
        )
    scales = [f"env.{name}" for name in ("normalize_observation", "normalize_reward") if getattr(env, name)]
    listed = [entry if isinstance(entry, str) else next(iter(entry), "") for entry in env.transforms if entry]
    for name in [*scales, *(f"env.transforms={name}" for name in listed if name in ("RunningNorm", "RewardNorm"))]:
        yield Problem(
            f"{name} follows what one process collects, and each worker would have a scale of its own",
            "use collector=sync, with env.workers for slow envs",
        )
    if c.preemptive_threshold is not None:
        yield from _check_preemption(cfg)
    if cfg.weights.on_lag != "report" and cfg.weights.max_lag is None:
        yield Problem(f"weights.on_lag={cfg.weights.on_lag} needs weights.max_lag", "give both, or neither")
    if not isinstance(cfg, Config) and c.kind != "multi_sync":
        yield Problem(f"rlcli collect takes the steps of a batch again when it is resumed, and with collector={c.kind} "
                      "workers would have begun others", "use collector=multi_sync")  # fmt: skip


def _check_preemption(cfg: Any) -> Iterator[Problem]:
    if not isinstance(cfg, Config):
        yield Problem("rlcli collect writes as many steps of all envs, and preempted workers take fewer",
                      "leave out collector.preemptive_threshold")  # fmt: skip
        return
    if cfg.collector.num_workers == 1:
        yield Problem("collector.preemptive_threshold has no meaning for one worker", "use two at least")
    if cfg.storage.ndim > 1:
        yield Problem(f"storage.ndim={cfg.storage.ndim} takes as many steps of all envs, preempted workers take fewer",
                      "use storage.ndim=1")  # fmt: skip


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
    collects = not isinstance(cfg, Config) or cfg.loss.kind not in CHOICES["loss"]  # a loss of one's own may read it
    if policy.kind == "checkpoint" and not policy.path:
        given = "policy.path=RUN_FOLDER" if collects else "use rlcli collect policy.path=RUN_FOLDER, or another policy"
        yield Problem("policy=checkpoint needs policy.path", f"{given} (rlcli ls runs lists them)", only_here=True)
    elif policy.kind == "checkpoint" and not collects:
        yield Problem("policy=checkpoint acts with weights that are trained", "use rlcli collect, or another policy")
    if policy.kind == "checkpoint" and policy.path and not os.path.exists(policy.path):
        yield Problem(f"policy.path={policy.path} does not exist", "rlcli ls runs lists runs", only_here=True)


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
    if policy.recurrent_backend == "cpu" and cfg.device.kind in ("cuda", "mps", "split"):
        yield Problem(
            f"policy.recurrent_backend=cpu does not run on device={cfg.device.kind}",
            "use policy.recurrent_backend=auto",
        )


def _without_gpu(cfg: Any) -> bool:
    return cfg.device.kind == "cpu" or not installed.torch_has_cuda()


def check_kwargs(cfg: Any) -> Iterator[Problem]:
    for kind, group in registry.GROUPS.items():
        options = getattr(cfg, group, None)
        if options is None or not options.kwargs or options.kind in registry.users_names(kind):
            continue
        if f"{group}.kwargs" not in registry.part(kind, options.kind).uses:
            what = f"{group}.kwargs has no meaning with {group}={options.kind}"
            yield Problem(what, f"it is for {'an' if kind[0] in 'ae' else 'a'} {kind} that you registered")


def check_modes(cfg: Any) -> Iterator[Problem]:
    env = cfg.env
    if env.kind == "envpool" and env.mode == "serial":
        yield Problem("env=envpool and env.mode=serial contradict each other", "use env.mode=native or env=gym")
    if env.wrappers and (env.mode == "native" or env.kind == "envpool"):
        yield Problem("env.wrappers wrap single envs, and a native engine has none", "use env=gym env.mode=serial")
    if env.workers and env.workers > env.num:
        yield Problem(f"env.workers={env.workers} are more than there are envs", f"use env.workers={env.num} at most")
    apart = env.workers or env.mode == "parallel"
    for name in ("start_method", "per_worker", "caller_steps"):
        if getattr(env, name) != "auto" and not apart:
            yield Problem(f"env.{name} is of worker processes, and there are none", "give env.mode=parallel")
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
                name, _ = registry.wrapper_call(entry, f"env.{kind}s")
            except ValueError as error:
                yield Problem(str(error), f"write env.{kind}s=[Name,{{Name:{{argument:value}}}}]")
                continue
            if name not in registry.names(kind):
                hint = did_you_mean(name, registry.names(kind))
                yield Problem(f"unknown {kind} {name!r} in env.{kind}s", hint or f"rlcli ls {kind}s lists them")


def check_logger(cfg: Any) -> Iterator[Problem]:
    if cfg.logger.kind == "tensorboard":
        yield from lacking("tensorboard", "logger=tensorboard")


# ---- storage and sampler fit the loss: how rows are kept, how they are drawn, what they begin with -----------------
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
        yield Problem(f"loss={kind} learns from stored rows, and storage=none keeps none", "use storage=tensor")
    yield from _room(cfg)
    yield from _draws_of_off_policy(cfg)


def _draws_of_off_policy(cfg: Config) -> Iterator[Problem]:
    """Single rows, or slices where the policy remembers."""
    kind, policy, sampler = cfg.loss.kind, cfg.policy.kind, cfg.sampler.kind
    draws, users = registry.part("sampler", sampler).draws, policy in registry.users_names("policy")
    along = remembers(cfg) and kind != "sac"
    instead = f"use sampler={'slice' if along else 'random'} or sampler=prioritized{'_slice' * along}"
    if remembers(cfg) and kind == "sac":
        yield Problem(f"policy={policy} remembers, and loss=sac has no networks that do", "use loss=dqn, or policy=mlp")
    elif draws == "batch":
        yield Problem(f"loss={kind} draws rows of a storage, and sampler={sampler} cuts one batch", instead)
    elif along and draws == "rows":
        yield Problem(f"policy={policy} learns along trajectories, and sampler={sampler} draws single rows", instead)
    elif draws == "slices" and not (along or users):
        yield Problem(f"loss={kind} learns from single rows with policy={policy}", instead)
    if draws == "slices" and not cfg.collector.track_traj_ids:
        yield Problem(f"sampler={sampler} needs collector.track_traj_ids=true", "leave out track_traj_ids=false")
    if cfg.loss.start_state != "stored" and not (remembers(cfg) or users):
        yield Problem(
            f"loss.start_state={cfg.loss.start_state} is of a state that policy={policy} lacks", "leave it out"
        )


def _rows_of_policy_gradient(cfg: Config) -> Iterator[Problem]:
    kind, storage, sampler = cfg.loss.kind, cfg.storage.kind, cfg.sampler.kind
    if draws_slices(cfg):
        yield from _gradient_of_slices(cfg)
    elif registry.part("sampler", sampler).draws == "rows":
        yield Problem(
            f"sampler={sampler} draws single rows, and loss={kind} values rows along their trajectories",
            "use sampler=slice with a storage, or sampler=minibatch without",
        )
    elif storage != "none":
        yield Problem(
            f"sampler={sampler} learns from each batch once, and storage={storage} would keep rows nobody draws",
            "use sampler=slice, or storage=none",
        )


def _gradient_of_slices(cfg: Config) -> Iterator[Problem]:
    c, by = cfg.collector, f"sampler={cfg.sampler.kind}"
    if by_priority(cfg):
        yield Problem(f"{by} draws by the errors of rows, and loss={cfg.loss.kind} gives none", "use sampler=slice")
    if cfg.storage.kind == "none":
        yield Problem(
            f"{by} draws from stored rows, and storage=none keeps none",
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
    if "sampler.slice_len" not in registry.part("sampler", s.kind).uses:
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
    if (s.slice_len is not None and s.slice_len < 1) or (s.num_slices is not None and s.num_slices < 1):
        return  # out of range, which is said already
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
    """How rows lie in the buffer."""
    if cfg.memory.frame_stack != "auto" and (cfg.env.frame_stack or 1) < 2:
        yield Problem(
            "memory.frame_stack has no meaning with env.frame_stack=null: there are no stacks", "leave it out"
        )


# ---- what is learned: values, loss and optimizer --------------------------------------------------------------------
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
        yield Problem(
            f"loss={kind} reads every row's next observation, and memory=compact keeps none", "use memory=exact"
        )
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
    if (
        batch > rows >= 1
        and registry.part("sampler", cfg.sampler.kind).draws == "batch"
        and not cfg.collector.trajs_per_batch
    ):
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


# check -> where the keys begin that it reads, as far as one that cannot be used would have it say what is not so
_READ: dict[Callable[[Any], Iterable[Problem]], tuple[str, ...]] = {
    check_memory: ("memory.kind.", "memory.next_obs."),
    check_collector: ("collector.",),
    check_workers: ("collector.", "env.", "weights."),
    check_policy: ("policy.",),
    check_recurrence: ("policy.", "loss.kind.", "device.kind."),
    check_kwargs: tuple(f"{group}.kind." for group in registry.GROUPS.values()),
    check_modes: ("env.",),
    check_wrappers: ("env.wrappers.", "env.transforms."),
    check_logger: ("logger.",),
    check_run: ("run.",),
    check_buffer: ("",),
    check_learning: ("",),
    check_env: ("env.kind.", "env.id."),
    check_devices: ("device.",),
}
