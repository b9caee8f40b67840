"""What is learned from which rows, and by how many ranks: options that do not fit each other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from rlcli.config import installed, registry
from rlcli.config.choices import collect, learn
from rlcli.config.option import as_choice, held, value_at
from rlcli.config.problem import Problem
from rlcli.config.schemas import Config, by_priority, draws, is_off_policy, remembers


def check_learning(cfg: Any) -> Iterator[Problem]:
    """Options that do not fit the loss, or each other; then storage, sampler and the form of rows."""
    if not isinstance(cfg, Config):
        return
    if is_off_policy(cfg):
        yield from _off_policy(cfg)
    else:
        yield from _policy_gradient(cfg)
    yield from _slices(cfg)
    if (path := cfg.storage.init_from) is not None and not is_off_policy(cfg):
        what = f"storage.init_from has no meaning with loss={cfg.loss.kind}, which learns from its own new frames alone"
        yield Problem(what, "leave it out, or use loss=dqn | sac")
    elif path is not None and not os.path.isdir(path):
        yield Problem(f"storage.init_from={path} is no folder", "rlcli ls runs lists runs", only_here=True)


def _off_policy(cfg: Config) -> Iterator[Problem]:
    kind, c, policy = cfg.loss.kind, cfg.collector, cfg.policy
    if cfg.memory.next_obs == "compact":
        yield Problem(f"loss={kind} needs every next observation, and memory=compact stores none", "use memory=exact")
    if isinstance(policy, collect.NetworkOptions) and kind in ("dqn", "sac"):
        if policy.distribution not in ("auto", "tanh_normal" if kind == "sac" else "auto"):
            only = " draws from tanh_normal" if kind == "sac" else " chooses by value"
            what = f"policy.distribution={policy.distribution} has no meaning: loss={kind}{only}"
            yield Problem(what, "leave it out")
        if kind == "dqn" and policy.eps_end > policy.eps_init:
            what = f"policy.eps_end={policy.eps_end} is more than policy.eps_init={policy.eps_init}"
            yield Problem(what, "epsilon falls: use policy.eps_end <= policy.eps_init")
    for name in ("split_trajs", "trajs_per_batch"):
        if getattr(c, name):
            yield Problem(f"collector.{name} has no meaning with loss={kind}, which learns from rows", "leave it out")
    if c.init_random_frames >= cfg.total_frames and cfg.storage.init_from is None:
        what = f"collector.init_random_frames={c.init_random_frames} leaves nothing of total_frames={cfg.total_frames}"
        yield Problem(what, f"use collector.init_random_frames < {cfg.total_frames}")
    if cfg.storage.kind == "none":
        yield Problem(f"loss={kind} learns from a replay buffer, and storage=none has none", "use storage=tensor")
    yield from _room(cfg)
    yield from _draws_of_off_policy(cfg)


def _learns_on(cfg: Config) -> tuple[str, str]:
    """Return the device that learns, and which key says so; with device=auto what is always there."""
    given, kind = cfg.device.train_device, cfg.device.kind
    if given is not None:
        return given, f"device.train_device={given}"
    found = {"split": installed.accelerator(), "auto": "cpu"}
    return found.get(kind, kind), f"device={kind}"


def _without_gpu(cfg: Config) -> bool:
    return not (installed.torch_has_cuda() and _learns_on(cfg)[0].startswith("cuda"))


def _policy_gradient(cfg: Config) -> Iterator[Problem]:
    v, rows, batch = cfg.value, cfg.collector.frames_per_batch, cfg.sampler.batch_size
    if v.backend == "triton" and _without_gpu(cfg):
        yield Problem("value.backend=triton runs on a GPU", "use value.backend=auto, or device=cuda")
    if isinstance(cfg.loss, learn.ReinforceOptions) and not cfg.loss.baseline and v.kind != "td1":
        what = f"loss.baseline=false learns from whole returns, and value={v.kind} gives others"
        yield Problem(what, "use value=td1")
    if batch > rows and draws(cfg) == "batch" and not cfg.collector.trajs_per_batch:
        what = f"sampler.batch_size={batch} is more than collector.frames_per_batch={rows} holds"
        yield Problem(what, f"use sampler.batch_size <= {rows}")
    if v.average and v.average_over == "minibatch" and batch == 1:
        what = "one row has no deviation to normalise its advantage by"
        yield Problem(what, "use sampler.batch_size >= 2, value.average_over=batch or value.average=false")
    by, storage = f"sampler={cfg.sampler.kind}", cfg.storage.kind
    if draws(cfg) == "slices":
        yield from _gradient_of_slices(cfg)
    elif draws(cfg) == "rows":
        what = f"{by} draws single rows, and loss={cfg.loss.kind} values rows along their trajectories"
        yield Problem(what, "use sampler=slice with a storage, or sampler=minibatch without")
    elif storage != "none":
        what = f"{by} learns from each batch once, and would never sample from storage={storage}"
        yield Problem(what, "use sampler=slice, or storage=none")


def check_recurrence(cfg: Any) -> Iterator[Problem]:
    """A recurrent policy: who shares its trunk, and what runs it over sequences."""
    policy = cfg.policy
    if not isinstance(policy, collect.RecurrentOptions):
        return
    if policy.shared is False and not (isinstance(cfg, Config) and is_off_policy(cfg)):  # they do not read it
        what = f"policy.shared=false has no meaning with policy={policy.kind}: a collector steps no state of a critic"
        yield Problem(what, "leave it out")
    if not isinstance(cfg, Config):
        return  # one step of the policy is the same with all backends
    if policy.recurrent_backend == "triton" and _without_gpu(cfg):
        what = "policy.recurrent_backend=triton runs on a GPU"
        yield Problem(what, "use policy.recurrent_backend=auto, or device=cuda")
    device, said = _learns_on(cfg)
    if policy.recurrent_backend == "cpu" and device.startswith(("cuda", "mps")):
        what = f"policy.recurrent_backend=cpu does not run on {said}"
        yield Problem(what, "use policy.recurrent_backend=auto")


# ---- rows -----------------------------------------------------------------------------------------------------------
def _draws_of_off_policy(cfg: Config) -> Iterator[Problem]:
    """Single rows, or slices where the policy remembers."""
    loss, kind, policy, sampler = cfg.loss, cfg.loss.kind, cfg.policy.kind, cfg.sampler.kind
    drawn, users = draws(cfg), policy in registry.users_names("policy")
    along = remembers(cfg) and kind != "sac"
    instead = f"use sampler={'slice' if along else 'random'} or sampler=prioritized{'_slice' * along}"
    if remembers(cfg) and kind == "sac":
        what = f"policy={policy} is recurrent, and loss=sac has no recurrent networks"
        yield Problem(what, "use loss=dqn, or policy=mlp")
    elif drawn == "batch":
        yield Problem(f"loss={kind} draws rows of a storage, and sampler={sampler} cuts one batch", instead)
    elif along and drawn == "rows":
        yield Problem(f"policy={policy} learns along trajectories, and sampler={sampler} draws single rows", instead)
    elif drawn == "slices" and not (along or users):
        yield Problem(f"loss={kind} learns from single rows with policy={policy}", instead)
    if isinstance(loss, learn.DQNOptions) and loss.start_state != "stored" and not (remembers(cfg) or users):
        yield Problem(f"loss.start_state={loss.start_state} is of a state that policy={policy} lacks", "leave it out")


def _gradient_of_slices(cfg: Config) -> Iterator[Problem]:
    c, by = cfg.collector, f"sampler={cfg.sampler.kind}"
    if by_priority(cfg):
        yield Problem(f"{by} draws by the errors of rows, and loss={cfg.loss.kind} gives none", "use sampler=slice")
    if cfg.storage.kind == "none":
        what = f"{by} samples a replay buffer, and storage=none has none"
        yield Problem(what, "use storage=tensor | memmap | compressed")
    yield from _room(cfg)
    for name in ("split_trajs", "trajs_per_batch"):
        if getattr(c, name):
            yield Problem(f"collector.{name} has no meaning with {by}, which cuts stored rows", "leave it out")
    if isinstance(cfg.loss, learn.ActorCriticOptions) and cfg.loss.clip_value is not None:
        what = f"loss.clip_value has no meaning with {by}: the values of a sample are computed when it is drawn"
        yield Problem(what, "leave it out")
    if isinstance(cfg.loss, learn.ReinforceOptions) and not cfg.loss.baseline:
        what = "loss.baseline=false sums the rewards of whole trajectories, and a slice ends before its trajectory"
        yield Problem(what, "use loss.baseline=true, or sampler=minibatch")


def _slices(cfg: Config) -> Iterator[Problem]:
    """Slices: how long, and who learns from them."""
    s, storage = as_choice(learn.StoredSliceOptions, cfg.sampler), cfg.storage
    if draws(cfg) == "batch":
        if s.slice_len is not None and not is_off_policy(cfg):
            yield from _slices_of_batches(cfg, s.slice_len)
        return
    if s.burn_in and not is_off_policy(cfg):
        what = f"sampler.burn_in has no meaning with loss={cfg.loss.kind}, which begins slices from their stored states"
        yield Problem(what, "leave it out, or use loss=dqn")
    if isinstance(storage, learn.TensorOptions) and (s.slice_len or s.num_slices):
        length = s.slice_len or s.batch_size // (s.num_slices or 1)
        steps = storage.max_size // cfg.env.num if storage.ndim == 2 else storage.max_size
        if length > steps:
            what = f"a slice of {length} rows is longer than the {steps} rows of an env that the storage holds"
            yield Problem(what, "use a shorter sampler.slice_len or a larger storage.max_size")
        elif s.burn_in and length + s.burn_in > steps:
            what = f"sampler.burn_in={s.burn_in} and a slice of {length} rows are more than the {steps} rows of an env"
            yield Problem(what, f"use sampler.burn_in <= {steps - length}, or a larger storage.max_size")


def _slices_of_batches(cfg: Config, length: int) -> Iterator[Problem]:
    """Slices that minibatches are made of, which begin from stored states."""
    stride = cfg.memory.recurrent_state_stride
    if not remembers(cfg) and cfg.policy.kind not in registry.users_names("policy"):
        with_ = f"with sampler={cfg.sampler.kind} and policy={cfg.policy.kind}, which learns from single rows"
        fix = "use policy=gru | lstm, or sampler=slice with a storage, or sampler.slice_len=null"
        yield Problem(f"sampler.slice_len has no meaning {with_}", fix)
    elif isinstance(stride, int) and length % stride:
        what = f"slices of sampler.slice_len={length} begin from states, and memory.recurrent_state_stride={stride}"
        fix = f"use memory.recurrent_state_stride=auto, or sampler.slice_len={max(1, length // stride) * stride}"
        yield Problem(f"{what} keeps none there", fix)


def _room(cfg: Config) -> Iterator[Problem]:
    """A storage that holds a batch."""
    frames, storage = cfg.collector.frames_per_batch, cfg.storage
    if isinstance(storage, learn.TensorOptions) and storage.max_size < frames:
        what = f"storage.max_size={storage.max_size} is less than collector.frames_per_batch={frames}"
        yield Problem(what, f"use storage.max_size >= {frames}")


# ---- ranks: what has to divide among them, and what has no meaning with them yet -------------------------------------
SHARED = (
    "env.num", "collector.frames_per_batch", "collector.num_workers", "collector.init_random_frames",
    "sampler.batch_size", "sampler.num_slices", "storage.max_size",
)  # fmt: skip
_WHY = {  # key -> its only value, and why
    "collector.on_worker_error": ("raise", "a lost worker ends all ranks, and the run goes on from its checkpoint"),
    "env.normalize_observation": (False, "each rank would have statistics of its own"),
    "env.normalize_reward": (False, "each rank would have statistics of its own"),
    "collector.split_trajs": (False, "the ranks' batches would have different shapes"),
    "collector.trajs_per_batch": (None, "the ranks' batches would have different lengths"),
    "collector.preemptive_threshold": (None, "the ranks' batches would have different lengths"),
    "storage.init_from": (None, "each rank has a buffer of its own"),
    "storage.scratch_dir": (None, "each rank keeps its rows in the run folder"),
}


def check_ranks(cfg: Any) -> Iterator[Problem]:
    """Yield what does not fit a learner of so many ranks, or the ranks that this process is one of."""
    trains, size = isinstance(cfg, Config), os.environ.get("WORLD_SIZE", "1")
    asked = getattr(cfg.collector, "launcher", "") == "torchrun" or (trains and str(cfg.learner.world_size) == size)
    if "RANK" in os.environ and size != "1" and not asked:
        yield Problem(
            f"RANK={os.environ['RANK']} of WORLD_SIZE={size} is set, as by torchrun, and each of those processes would "
            "begin a run of its own",
            f"{f'add learner.world_size={size} to have them learn together; or ' * trains}have them collect: "
            "collector=distributed collector.launcher=torchrun; or start rlcli alone (or unset RANK and WORLD_SIZE)",
            only_here=True,
        )
    if not isinstance(cfg, Config) or (n := cfg.learner.world_size) == 1:
        return
    if cfg.collector.kind not in ("sync", "multi_sync"):
        yield Problem(
            f"collector={cfg.collector.kind} has one learner, and the ranks of a learner collect a share each, in step",
            "use collector=sync or collector=multi_sync",
        )
    for key, (without, why) in _WHY.items():
        if key in held(cfg) and value_at(cfg, key) not in (without, None):
            yield Problem(f"{key} has no meaning with learner.world_size={n}: {why}", "leave it out")
    if os.environ.get("LOCAL_WORLD_SIZE", size) != size == str(n) and cfg.storage.kind != "none":
        yield Problem(
            f"storage={cfg.storage.kind} has no meaning with ranks on several machines: a buffer is not sent to rank 0",
            "learn from batches, as recipe=ppo_exact does, or start all ranks on one machine", only_here=True,
        )  # fmt: skip
    yield from _divided(cfg, n)
    if cfg.learner.backend == "nccl" and not installed.torch_has_cuda():
        yield Problem("learner.backend=nccl needs GPUs, and this torch has none", "use learner.backend=auto")


def _divided(cfg: Config, n: int) -> Iterator[Problem]:
    """Yield what does not divide among the ranks; slices are not cut."""
    s = as_choice(learn.StoredSliceOptions, cfg.sampler)
    drawn = (draws(cfg) == "slices" and s.num_slices is None and s.slice_len) or 1
    for key in (key for key in SHARED if key in held(cfg)):
        value, rows = value_at(cfg, key), drawn if key == "sampler.batch_size" else 1
        if isinstance(value, int) and value % (unit := n * rows):
            low = value // unit * unit
            fits = " or ".join(f"{key}={x}" for x in (low, low + unit) if x > 0)
            of = f" slices of {rows} rows" if rows > 1 else ""
            yield Problem(f"{key}={value} does not divide among learner.world_size={n} ranks{of}", f"use {fits}")
