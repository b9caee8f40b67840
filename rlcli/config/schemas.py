"""The whole tree: a dataclass for each group, and one for each verb that runs a job, in the order of `--help`.

`Config` is what `rlcli train` composes and `CollectConfig` what `rlcli collect` does; the rest of the program sees
instances of these and nothing of Hydra. A train config is a collect config with more in it. Which choices read an
option stands in `rlcli.config.parts`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlcli.config import registry
from rlcli.config.option import branches, find, option
from rlcli.config.parts import choices

_IN_PROCESSES = {"env.mode": ("auto", "parallel")}
_START_METHODS = ("auto", "forkserver", "spawn", "fork")


@dataclass
class AtariConfig:
    """Frames of the Atari screen before the policy sees them (read by `env=atari` only)."""

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
class EnvConfig:
    """The environment, its wrappers, and how many of it are stepped together."""

    kind: str = option("gym", "which env choice this is", choices=choices("env"))
    id: str = option("CartPole-v1", "gymnasium id, or a name from the registry")
    num: int = option(8, "environments stepped together (sub-environments)", ge=1, le=1_000_000)
    mode: str = option(
        "auto",
        "serial: one by one; parallel: in processes; native: the env's own vector engine; auto: the engine where it is "
        "faster and resumes exactly, else processes where a trial run of the env shows that they are",
        choices=("auto", "serial", "parallel", "native"),
    )
    workers: int | None = option(
        None,
        "worker processes that step the envs; null: as many as env.per_worker makes, with env.mode=parallel",
        ge=1,
        when=_IN_PROCESSES,
    )
    per_worker: int | str = option(
        "auto", "envs per worker process; auto: one process per core", ge=1, words=("auto",),
        when=_IN_PROCESSES)  # fmt: skip
    caller_steps: str = option(
        "auto",
        "the main process steps some of the envs too; auto: unless env.workers is set or failing workers are replaced",
        choices=("auto", "true", "false"),
        when=_IN_PROCESSES,
    )
    start_method: str = option(
        "auto",
        "how those processes are made; auto: forkserver on Linux, else spawn",
        choices=_START_METHODS,
        when=_IN_PROCESSES,
    )
    kwargs: dict[str, Any] = option(
        {},
        "arguments for gymnasium.make, added to those that a recipe gives; {}: none of them. In a text, {index} is the "
        "number of the env, from 0; {5005+index} a port of its own",
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
    atari: AtariConfig = option(AtariConfig, "preprocessing of Atari frames")


@dataclass
class PolicyConfig:
    """The network, or whatever else picks the actions. Layer input sizes follow from the env."""

    kind: str = option("auto", "which policy choice this is", choices=choices("policy"))
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
    shared: bool | None = option(
        None,
        "one trunk for actor and critic instead of one each; null: where it has convolutions and hidden layers",
    )
    recurrent_size: int = option(64, "units of the recurrent layer, which reads the last hidden one", ge=1)
    recurrent_layers: int = option(1, "recurrent layers on top of each other", ge=1, le=100)
    recurrent_backend: str = option(
        "auto",
        "implementation of sequences; auto: the fastest available",
        choices=("auto", "reference", "pad", "scan", "cpu", "triton"),
    )
    orthogonal: bool = option(True, "orthogonal initial weights, small for the last actor layer")
    distribution: str = option(
        "auto",
        "of the actions; auto: categorical for discrete spaces, normal for Box (clipped when executed)",
        choices=("auto", "categorical", "multi_categorical", "normal", "tanh_normal"),
    )
    init_std: float = option(1.0, "initial standard deviation of continuous actions", gt=0)
    state_dependent_std: bool = option(False, "standard deviation as an output of the network, not a free parameter")
    dueling: bool = option(False, "dueling network: state value plus advantages")
    eps_init: float = option(1.0, "initial epsilon of epsilon-greedy exploration", ge=0, le=1)
    eps_end: float = option(0.05, "final epsilon", ge=0, le=1)
    eps_frames: int = option(10_000, "frames over which epsilon falls linearly", ge=1)
    exploration: str = option(
        "random",
        "how actions are chosen while collecting; random: sampled from the policy",
        choices=("random", "mode", "mean", "deterministic"),
    )
    action_mask_key: str | None = option(
        None,
        "the observation that says which actions are allowed; null: one called action_mask; none: there is none",
    )
    path: str | None = option(None, "a run folder, RUN:FRAMES, RUN:best, or the folder of a checkpoint")
    init_from: str | None = option(
        None,
        "begin with the trained weights and normalisation of another run: RUN, RUN:FRAMES or RUN:best",
    )
    init_strict: bool = option(
        True, "init_from: layers of other shapes are refused; false: they keep their own weights"
    )
    kwargs: dict[str, Any] = option({}, "arguments for a registered policy of your own")


@dataclass
class CollectorConfig:
    """How batches are collected."""

    kind: str = option("sync", "which collector choice this is", choices=choices("collector"))
    num_workers: int | str = option(
        "auto", "worker processes that collect; auto: as many as there are free cores",
        ge=1, words=("auto",))  # fmt: skip
    start_method: str = option(
        "auto",
        "how those processes are made; auto: forkserver on Linux, else spawn",
        choices=_START_METHODS,
    )
    on_worker_error: str = option(
        "raise",
        "if a worker exits or its env raises: end the run, or restart the worker with new episodes",
        choices=("raise", "restart"),
    )
    preemptive_threshold: float | None = option(
        None,
        "fraction of the workers after which the others cut their batch short; null: wait for all",
        ge=0, le=1,
    )  # fmt: skip
    frames_per_batch: int = option(
        2048, "frames in one batch, over all envs or (multi_async) those of one worker, rounded up to whole steps", ge=1
    )
    max_frames_per_traj: int | None = option(None, "truncate trajectories at this length", ge=1)
    init_random_frames: int = option(0, "frames taken with random actions first", ge=0)
    reset_at_each_iter: bool = option(False, "reset every env when a batch begins")
    split_trajs: bool = option(False, "learn from each batch's trajectories side by side, padded (discouraged)")
    set_truncated: bool = option(False, "mark the last row of each batch as truncated")
    trajs_per_batch: int | None = option(
        None, "learn from whole trajectories only, so many at a time; null: from each batch as it is", ge=1
    )
    deliver_leftovers: bool = option(
        False, "trajs_per_batch: learn from trajectories that the run's end or a reset cuts short too, as truncated"
    )
    track_traj_ids: bool = option(True, "number the trajectories")


@dataclass
class WeightsConfig:
    """How new weights reach the acting policy."""

    swap: str = option(
        "rollout",
        "when weights that are published while a batch is collected take effect: with the next batch, or the next "
        "step; collector=sync and multi_sync learn between batches, where both are the same",
        choices=("rollout", "step"),
    )
    max_lag: int | None = option(None, "weight versions that a batch may be behind when it is learned from", ge=0)
    on_lag: str = option(
        "report",
        "batches that are further behind: count them; request fewer at a time, so that there are none; or drop them",
        choices=("report", "block", "drop"),
    )


@dataclass
class MemoryConfig:
    """How the next observation is stored, and what else is."""

    kind: str = option("exact", "which memory choice this is", choices=choices("memory"))
    next_obs: str = option(
        "exact",
        "full: stored twice; compact: dropped; exact: only where the next row does not hold it; "
        "delta: its difference, rounded",
        choices=choices("memory"),
    )
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
    fill_value: float | None = option(
        None,
        "value read where no next observation is stored; null: NaN, which integers lack",
    )
    frame_stack: str = option(
        "auto",
        "stacks of env.frame_stack in a buffer: auto stores one frame a row where next_obs=exact, and puts stacks "
        "together when they are read; whole stores stacks",
        choices=("auto", "whole"),
    )
    recurrent_state_stride: int | str = option(
        "auto",
        "recurrent states are stored in the first row of every episode and batch, and in every n-th row of an episode; "
        "auto: 16 where a policy gradient samples slices, 1 with another loss, sampler.slice_len with "
        "sampler=minibatch (null: first rows only)",
        ge=1, words=("auto",),
    )  # fmt: skip
    recurrent_recompute: bool = option(
        False, "recompute the gates of a recurrent layer in the backward pass instead of storing them"
    )
    keep: list[Any] = option([], "extra policy outputs to keep in the batch, by key, e.g. logits")
    compress: bool = option(False, "compress images with lz4")


@dataclass
class StorageConfig:
    """Where rows are kept between collecting and learning. On-policy runs need none."""

    kind: str = option(
        "none",
        "tensor: in memory; memmap: on disk; compressed: in memory, images compressed",
        choices=choices("storage"),
    )
    max_size: int = option(1_000_000, "rows, the oldest overwritten first", ge=1)
    ndim: int = option(1, "batch dims that are stored: 2 stores envs side by side", ge=1, le=2)
    scratch_dir: str | None = option(None, "folder for its files, one subfolder per run; null: the run folder")
    codes: bool = option(True, "store flags and small integers in a few bits each, losslessly")
    init_from: str | None = option(
        None, "rows to begin with: a run of rlcli collect, another run with a buffer, or a folder that holds one"
    )
    kwargs: dict[str, Any] = option({}, "arguments for a registered storage of your own")


_BY_PRIORITY: dict[str, tuple[str, ...]] = {"sampler.kind": ("prioritized", "prioritized_slice")}


@dataclass
class SamplerConfig:
    """How rows are sampled for an update."""

    kind: str = option(
        "minibatch",
        "minibatch: a batch reshuffled every epoch; random, prioritized: rows of a storage; slice, prioritized_slice: "
        "parts of its trajectories",
        choices=choices("sampler"),
    )
    batch_size: int = option(64, "rows per gradient update", ge=1)
    slice_len: int | None = option(
        None,
        "rows of a slice, at most; null: batch_size / num_slices, or with sampler=minibatch the whole sequences of a "
        "recurrent policy",
        ge=1,
    )
    num_slices: int | None = option(None, "slices of a sample; null: batch_size / slice_len", ge=1)
    strict_length: bool = option(False, "only trajectories of at least slice_len rows; false: shorter ones too")
    span: bool = option(
        False,
        "slices reach over the ends of trajectories and are cut there; every row is equally likely",
    )
    weighting: str = option(
        "transition",
        "a trajectory's chance is in proportion to its rows (transition), or the same for all (trajectory)",
        choices=("transition", "trajectory"),
    )
    burn_in: int = option(0, "extra rows before a slice that only warm up the state of a recurrent policy", ge=0)
    alpha: float = option(0.6, "exponent of the priorities", ge=0)
    beta: float = option(0.4, "importance-sampling exponent at the start; rises to 1", ge=0, le=1)
    beta_frames: int = option(100_000, "frames over which beta rises to 1, linearly", ge=1, when=_BY_PRIORITY)
    kwargs: dict[str, Any] = option({}, "arguments for a registered sampler of your own")


_DEVICE = "device for {}; null follows the choice of `device`"


@dataclass
class DeviceConfig:
    """Where things live. `split` steps envs on the CPU and acts and learns on the accelerator."""

    kind: str = option("auto", "which device choice this is", choices=("auto", "cpu", "cuda", "mps", "split"))
    env_device: str | None = option(None, _DEVICE.format("env outputs"))
    policy_device: str | None = option(None, _DEVICE.format("acting"))
    storing_device: str | None = option(None, _DEVICE.format("the batch"))
    train_device: str | None = option(None, _DEVICE.format("learning"))
    no_cuda_sync: bool = option(False, "do not wait for copies between host and device")


@dataclass
class ValueConfig:
    """Advantages and value targets."""

    kind: str = option("gae", "which estimator choice this is", choices=choices("value"))
    gamma: float = option(0.99, "discount per step", ge=0, le=1)
    lmbda: float = option(0.95, "lambda of GAE and TD(lambda): 0 is one-step, 1 Monte Carlo", ge=0, le=1)
    average: bool = option(True, "normalise advantages to mean 0, standard deviation 1")
    average_over: str = option(
        "minibatch",
        "rows that advantages are normalised over",
        choices=("batch", "minibatch"),
        when={"value.average": (True,)},
    )
    shifted: bool = option(
        False, "one value network call for observations and next observations; stores no next observations"
    )
    shifted_budget: int = option(
        1,
        "shifted: room for so many extra next observations per env and batch",
        ge=1,
        when={"value.shifted": (True,)},
    )
    normaliser: str = option("none", "normalise value targets", choices=("none", "running", "popart"))
    rho_thresh: float = option(1.0, "upper limit of a step's importance weight", gt=0)
    c_thresh: float = option(1.0, "upper limit of the weight that is carried through a step", gt=0)
    two_calls: bool = option(False, "value net on observations and on next observations, one call each")
    num_chunks: int | None = option(None, "call the value net on so many parts of a batch: less memory", ge=1)
    value_chunk_size: int | None = option(None, "the same by size: envs, or rows of a flat batch, in a part", ge=1)
    compute_dtype: str = option(
        "float32",
        "precision the value net is called in for estimates",
        choices=("float32", "bfloat16", "float16"),
    )
    backend: str = option("auto", "implementation of the recursion", choices=("auto", "reference", "cpu", "triton"))
    kwargs: dict[str, Any] = option({}, "arguments for a registered estimator of your own")


@dataclass
class LossConfig:
    """What is minimised: a policy gradient with its value and entropy terms, DQN's or SAC's losses."""

    kind: str = option("ppo_clip", "which loss choice this is", choices=choices("loss"))
    clip_epsilon: float = option(0.2, "clip range of the probability ratio", gt=0, lt=1)
    anneal_clip: bool = option(False, "lower clip_epsilon to 0 over total_frames")
    clip_value: float | None = option(None, "clip range of value changes", gt=0)
    entropy_coeff: float | int | str = option(
        "auto", "weight of the entropy bonus; auto: 0 for Box actions, otherwise 0.01", ge=0, words=("auto",)
    )
    critic_coeff: float = option(0.5, "weight of the value loss", ge=0, when={"loss.baseline": (True,)})
    target_kl: float | None = option(None, "stop the epochs of a batch once the mean KL divergence exceeds this", gt=0)
    kl_target: float = option(0.01, "target KL divergence per batch", gt=0)
    kl_coeff: float = option(1.0, "initial weight of the KL penalty", ge=0)
    baseline: bool = option(True, "subtract a learned state value from returns")
    distance: str = option("smooth_l1", "loss between a value and its target", choices=("smooth_l1", "l2", "l1"))
    double: bool = option(
        False, "double DQN: the online network chooses the next action, the target network evaluates it"
    )
    start_state: str = option(
        "stored", "the state that slices begin from, of a recurrent policy", choices=("stored", "zero")
    )
    n_steps: int = option(1, "steps of n-step returns", ge=1)
    tau: float = option(1.0, "Polyak coefficient of the target networks (1: copy)", gt=0, le=1)
    target_every: int = option(1, "gradient updates between two updates of the target networks", ge=1)
    alpha: float | int | str = option("auto", "entropy coefficient (temperature); auto: learned", gt=0, words=("auto",))
    alpha_init: float = option(1.0, "initial value of a learned alpha", gt=0, when={"loss.alpha": ("auto",)})
    target_entropy: float | int | str = option(
        "auto", "target entropy of a learned alpha; auto: minus the number of action dims",
        words=("auto",), when={"loss.alpha": ("auto",)})  # fmt: skip
    kwargs: dict[str, Any] = option({}, "arguments for a registered algorithm of your own")


@dataclass
class OptimConfig:
    """How gradients become weights."""

    kind: str = option("adam", "which optimizer choice this is", choices=choices("optim"))
    lr: float = option(3e-4, "learning rate", gt=0)
    anneal_lr: bool = option(False, "lower the learning rate to 0 over total_frames")
    epochs: int = option(10, "passes over each batch; with sampler=slice as many rows are drawn", ge=1)
    updates_per_frame: float = option(1.0, "gradient updates per collected frame", gt=0)
    max_grad_norm: float | None = option(0.5, "clip the gradient norm at this; null: no clipping", gt=0)
    eps: float = option(1e-5, "epsilon in the denominator", gt=0)
    betas: list[float] = option([0.9, 0.999], "decay rates of the two moments", ge=0, lt=1)
    weight_decay: float = option(0.0, "weight decay", ge=0)
    momentum: float = option(0.0, "momentum", ge=0, lt=1)
    alpha: float = option(0.99, "smoothing constant of RMSprop", ge=0, lt=1)
    compile: bool = option(False, "torch.compile the update")


@dataclass
class LoggerConfig:
    """Where metrics go in addition to `metrics.jsonl`, which is always written."""

    kind: str = option("auto", "auto: tensorboard when it is installed", choices=choices("logger"))
    kwargs: dict[str, Any] = option({}, "arguments for a registered logger of your own")


@dataclass
class ConsoleConfig:
    """What the terminal shows while a run is going."""

    kind: str = option("auto", "auto: live on a terminal, else plain lines", choices=("auto", "live", "plain", "off"))


@dataclass
class RunConfig:
    """The run folder, checkpoints, and evaluation along the way."""

    dir: str | None = option(None, "folder of the run; null: runs/<verb>/<recipe, or env>/<date>_<time>_s<seed>")
    checkpoint_every: int = option(50_000, "frames between checkpoints", ge=1)
    checkpoint_minutes: float | None = option(5.0, "minutes between checkpoints; null: by frames alone", gt=0)
    keep: int = option(2, "checkpoints kept", ge=2)
    keep_best: bool = option(False, "keep the weights of the best evaluation, too: RUN:best")
    max_replay_steps: int = option(10_000, "longest open episode that a resume replays", ge=0)
    eval_every: int | None = option(None, "frames between evaluations; null never evaluates", ge=1)
    eval_episodes: int = option(20, "episodes of an evaluation; 0: no evaluation at the end", ge=0)
    eval_envs: int | None = option(
        None, "envs of an evaluation, each for one episode after another; null: env.num, 32 at most", ge=1
    )
    eval_max_steps: int | None = option(
        None,
        "steps after which an evaluation cuts an episode off; null: total_frames / 4, from 1,000 to 30,000",
        ge=1,
    )


@dataclass
class CollectConfig:
    """Everything `rlcli collect` reads."""

    seed: int = option(0, "every random number of the run derives from it", ge=0, le=2**32 - 1)
    total_frames: int = option(100_000, "frames to collect, exact to one step of all envs", ge=1, le=10**15)
    threads: int | str = option("auto", "threads of one torch operation", ge=1, le=1024, words=("auto",))
    recipe: str | None = option(None, "the recipe this run follows")
    env: EnvConfig = option(EnvConfig, "the environment")
    policy: PolicyConfig = option(PolicyConfig, "the policy")
    collector: CollectorConfig = option(CollectorConfig, "how batches are collected")
    weights: WeightsConfig = option(WeightsConfig, "how new weights reach the acting policy")
    memory: MemoryConfig = option(MemoryConfig, "how the next observation is stored")
    device: DeviceConfig = option(DeviceConfig, "devices")
    logger: LoggerConfig = option(LoggerConfig, "where metrics go")
    console: ConsoleConfig = option(ConsoleConfig, "what the terminal shows")
    run: RunConfig = option(RunConfig, "folder, checkpoints, evaluation")


@dataclass
class Config(CollectConfig):
    """Everything `rlcli train` reads: what collecting reads, and how batches become better weights."""

    storage: StorageConfig = option(StorageConfig, "replay storage")
    sampler: SamplerConfig = option(SamplerConfig, "how updates sample rows")
    value: ValueConfig = option(ValueConfig, "advantages")
    loss: LossConfig = option(LossConfig, "loss and algorithm")
    optim: OptimConfig = option(OptimConfig, "optimizer")


def is_off_policy(cfg: Config) -> bool:
    """Whether the run learns from stored rows, whoever collected them."""
    return registry.part("algorithm", cfg.loss.kind).off_policy


def draws(cfg: Config) -> str:
    """What the sampler draws: parts of the "batch" that was just collected, stored "rows", or "slices" of them."""
    return registry.part("sampler", cfg.sampler.kind).draws


def draws_slices(cfg: Config) -> bool:
    """Whether a policy gradient learns from slices of stored rows."""
    return not is_off_policy(cfg) and draws(cfg) == "slices"


def remembers(cfg: CollectConfig) -> bool:
    """Whether the policy is one of ours with a recurrent layer."""
    return "policy.recurrent_size" in registry.part("policy", cfg.policy.kind).uses


def convolves(cfg: CollectConfig) -> bool:
    """Whether the policy looks at pictures, as its name says: `device=auto` learns on a GPU then."""
    return cfg.policy.kind == "cnn" or (cfg.policy.kind == "auto" and cfg.env.kind == "atari")


def by_priority(cfg: Config) -> bool:
    """Whether errors say which stored rows are drawn."""
    return "sampler.beta" in registry.part("sampler", cfg.sampler.kind).uses


VERBS: dict[str, type[Any]] = {"train": Config, "collect": CollectConfig}


def verbs_with(key: str) -> list[str]:
    """The verbs whose configuration knows a key or group."""
    return [verb for verb, schema in VERBS.items() if find(schema, key) or key in branches(schema)]
