"""What both verbs read, and the tree of `rlcli collect`: what is stepped, what acts, how batches are collected and
stored, where all of it lives, what is shown, and the run's folder.

Each choice of a group is a dataclass, with the options of what it builds on and its own, and what does not fit among
them. `read_by` is said of options that depend on another group's choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlcli.config.option import GIVEN, REGISTERED, Group, Part, option
from rlcli.config.problem import Problem

_DEVICE = "device for {}; null follows the choice of `device`"
START_METHODS = ("auto", "forkserver", "spawn", "fork")
# who reads an option of another group: group, or `verb` -> its choices
TRAIN, COLLECT = {"verb": ("train",)}, {"verb": ("collect",)}
GRADIENTS = {"loss": ("ppo_clip", "ppo_kl", "a2c", "reinforce")}  # policy gradients, with values and an entropy bonus
GREEDY = {"loss": ("dqn",)}
typed_option = partial(option, typed=True)
VALUED = GRADIENTS | {"loss.baseline": (True,)}  # with a value net
train_option, gradient_option, greedy_option = (partial(option, read_by=by) for by in (TRAIN, GRADIENTS, GREEDY))
valued_option = partial(option, read_by=VALUED)
apart_option = partial(option, read_by={"env.mode": ("auto", "parallel")})
STORED = {"storage": ("tensor", "memmap", "compressed", REGISTERED)}


# ---- env ------------------------------------------------------------------------------------------------------------
@dataclass
class AtariConfig(Group):
    """Frames of the Atari screen before the policy sees them."""

    noop_max: int = option(30, "up to this many no-op steps at the start of an episode", ge=0)
    frame_skip: int = option(4, "emulator frames per step; the last two are maximised", ge=1)
    screen_size: int = option(84, "side of the resized square frame, in pixels", ge=1)
    grayscale: bool = option(True, "one luminance channel instead of three colours")
    terminal_on_life_loss: bool = option(False, "a lost life terminates the episode")
    clip_reward: bool = option(True, "clip rewards to their sign")
    fire_reset: bool = option(False, "press FIRE after each reset, in games that wait for it (Breakout)")
    sticky_actions: float | None = option(
        None,
        "probability that a frame repeats the last action, whatever env.kwargs.repeat_action_probability says; null: "
        "what that says, 0 with env=atari",
        ge=0, le=1,
    )  # fmt: skip


@dataclass
class EnvOptions(Group):
    """The environment, its wrappers, and how many of it are stepped together."""

    kind: str = option("gym", "which env choice this is")
    id: str = option("CartPole-v1", "gymnasium id, or a name from the registry")
    num: int = option(8, "environments stepped together (sub-environments)", ge=1, le=1_000_000)
    mode: str = option(
        "auto",
        "serial: one by one; parallel: in processes; native: the env's own vector engine; auto: the engine where it is "
        "faster and resumes exactly, else processes where a trial run of the env shows that they are",
        choices=("auto", "serial", "parallel", "native"),
    )
    max_episode_steps: int | None = option(None, "truncate episodes here; null keeps the env's own limit", ge=1)
    frame_stack: int | None = option(None, "last k observations, stacked, for the policy", ge=1)
    normalize_observation: bool = option(False, "normalise observations by their running mean and standard deviation")
    normalize_reward: bool = option(False, "scale rewards by the running standard deviation of the return")
    reward_scale: float = option(1.0, "multiply every reward by this", gt=0)
    out_of_bounds: str = option(
        "count",
        "an observation outside the declared space: refuse: stop there; count: go on and report; ignore: do not look",
        choices=("refuse", "count", "ignore"),
    )
    step_timeout: float | None = option(
        None, "seconds after which an env that does not answer ends the run; null: never, with a warning after 60", gt=0
    )
    info_keys: list[str] = option(
        [],
        "numbers and flags of `info` to track, from the last step of each episode; a.b is b in the mapping a; "
        "is_success is always looked for",
    )
    wrappers: list[Any] = option(
        [],
        "names, or {Name: {argument: value}}, applied in order, innermost first: [{RepeatAction: {num_repeats: 4}}] "
        "takes each action four times",
    )
    transforms: list[Any] = option([], "further transforms of what the envs give, written as wrappers are")
    kwargs: dict[str, Any] = option(
        {},
        "arguments for gymnasium.make, added to those that a recipe gives; {}: none of them. In a text, {index} is the "
        "number of the env, from 0; {5005+index} a port of its own",
    )

    def problems(self) -> Iterator[Problem]:
        if self.kind == "envpool" and self.mode in ("serial", "parallel"):
            what = f"env=envpool and env.mode={self.mode} contradict each other"
            yield Problem(what, "use env.mode=native or env=gym")
        if self.wrappers and (self.mode == "native" or self.kind == "envpool"):
            yield Problem("env.wrappers wrap single envs, and a native engine has none", "use env=gym env.mode=serial")


@dataclass
class GymOptions(EnvOptions):  # single envs, which processes can step
    workers: int | None = apart_option(
        None, "worker processes that step the envs; null: as many as env.per_worker makes, with env.mode=parallel", ge=1
    )
    per_worker: int | str = apart_option(
        "auto", "envs per worker process; auto: one process per core", ge=1, words=("auto",)
    )
    caller_steps: str = apart_option(
        "auto",
        "the main process steps some of the envs too; auto: unless env.workers is set or failing workers are replaced",
        choices=("auto", "true", "false"),
    )
    start_method: str = apart_option(
        "auto", "how those processes are made; auto: forkserver on Linux, else spawn", choices=START_METHODS
    )

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.mode == "native" and self.kind == "gym" and self.id.startswith("ALE/"):
            what = f"env.mode=native would change the task {self.id}: its engine resizes frames and clips rewards"
            yield Problem(what, "use env=atari, or env.mode=serial")
        workers, each, some, how = self.workers, self.per_worker, self.caller_steps, self.start_method
        given = {"per_worker": each, "caller_steps": some, "start_method": how}
        for name in (name for name, value in given.items() if value != "auto"):
            if self.mode == "auto" and not workers:
                yield Problem(f"env.{name} needs worker processes, and there are none", "give env.mode=parallel")
        if workers and workers > self.num:
            yield Problem(f"env.workers={workers} are more than there are envs", f"use env.workers={self.num} at most")
        if workers and each != "auto":
            yield Problem("env.workers and env.per_worker both say how many processes there are", "give one of them")
        elif isinstance(each, int) and each > self.num:
            what = f"env.per_worker={each} are more than there are envs"
            yield Problem(what, f"use env.per_worker={self.num} at most")
        if some == "true" and (workers or 0) >= self.num:
            what = "env.caller_steps=true leaves the workers too few envs"
            yield Problem(what, f"use env.workers={self.num - 1} at most")


@dataclass
class AtariOptions(GymOptions):
    atari: AtariConfig = option(AtariConfig, "preprocessing of Atari frames")

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if not self.id.startswith("ALE/"):
            yield Problem(f"env=atari and env.id={self.id} contradict each other", "ids of Atari games begin with ALE/")


ENVS = {"gym": Part(GymOptions), "atari": Part(AtariOptions), "mujoco": Part(GymOptions), "envpool": Part(EnvOptions)}


# ---- policy ---------------------------------------------------------------------------------------------------------
@dataclass
class PolicyOptions(Group):
    """The network, or whatever else picks the actions. Layer input sizes follow from the env."""

    kind: str = option("auto", "which policy choice this is")
    init_from: str | None = train_option(
        None, "begin with the trained weights and normalisation of another run: RUN, RUN:FRAMES or RUN:best"
    )
    init_strict: bool = option(
        True, "layers of other shapes are refused; false: they keep their own weights",
        read_by=TRAIN | {"policy.init_from": (GIVEN,)},
    )  # fmt: skip
    kwargs: dict[str, Any] = option({}, "arguments for a registered policy of your own")


@dataclass
class MaskedOptions(PolicyOptions):
    action_mask_key: str | None = option(
        None,
        "the observation that says which actions are allowed; null: one called action_mask; none: there is none",
    )


@dataclass
class TrainedOptions(PolicyOptions):
    exploration: str = option(
        "random",
        "how actions are chosen while collecting; random: sampled from the policy",
        choices=("random", "mode", "mean", "deterministic"),
    )


@dataclass
class CheckpointOptions(TrainedOptions):
    path: str | None = option(None, "a run folder, RUN:FRAMES, RUN:best, or the folder of a checkpoint")


@dataclass
class UsersPolicyOptions(MaskedOptions, TrainedOptions):
    pass


@dataclass
class NetworkOptions(UsersPolicyOptions):
    hidden: list[int] | None = option(
        None,
        "units of each hidden layer; []: none, a linear network; null: [512] behind convolutions, else [64,64]",
        ge=1,
    )
    activation: str = option(
        "auto",
        "between layers; auto: relu behind convolutions, else tanh",
        choices=("auto", "tanh", "relu", "elu", "gelu", "silu", "leaky_relu"),
    )
    orthogonal: bool = option(True, "orthogonal initial weights, small for the last actor layer")
    distribution: str = option(
        "auto",
        "of the actions; auto: categorical for discrete spaces, normal for Box (clipped when executed)",
        choices=("auto", "categorical", "multi_categorical", "normal", "tanh_normal"),
    )
    dueling: bool = greedy_option(False, "dueling network: state value plus advantages")
    eps_init: float = greedy_option(1.0, "initial epsilon of epsilon-greedy exploration", ge=0, le=1)
    eps_end: float = greedy_option(0.05, "final epsilon", ge=0, le=1)
    eps_frames: int = greedy_option(10_000, "frames over which epsilon falls linearly", ge=1)
    shared: bool | None = valued_option(
        None, "one trunk for actor and critic instead of one each; null: where it has convolutions and hidden layers"
    )
    init_std: float = gradient_option(1.0, "initial standard deviation of continuous actions", gt=0)
    state_dependent_std: bool = gradient_option(
        False, "standard deviation as an output of the network, not a free parameter"
    )


@dataclass
class RecurrentOptions(NetworkOptions):
    recurrent_size: int = option(64, "units of the recurrent layer, which reads the last hidden one", ge=1)
    recurrent_layers: int = option(1, "recurrent layers on top of each other", ge=1, le=100)
    recurrent_backend: str = option(
        "auto",
        "implementation of sequences; auto: the fastest available",
        choices=("auto", "reference", "pad", "scan", "cpu", "triton"),
    )


POLICIES = {
    **dict.fromkeys(("mlp", "cnn", "dict"), Part(NetworkOptions)),
    **dict.fromkeys(("gru", "lstm"), Part(RecurrentOptions)),
    "auto": Part(NetworkOptions),
    "random": Part(MaskedOptions),
    "checkpoint": Part(CheckpointOptions),
    REGISTERED: Part(UsersPolicyOptions),
}
RECURRENT = {"policy": ("gru", "lstm")}
ACTING = {"policy": tuple(choice for choice, part in POLICIES.items() if issubclass(part.options, TrainedOptions))}


# ---- collector and weights ------------------------------------------------------------------------------------------
@dataclass
class WeightsConfig(Group):
    """How new weights reach the acting policy."""

    swap: str = train_option(
        "rollout",
        "when weights that are published while a batch is collected take effect: with the next batch, or the next "
        "step; collector=sync and multi_sync learn between batches, where both are the same",
        choices=("rollout", "step"),
    )
    max_lag: int | None = option(
        None, "weight versions that a batch may be behind when it is learned from", ge=0,
        read_by={"collector.sync": (False,)},
    )  # fmt: skip
    on_lag: str = option(
        "report",
        "batches that are further behind: count them; request fewer at a time, so that there are none; or drop them",
        choices=("report", "block", "drop"),
        read_by={"weights.max_lag": (GIVEN,)},
    )


@dataclass
class BatchOptions(Group):
    """How batches are collected."""

    kind: str = option("sync", "which collector choice this is")
    on_worker_error: str = option(
        "raise",
        "if a worker exits or its env raises: end the run, or restart the worker with new episodes",
        choices=("raise", "restart"),
    )
    frames_per_batch: int = option(
        2048, "frames in one batch, over all envs or (multi_async) those of one worker, rounded up to whole steps", ge=1
    )
    max_frames_per_traj: int | None = option(None, "truncate trajectories at this length", ge=1)
    reset_at_each_iter: bool = option(False, "reset every env when a batch begins")
    split_trajs: bool = option(False, "learn from each batch's trajectories side by side, padded (discouraged)")
    set_truncated: bool = option(False, "mark the last row of each batch as truncated")
    trajs_per_batch: int | None = option(
        None, "learn from whole trajectories only, so many at a time; null: from each batch as it is", ge=1
    )
    deliver_leftovers: bool = option(
        False, "learn from trajectories that the run's end or a reset cuts short too, as truncated",
        read_by={"collector.trajs_per_batch": (GIVEN,)},
    )  # fmt: skip
    track_traj_ids: bool = option(True, "number the trajectories")
    init_random_frames: int = option(0, "frames taken with random actions first", ge=0, read_by=ACTING)


@dataclass
class AsyncOptions(BatchOptions):
    start_method: str = option(
        "auto", "how those processes are made; auto: forkserver on Linux, else spawn", choices=START_METHODS
    )


@dataclass
class WorkersOptions(BatchOptions):
    num_workers: int | str = option(
        "auto",
        "workers that collect; auto: as many as there are free cores here, or ranks of torchrun",
        ge=1,
        words=("auto",),
    )


@dataclass
class MultiAsyncOptions(AsyncOptions, WorkersOptions):
    pass


@dataclass
class MultiSyncOptions(MultiAsyncOptions):
    preemptive_threshold: float | None = option(
        None, "fraction of the workers after which the others cut their batch short; null: wait for all", ge=0, le=1
    )


@dataclass
class ElsewhereOptions(WorkersOptions):
    sync: bool = option(True, "one batch of all workers, as multi_sync; false: each worker's, as multi_async")
    timeout: float = option(120.0, "seconds for the cluster to have room, or for all workers to come", gt=0)


@dataclass
class RayOptions(ElsewhereOptions):
    address: str | None = typed_option(
        None, "host:port of a Ray cluster; null: RAY_ADDRESS, and without it a new one on this machine"
    )
    resources: dict[str, Any] = option({"CPU": 1}, "what each worker takes of the cluster")


@dataclass
class DistributedOptions(ElsewhereOptions):
    backend: str = option("gloo", "backend of torch.distributed", choices=("gloo", "nccl", "mpi"))
    launcher: str = typed_option(
        "mp", "who starts the workers: see rlcli help clusters",
        choices=("mp", "torchrun", "submitit", "submitit_delayed"),
    )  # fmt: skip
    slurm: dict[str, Any] = option(
        {}, "its options of sbatch; folder, which all nodes see", typed=True,
        read_by={"collector.launcher": ("submitit",)},
    )  # fmt: skip

    def problems(self) -> Iterator[Problem]:
        if self.on_worker_error == "restart":
            what = "collector.on_worker_error=restart cannot replace a rank of a group"
            yield Problem(what, "use collector=ray, or leave it out")


COLLECTORS = {
    "sync": Part(BatchOptions), "multi_sync": Part(MultiSyncOptions), "multi_async": Part(MultiAsyncOptions),
    "async": Part(AsyncOptions), "ray": Part(RayOptions), "distributed": Part(DistributedOptions),
}  # fmt: skip


# ---- memory ---------------------------------------------------------------------------------------------------------
@dataclass
class MemoryOptions(Group):
    """How the next observation is stored, and what else is."""

    kind: str = option("exact", "which memory choice this is")
    keep: list[Any] = option([], "extra policy outputs to keep in the batch, by key, e.g. logits")
    next_obs: str = option(
        "exact",
        "full: stored twice; compact: dropped; exact: only where the next row does not hold it; "
        "delta: its difference, rounded",
        choices=("full", "compact", "exact", "delta"),
    )
    recurrent_state_stride: int | str = option(
        "auto",
        "recurrent states are stored in the first row of every episode and batch, and in every n-th row of an episode; "
        "auto: 16 where a policy gradient samples slices, 1 with another loss, sampler.slice_len with "
        "sampler=minibatch (null: first rows only)",
        ge=1, words=("auto",), read_by=RECURRENT)  # fmt: skip
    recurrent_recompute: bool = option(
        False,
        "recompute the gates of a recurrent layer in the backward pass instead of storing them",
        read_by=RECURRENT,
    )
    compress: bool = option(False, "compress images with lz4", read_by=COLLECT)

    def problems(self) -> Iterator[Problem]:
        if self.kind != self.next_obs:
            what = f"memory={self.kind} and memory.next_obs={self.next_obs} contradict each other"
            yield Problem(what, f"choose one: memory={self.kind} or memory={self.next_obs}")
        for entry in self.keep:
            parts = entry if isinstance(entry, list) and entry else [entry]
            if not all(isinstance(part, str) and part for part in parts):
                yield Problem(f"memory.keep holds {entry!r}, which is not a key", "write memory.keep=[logits,[a,b]]")


@dataclass
class CompactOptions(MemoryOptions):
    fill_value: float | None = option(
        None,
        "value read where no next observation is stored; null: NaN, which integers lack",
        read_by=COLLECT,
    )


@dataclass
class ExactOptions(MemoryOptions):
    frame_stack: str = option(
        "auto",
        "stacks of env.frame_stack in a buffer: auto stores one frame a row where next_obs=exact, and puts stacks "
        "together when they are read; whole stores stacks",
        choices=("auto", "whole"),
        read_by=STORED | {"env.frame_stack": (GIVEN,)},
    )


@dataclass
class DeltaOptions(MemoryOptions):
    delta_dtype: str = option(
        "float16",
        "dtype of differences; bfloat16 and int8 cannot overflow",
        choices=("float16", "bfloat16", "int8"),
    )
    on_overflow: str = option(
        "raise",
        "a difference too large for delta_dtype: end the run, or store that next observation in full",
        choices=("raise", "keep"),
    )


MEMORIES = {
    "full": Part(MemoryOptions), "compact": Part(CompactOptions), "exact": Part(ExactOptions),
    "delta": Part(DeltaOptions),
}  # fmt: skip


# ---- device, logger, console, run -----------------------------------------------------------------------------------
@dataclass
class DeviceConfig(Group):
    """Where things live. `split` steps envs on the CPU and acts and learns on the accelerator."""

    kind: str = option("auto", "which device choice this is", choices=("auto", "cpu", "cuda", "mps", "split"))
    env_device: str | None = option(None, _DEVICE.format("env outputs"))
    policy_device: str | None = option(None, _DEVICE.format("acting"))
    storing_device: str | None = option(None, _DEVICE.format("the batch"))
    train_device: str | None = train_option(None, _DEVICE.format("learning"))
    no_cuda_sync: bool = option(False, "do not wait for copies between host and device")
    graphs: str = option("auto", "record and replay a GPU's work; require: or fail", choices=("auto", "off", "require"))


@dataclass
class LoggerConfig(Group):
    """Where metrics go in addition to `metrics.jsonl`, which is always written."""

    kind: str = option("auto", "auto: tensorboard when it is installed")
    kwargs: dict[str, Any] = option({}, "arguments for a registered logger of your own")


LOGGERS = {
    "auto": Part(LoggerConfig),
    "none": Part(LoggerConfig),
    "tensorboard": Part(LoggerConfig, "rlcli.report.events:EventsWriter"),
}


@dataclass
class ConsoleConfig(Group):
    """What the terminal shows while a run is going."""

    kind: str = option("auto", "auto: live on a terminal, else plain lines", choices=("auto", "live", "plain", "off"))


@dataclass
class RunConfig(Group):
    """The run folder, checkpoints, and evaluation along the way."""

    checkpoint_every: int = train_option(50_000, "frames between checkpoints", ge=1)
    checkpoint_minutes: float | None = train_option(5.0, "minutes between checkpoints; null: by frames alone", gt=0)
    keep: int = train_option(2, "checkpoints kept", ge=2)
    keep_best: bool = train_option(False, "keep the weights of the best evaluation, too: RUN:best")
    eval_every: int | None = train_option(None, "frames between evaluations; null never evaluates", ge=1)
    eval_episodes: int = train_option(20, "episodes of an evaluation; 0: no evaluation at the end", ge=0)
    eval_envs: int | None = train_option(
        None,
        "envs of an evaluation, each for one episode after another; null: env.num, or in processes one a core if that "
        "is more, 32 at most",
        ge=1,
    )
    eval_max_steps: int | None = train_option(
        None, "steps after which an evaluation cuts an episode off; null: total_frames / 4, from 1,000 to 30,000", ge=1
    )
    dir: str | None = option(None, "folder of the run; null: runs/<verb>/<recipe, or env>/<date>_<time>_s<seed>")
    max_replay_steps: int = option(10_000, "longest open episode that a resume replays", ge=0)

    def problems(self) -> Iterator[Problem]:
        if self.eval_every is not None and not self.eval_episodes:
            yield Problem("run.eval_every needs run.eval_episodes >= 1", "leave out run.eval_episodes=0")
        if self.dir is not None and not self.dir.isprintable():
            yield Problem(f"run.dir={self.dir!r} holds a character that cannot be printed", "choose a plain name")
        if self.dir == "":
            yield Problem("run.dir is empty", "name a folder, or leave it out")


@dataclass
class SweepConfig(Group):
    """How the jobs of a sweep (`-m`) run; no part of a run."""

    jobs: int | str = option(1, "jobs at a time, each in a process; auto: as many as cores", ge=1, words=("auto",))
    fail_fast: bool = option(False, "a job that fails stops the sweep; those that run are saved")
    launcher: str = typed_option(
        "here", "here: in processes of this machine; slurm: one array of jobs, submitted", choices=("here", "slurm")
    )
    slurm: dict[str, Any] = option(
        {}, "launcher=slurm: options of sbatch, {partition: gpu, time: '8:00:00'}", typed=True
    )


# ---- all of it ------------------------------------------------------------------------------------------------------
@dataclass
class CollectConfig:
    """Everything `rlcli collect` reads."""

    seed: int = option(0, "every random number of the run derives from it", ge=0, le=2**32 - 1)
    total_frames: int = option(100_000, "frames to collect, exact to one step of all envs", ge=1, le=10**15)
    threads: int | str = option("auto", "threads of one torch operation", ge=1, le=1024, words=("auto",))
    recipe: str | None = option(None, "the recipe this run follows")
    env: EnvOptions = option(GymOptions, "the environment", parts=ENVS)
    policy: PolicyOptions = option(NetworkOptions, "the policy", parts=POLICIES)
    collector: BatchOptions = option(BatchOptions, "how batches are collected", parts=COLLECTORS)
    weights: WeightsConfig = option(
        WeightsConfig,
        "how new weights reach the acting policy",
        read_by={"collector": ("multi_async", "async", "ray", "distributed")},
    )
    memory: MemoryOptions = option(ExactOptions, "how the next observation is stored", parts=MEMORIES)
    device: DeviceConfig = option(DeviceConfig, "devices")
    logger: LoggerConfig = option(LoggerConfig, "where metrics go", parts=LOGGERS)
    console: ConsoleConfig = option(ConsoleConfig, "what the terminal shows")
    run: RunConfig = option(RunConfig, "folder, checkpoints, evaluation")
    sweep: SweepConfig = option(SweepConfig, "jobs of a sweep")
