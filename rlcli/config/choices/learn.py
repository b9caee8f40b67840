"""What `rlcli train` reads besides, and its tree: where rows are kept and how they are drawn, what is minimised by what
estimates, and how gradients become weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlcli.config.choices import BOOTSTRAPPED, GRADIENTS, STORED
from rlcli.config.choices.collect import CollectConfig
from rlcli.config.option import Group, option
from rlcli.config.problem import Problem

PRIORITIES = {"sampler": ("prioritized", "prioritized_slice")}
SLICES = {"sampler": ("slice", "prioritized_slice")}


# ---- rows -----------------------------------------------------------------------------------------------------------
@dataclass
class StorageConfig(Group):
    """Where rows are kept between collecting and learning. On-policy runs need none."""

    kind: str = option("none", "tensor: in memory; memmap: on disk; compressed: in memory, images compressed")
    init_from: str | None = option(
        None, "rows to begin with: a run of rlcli collect, another run with a buffer, or a folder that holds one"
    )
    max_size: int = option(1_000_000, "rows, the oldest overwritten first", ge=1, read_by=STORED)
    ndim: int = option(1, "batch dims that are stored: 2 stores envs side by side", ge=1, le=2, read_by=STORED)
    codes: bool = option(True, "store flags and small integers in a few bits each, losslessly", read_by=STORED)
    scratch_dir: str | None = option(
        None, "folder for its files, one subfolder per run; null: the run folder", read_by={"storage": ("memmap",)}
    )
    kwargs: dict[str, Any] = option({}, "arguments for a registered storage of your own")


@dataclass
class SamplerConfig(Group):
    """How rows are sampled for an update."""

    kind: str = option(
        "minibatch",
        "minibatch: a batch reshuffled every epoch; random, prioritized: rows of a storage; slice, prioritized_slice: "
        "parts of its trajectories",
    )
    batch_size: int = option(64, "rows per gradient update", ge=1)
    alpha: float = option(0.6, "exponent of the priorities", ge=0, read_by=PRIORITIES)
    beta: float = option(0.4, "importance-sampling exponent at the start; rises to 1", ge=0, le=1, read_by=PRIORITIES)
    beta_frames: int = option(100_000, "frames over which beta rises to 1, linearly", ge=1, read_by=PRIORITIES)
    slice_len: int | None = option(
        None,
        "rows of a slice, at most; null: batch_size / num_slices, or with sampler=minibatch the whole sequences of a "
        "recurrent policy",
        ge=1,
        read_by={"sampler": ("minibatch", "slice", "prioritized_slice")},
    )
    num_slices: int | None = option(None, "slices of a sample; null: batch_size / slice_len", ge=1, read_by=SLICES)
    strict_length: bool = option(
        False, "only trajectories of at least slice_len rows; false: shorter ones too", read_by=SLICES
    )
    burn_in: int = option(
        0, "extra rows before a slice that only warm up the state of a recurrent policy", ge=0, read_by=SLICES
    )
    span: bool = option(
        False,
        "slices reach over the ends of trajectories and are cut there; every row is equally likely",
        read_by={"sampler": ("slice",)},
    )
    weighting: str = option(
        "transition",
        "a trajectory's chance is in proportion to its rows (transition), or the same for all (trajectory)",
        choices=("transition", "trajectory"),
        read_by={"sampler": ("slice",)},
    )
    kwargs: dict[str, Any] = option({}, "arguments for a registered sampler of your own")

    def problems(self) -> Iterator[Problem]:
        if self.kind not in SLICES["sampler"]:
            return
        length, number, rows = self.slice_len or 0, self.num_slices or 0, self.batch_size
        if not length and not number:
            what = f"sampler={self.kind} needs sampler.slice_len or sampler.num_slices"
            yield Problem(what, "give one of them")
        elif length and number and length * number != rows:
            what = f"sampler.num_slices={number} of sampler.slice_len={length} are not sampler.batch_size={rows} rows"
            yield Problem(what, f"use sampler.batch_size={length * number}, or give one of the two")
        elif rows % (each := length or number):
            what = (
                f"sampler.batch_size={rows} is no multiple of sampler.{'slice_len' if length else 'num_slices'}={each}"
            )
            yield Problem(what, f"use sampler.batch_size={max(1, rows // each) * each}")
        if self.kind == "slice" and self.span and self.strict_length:
            what = "sampler.span cuts slices at the ends of trajectories, sampler.strict_length wants whole ones"
            yield Problem(what, "give one of them")


# ---- losses ---------------------------------------------------------------------------------------------------------
@dataclass
class ValueConfig(Group):
    """Advantages and value targets."""

    kind: str = option("gae", "which estimator choice this is", read_by=GRADIENTS)
    average: bool = option(True, "normalise advantages to mean 0, standard deviation 1", read_by=GRADIENTS)
    average_over: str = option(
        "minibatch", "rows that advantages are normalised over", choices=("batch", "minibatch"), read_by=GRADIENTS
    )
    shifted: bool = option(
        False,
        "one value network call for observations and next observations; stores no next observations",
        read_by=GRADIENTS,
    )
    shifted_budget: int = option(
        1, "shifted: room for so many extra next observations per env and batch", ge=1, read_by=GRADIENTS
    )
    normaliser: str = option(
        "none", "normalise value targets", choices=("none", "running", "popart"), read_by=GRADIENTS
    )
    two_calls: bool = option(
        False, "value net on observations and on next observations, one call each", read_by=GRADIENTS
    )
    num_chunks: int | None = option(
        None, "call the value net on so many parts of a batch: less memory", ge=1, read_by=GRADIENTS
    )
    value_chunk_size: int | None = option(
        None, "the same by size: envs, or rows of a flat batch, in a part", ge=1, read_by=GRADIENTS
    )
    compute_dtype: str = option(
        "float32",
        "precision the value net is called in for estimates",
        choices=("float32", "bfloat16", "float16"),
        read_by=GRADIENTS,
    )
    backend: str = option(
        "auto", "implementation of the recursion", choices=("auto", "reference", "cpu", "triton"), read_by=GRADIENTS
    )
    gamma: float = option(0.99, "discount per step", ge=0, le=1)
    lmbda: float = option(
        0.95,
        "lambda of GAE and TD(lambda): 0 is one-step, 1 Monte Carlo",
        ge=0,
        le=1,
        read_by=GRADIENTS | {"value": ("gae", "td_lambda")},
    )
    rho_thresh: float = option(
        1.0, "upper limit of a step's importance weight", gt=0, read_by=GRADIENTS | {"value": ("vtrace",)}
    )
    c_thresh: float = option(
        1.0,
        "upper limit of the weight that is carried through a step",
        gt=0,
        read_by=GRADIENTS | {"value": ("vtrace",)},
    )
    kwargs: dict[str, Any] = option({}, "arguments for a registered estimator of your own")

    def problems(self) -> Iterator[Problem]:
        if self.average_over != "minibatch" and not self.average:
            what = "value.average_over has no meaning with value.average=false"
            yield Problem(what, "use value.average=true, or leave it out")
        if self.shifted_budget != 1 and not self.shifted:
            what = "value.shifted_budget has no meaning with value.shifted=false"
            yield Problem(what, "use value.shifted=true, or leave it out")
        if self.shifted and self.two_calls:
            yield Problem("value.shifted and value.two_calls exclude each other", "leave one out")
        if self.num_chunks is not None and self.value_chunk_size is not None:
            what = "value.num_chunks and value.value_chunk_size are two ways to say one thing"
            yield Problem(what, "give one of them")
        if self.kind == "vtrace" and self.c_thresh > self.rho_thresh:
            what = f"value.c_thresh={self.c_thresh} is more than value.rho_thresh={self.rho_thresh}"
            yield Problem(what, "use value.c_thresh <= value.rho_thresh")


@dataclass
class LossConfig(Group):
    """What is minimised: a policy gradient with its value and entropy terms, DQN's or SAC's losses."""

    kind: str = option("ppo_clip", "which loss choice this is")
    distance: str = option(
        "smooth_l1", "loss between a value and its target", choices=("smooth_l1", "l2", "l1"), read_by=BOOTSTRAPPED
    )
    n_steps: int = option(1, "steps of n-step returns", ge=1, read_by=BOOTSTRAPPED)
    tau: float = option(1.0, "Polyak coefficient of the target networks (1: copy)", gt=0, le=1, read_by=BOOTSTRAPPED)
    target_every: int = option(
        1, "gradient updates between two updates of the target networks", ge=1, read_by=BOOTSTRAPPED
    )
    alpha: float | int | str = option(
        "auto", "entropy coefficient (temperature); auto: learned", gt=0, words=("auto",), read_by={"loss": ("sac",)}
    )
    alpha_init: float = option(1.0, "initial value of a learned alpha", gt=0, read_by={"loss": ("sac",)})
    target_entropy: float | int | str = option(
        "auto",
        "target entropy of a learned alpha; auto: minus the number of action dims",
        words=("auto",),
        read_by={"loss": ("sac",)},
    )
    double: bool = option(
        False,
        "double DQN: the online network chooses the next action, the target network evaluates it",
        read_by={"loss": ("dqn",)},
    )
    start_state: str = option(
        "stored",
        "the state that slices begin from, of a recurrent policy",
        choices=("stored", "zero"),
        read_by={"loss": ("dqn",)},
    )
    entropy_coeff: float | int | str = option(
        "auto",
        "weight of the entropy bonus; auto: 0 for Box actions, otherwise 0.01",
        ge=0,
        words=("auto",),
        read_by=GRADIENTS,
    )
    critic_coeff: float = option(0.5, "weight of the value loss", ge=0, read_by=GRADIENTS)
    baseline: bool = option(True, "subtract a learned state value from returns", read_by={"loss": ("reinforce",)})
    clip_value: float | None = option(
        None, "clip range of value changes", gt=0, read_by={"loss": ("ppo_clip", "ppo_kl", "a2c")}
    )
    target_kl: float | None = option(
        None,
        "stop the epochs of a batch once the mean KL divergence exceeds this",
        gt=0,
        read_by={"loss": ("ppo_clip", "ppo_kl")},
    )
    kl_target: float = option(0.01, "target KL divergence per batch", gt=0, read_by={"loss": ("ppo_kl",)})
    kl_coeff: float = option(1.0, "initial weight of the KL penalty", ge=0, read_by={"loss": ("ppo_kl",)})
    clip_epsilon: float = option(
        0.2, "clip range of the probability ratio", gt=0, lt=1, read_by={"loss": ("ppo_clip",)}
    )
    anneal_clip: bool = option(False, "lower clip_epsilon to 0 over total_frames", read_by={"loss": ("ppo_clip",)})
    kwargs: dict[str, Any] = option({}, "arguments for a registered algorithm of your own")

    def problems(self) -> Iterator[Problem]:
        if self.kind == "reinforce" and self.critic_coeff != 0.5 and not self.baseline:
            what = "loss.critic_coeff has no meaning with loss.baseline=false"
            yield Problem(what, "use loss.baseline=true, or leave it out")
        if self.kind == "sac" and self.alpha != "auto":
            learned = {"alpha_init": self.alpha_init != 1, "target_entropy": self.target_entropy != "auto"}
            for name in (name for name, given in learned.items() if given):
                what = f"loss.{name} has no meaning with loss.alpha={self.alpha}"
                yield Problem(what, "use loss.alpha=auto, or leave it out")


@dataclass
class OptimConfig(Group):
    """How gradients become weights."""

    kind: str = option("adam", "which optimizer choice this is")
    lr: float = option(3e-4, "learning rate", gt=0)
    anneal_lr: bool = option(False, "lower the learning rate to 0 over total_frames")
    max_grad_norm: float | None = option(0.5, "clip the gradient norm at this; null: no clipping", gt=0)
    weight_decay: float = option(0.0, "weight decay", ge=0)
    compile: bool = option(False, "torch.compile the update")
    momentum: float = option(0.0, "momentum", ge=0, lt=1, read_by={"optim": ("rmsprop", "sgd")})
    eps: float = option(1e-5, "epsilon in the denominator", gt=0, read_by={"optim": ("adam", "adamw", "rmsprop")})
    alpha: float = option(0.99, "smoothing constant of RMSprop", ge=0, lt=1, read_by={"optim": ("rmsprop",)})
    betas: list[float] = option(
        [0.9, 0.999], "decay rates of the two moments", ge=0, lt=1, read_by={"optim": ("adam", "adamw")}
    )
    epochs: int = option(
        10, "passes over each batch; with sampler=slice as many rows are drawn", ge=1, read_by=GRADIENTS
    )
    updates_per_frame: float = option(1.0, "gradient updates per collected frame", gt=0, read_by=BOOTSTRAPPED)

    def problems(self) -> Iterator[Problem]:
        if self.kind in ("adam", "adamw") and len(self.betas) != 2:
            yield Problem(f"optim.betas is a pair, not {self.betas}", "such as optim.betas=[0.9,0.999]")


# ---- all of it ------------------------------------------------------------------------------------------------------
@dataclass
class Config(CollectConfig):
    """Everything `rlcli train` reads: what collecting reads, and how batches become better weights."""

    storage: StorageConfig = option(StorageConfig, "replay storage")
    sampler: SamplerConfig = option(SamplerConfig, "how updates sample rows")
    value: ValueConfig = option(ValueConfig, "advantages")
    loss: LossConfig = option(LossConfig, "loss and algorithm")
    optim: OptimConfig = option(OptimConfig, "optimizer")
