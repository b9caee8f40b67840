"""What `rlcli train` reads besides, and its tree: where rows are kept and how they are drawn, what is minimised by what
estimates, and how gradients become weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlcli.config.choices.collect import GRADIENTS, CollectConfig, gradient_option, valued_option
from rlcli.config.option import REGISTERED, Group, Part, option
from rlcli.config.problem import Problem

BOOTSTRAPPED = {"loss": ("dqn", "sac")}  # that learn from stored rows towards values that target networks give


# ---- rows -----------------------------------------------------------------------------------------------------------
@dataclass
class StorageOptions(Group):
    """Where rows are kept between collecting and learning. On-policy runs need none."""

    kind: str = option("none", "tensor: in memory; memmap: on disk; compressed: in memory, images compressed")
    init_from: str | None = option(
        None, "rows to begin with: a run of rlcli collect, another run with a buffer, or a folder that holds one"
    )
    kwargs: dict[str, Any] = option({}, "arguments for a registered storage of your own")


@dataclass
class TensorOptions(StorageOptions):
    max_size: int = option(1_000_000, "rows, the oldest overwritten first", ge=1)
    ndim: int = option(1, "batch dims that are stored: 2 stores envs side by side", ge=1, le=2)
    codes: bool = option(True, "store flags and small integers in a few bits each, losslessly")


@dataclass
class PlacedOptions(TensorOptions):
    device: str = option(
        "auto", "cpu; cuda: on the GPU that learns (storage=tensor); auto: there where half of what is free is enough",
        choices=("auto", "cpu", "cuda"),
    )  # fmt: skip


@dataclass
class MemmapOptions(PlacedOptions):
    scratch_dir: str | None = option(None, "folder for its files, one subfolder per run; null: the run folder")


STORAGES = {
    "none": Part(StorageOptions),
    "tensor": Part(PlacedOptions, "rlcli.data.storages:LazyTensorStorage"),
    "memmap": Part(MemmapOptions, "rlcli.data.storages.memmap:LazyMemmapStorage"),
    "compressed": Part(PlacedOptions, "rlcli.data.storages.compressed:CompressedStorage"),
    REGISTERED: Part(TensorOptions),
}


@dataclass
class SamplerOptions(Group):
    """How rows are sampled for an update."""

    kind: str = option(
        "minibatch",
        "minibatch: a batch reshuffled every epoch; random, prioritized: rows of a storage; slice, prioritized_slice: "
        "parts of its trajectories",
    )
    batch_size: int = option(64, "rows per gradient update", ge=1)
    kwargs: dict[str, Any] = option({}, "arguments for a registered sampler of your own")


@dataclass
class PrioritizedOptions(SamplerOptions):
    alpha: float = option(0.6, "exponent of the priorities", ge=0)
    beta: float = option(0.4, "importance-sampling exponent at the start; rises to 1", ge=0, le=1)
    beta_frames: int = option(100_000, "frames over which beta rises to 1, linearly", ge=1)


@dataclass
class MinibatchOptions(SamplerOptions):
    slice_len: int | None = option(
        None,
        "rows of a slice, at most; null: batch_size / num_slices, or with sampler=minibatch the whole sequences of a "
        "recurrent policy",
        ge=1,
    )


@dataclass
class StoredSliceOptions(MinibatchOptions):
    num_slices: int | None = option(None, "slices of a sample; null: batch_size / slice_len", ge=1)
    strict_length: bool = option(False, "only trajectories of at least slice_len rows; false: shorter ones too")
    burn_in: int = option(0, "extra rows before a slice that only warm up the state of a recurrent policy", ge=0)

    def problems(self) -> Iterator[Problem]:
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


@dataclass
class SliceOptions(StoredSliceOptions):
    span: bool = option(
        False, "slices reach over the ends of trajectories and are cut there; every row is equally likely"
    )
    weighting: str = option(
        "transition",
        "a trajectory's chance is in proportion to its rows (transition), or the same for all (trajectory)",
        choices=("transition", "trajectory"),
    )

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.span and self.strict_length:
            what = "sampler.span cuts slices at the ends of trajectories, sampler.strict_length wants whole ones"
            yield Problem(what, "give one of them")


@dataclass
class PrioritizedSliceOptions(StoredSliceOptions, PrioritizedOptions):
    pass


SAMPLERS = {
    "minibatch": Part(MinibatchOptions, draws="batch"),
    "random": Part(SamplerOptions, "rlcli.data.samplers:RandomSampler"),
    "prioritized": Part(PrioritizedOptions, "rlcli.data.samplers:PrioritizedSampler"),
    "slice": Part(SliceOptions, "rlcli.data.samplers:SliceSampler", draws="slices"),
    "prioritized_slice": Part(PrioritizedSliceOptions, "rlcli.data.samplers:PrioritizedSliceSampler", draws="slices"),
}


# ---- estimates ------------------------------------------------------------------------------------------------------
@dataclass
class EstimatorOptions(Group):
    """Advantages and value targets."""

    kind: str = gradient_option("gae", "which estimator choice this is")
    average: bool = gradient_option(True, "normalise advantages to mean 0, standard deviation 1")
    average_over: str = option(
        "minibatch", "rows that advantages are normalised over", choices=("batch", "minibatch"),
        read_by=GRADIENTS | {"value.average": (True,)},
    )  # fmt: skip
    shifted: bool = valued_option(
        False, "one value network call for observations and next observations; stores no next observations"
    )
    shifted_budget: int = option(
        1, "room for so many extra next observations per env and batch", ge=1,
        read_by=GRADIENTS | {"value.shifted": (True,)},
    )  # fmt: skip
    normaliser: str = valued_option("none", "normalise value targets", choices=("none", "running", "popart"))
    two_calls: bool = valued_option(False, "value net on observations and on next observations, one call each")
    num_chunks: int | None = valued_option(None, "call the value net on so many parts of a batch: less memory", ge=1)
    value_chunk_size: int | None = valued_option(
        None, "the same by size: envs, or rows of a flat batch, in a part", ge=1
    )
    compute_dtype: str = valued_option(
        "float32", "precision the value net is called in for estimates", choices=("float32", "bfloat16", "float16")
    )
    backend: str = gradient_option(
        "auto", "implementation of the recursion", choices=("auto", "reference", "cpu", "triton")
    )
    gamma: float = option(0.99, "discount per step", ge=0, le=1)
    kwargs: dict[str, Any] = option({}, "arguments for a registered estimator of your own")

    def problems(self) -> Iterator[Problem]:
        if self.shifted and self.two_calls:
            yield Problem("value.shifted and value.two_calls exclude each other", "leave one out")
        if self.num_chunks is not None and self.value_chunk_size is not None:
            what = "value.num_chunks and value.value_chunk_size are two ways to say one thing"
            yield Problem(what, "give one of them")


@dataclass
class LambdaOptions(EstimatorOptions):
    lmbda: float = gradient_option(0.95, "lambda of GAE and TD(lambda): 0 is one-step, 1 Monte Carlo", ge=0, le=1)


@dataclass
class VTraceOptions(EstimatorOptions):
    rho_thresh: float = gradient_option(1.0, "upper limit of a step's importance weight", gt=0)
    c_thresh: float = gradient_option(1.0, "upper limit of the weight that is carried through a step", gt=0)

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.c_thresh > self.rho_thresh:
            what = f"value.c_thresh={self.c_thresh} is more than value.rho_thresh={self.rho_thresh}"
            yield Problem(what, "use value.c_thresh <= value.rho_thresh")


ESTIMATORS = {
    "gae": Part(LambdaOptions, "rlcli.objectives.value:GAE"),
    "td0": Part(EstimatorOptions, "rlcli.objectives.value:TD0Estimator"),
    "td1": Part(EstimatorOptions, "rlcli.objectives.value:TD1Estimator"),
    "td_lambda": Part(LambdaOptions, "rlcli.objectives.value:TDLambdaEstimator"),
    "vtrace": Part(VTraceOptions, "rlcli.objectives.value:VTrace"),
}


# ---- losses ---------------------------------------------------------------------------------------------------------
@dataclass
class LossOptions(Group):
    """What is minimised: a policy gradient with its value and entropy terms, DQN's or SAC's losses."""

    kind: str = option("ppo_clip", "which loss choice this is")
    kwargs: dict[str, Any] = option({}, "arguments for a registered algorithm of your own")


@dataclass
class PolicyGradientOptions(LossOptions):
    entropy_coeff: float | int | str = option(
        "auto", "weight of the entropy bonus; auto: 0 for Box actions, otherwise 0.01", ge=0, words=("auto",)
    )
    critic_coeff: float = option(0.5, "weight of the value loss", ge=0, read_by={"loss.baseline": (True,)})


@dataclass
class ActorCriticOptions(PolicyGradientOptions):
    clip_value: float | None = option(None, "clip range of value changes", gt=0)


@dataclass
class PPOOptions(ActorCriticOptions):
    target_kl: float | None = option(None, "stop the epochs of a batch once the mean KL divergence exceeds this", gt=0)


@dataclass
class ClipPPOOptions(PPOOptions):
    clip_epsilon: float = option(0.2, "clip range of the probability ratio", gt=0, lt=1)
    anneal_clip: bool = option(False, "lower clip_epsilon to 0 over total_frames")


@dataclass
class PenalisedPPOOptions(PPOOptions):
    kl_target: float = option(0.01, "target KL divergence per batch", gt=0)
    kl_coeff: float = option(1.0, "initial weight of the KL penalty", ge=0)


@dataclass
class ReinforceOptions(PolicyGradientOptions):
    baseline: bool = option(True, "subtract a learned state value from returns")


@dataclass
class BootstrappedOptions(LossOptions):
    distance: str = option("smooth_l1", "loss between a value and its target", choices=("smooth_l1", "l2", "l1"))
    n_steps: int = option(1, "steps of n-step returns", ge=1)
    tau: float = option(1.0, "Polyak coefficient of the target networks (1: copy)", gt=0, le=1)
    target_every: int = option(1, "gradient updates between two updates of the target networks", ge=1)


@dataclass
class DQNOptions(BootstrappedOptions):
    double: bool = option(
        False, "double DQN: the online network chooses the next action, the target network evaluates it"
    )
    start_state: str = option(
        "stored", "the state that slices begin from, of a recurrent policy", choices=("stored", "zero")
    )


@dataclass
class SACOptions(BootstrappedOptions):
    alpha: float | int | str = option("auto", "entropy coefficient (temperature); auto: learned", gt=0, words=("auto",))
    alpha_init: float = option(1.0, "initial value of a learned alpha", gt=0, read_by={"loss.alpha": ("auto",)})
    target_entropy: float | int | str = option(
        "auto", "target entropy of a learned alpha; auto: minus the number of action dims", words=("auto",),
        read_by={"loss.alpha": ("auto",)},
    )  # fmt: skip


LOSSES = {
    "ppo_clip": Part(ClipPPOOptions, "rlcli.algorithms.ppo:ClipPPO"),
    "ppo_kl": Part(PenalisedPPOOptions, "rlcli.algorithms.ppo:PenalisedPPO"),
    "a2c": Part(ActorCriticOptions, "rlcli.algorithms.one_pass:A2C"),
    "reinforce": Part(ReinforceOptions, "rlcli.algorithms.one_pass:Reinforce"),
    "dqn": Part(DQNOptions, "rlcli.algorithms.dqn:DQN", off_policy=True),
    "sac": Part(SACOptions, "rlcli.algorithms.sac:SAC", off_policy=True),
}


# ---- optimizers -----------------------------------------------------------------------------------------------------
@dataclass
class OptimizerOptions(Group):
    """How gradients become weights."""

    kind: str = option("adam", "which optimizer choice this is")
    lr: float = option(3e-4, "learning rate", gt=0)
    anneal_lr: bool = option(False, "lower the learning rate to 0 over total_frames")
    max_grad_norm: float | None = option(0.5, "clip the gradient norm at this; null: no clipping", gt=0)
    weight_decay: float = option(0.0, "weight decay", ge=0)
    compile: bool = option(False, "torch.compile the update")
    epochs: int = gradient_option(10, "passes over each batch; with sampler=slice as many rows are drawn", ge=1)
    updates_per_frame: float = option(1.0, "gradient updates per collected frame", gt=0, read_by=BOOTSTRAPPED)


@dataclass
class MomentumOptions(OptimizerOptions):
    momentum: float = option(0.0, "momentum", ge=0, lt=1)


@dataclass
class AdaptiveOptions(OptimizerOptions):
    eps: float = option(1e-5, "epsilon in the denominator", gt=0)


@dataclass
class AdamOptions(AdaptiveOptions):
    betas: list[float] = option([0.9, 0.999], "decay rates of the two moments", ge=0, lt=1)

    def problems(self) -> Iterator[Problem]:
        if len(self.betas) != 2:
            yield Problem(f"optim.betas is a pair, not {self.betas}", "such as optim.betas=[0.9,0.999]")


@dataclass
class RMSpropOptions(MomentumOptions, AdaptiveOptions):
    alpha: float = option(0.99, "smoothing constant of RMSprop", ge=0, lt=1)


OPTIMIZERS = {
    "adam": Part(AdamOptions),
    "adamw": Part(AdamOptions),
    "rmsprop": Part(RMSpropOptions),
    "sgd": Part(MomentumOptions),
}


# ---- processes that learn together ---------------------------------------------------------------------------------
@dataclass
class LearnerConfig(Group):
    """Ranks: processes that each collect and learn a share of every batch, and step together."""

    world_size: int = option(1, "processes that learn together, each from its share of envs, frames and rows", ge=1)
    backend: str = option(
        "auto",
        "what reduces their gradients; auto: nccl where each has a GPU, else gloo",
        choices=("auto", "gloo", "nccl"),
    )

    def problems(self) -> Iterator[Problem]:
        if self.backend != "auto" and self.world_size == 1:
            yield Problem(f"learner.backend={self.backend} has no meaning with learner.world_size=1", "leave it out")


@dataclass
class RankConfig(LearnerConfig):
    """The same, in the configuration of one rank: envs, batches, minibatches and buffer are its share."""

    rank: int = 0


# ---- all of it ------------------------------------------------------------------------------------------------------
@dataclass
class Config(CollectConfig):
    """Everything `rlcli train` reads: what collecting reads, and how batches become better weights."""

    storage: StorageOptions = option(StorageOptions, "replay storage", parts=STORAGES)
    sampler: SamplerOptions = option(MinibatchOptions, "how updates sample rows", parts=SAMPLERS)
    value: EstimatorOptions = option(LambdaOptions, "advantages", parts=ESTIMATORS)
    loss: LossOptions = option(ClipPPOOptions, "loss and algorithm", parts=LOSSES)
    optim: OptimizerOptions = option(AdamOptions, "optimizer", parts=OPTIMIZERS)
    learner: LearnerConfig = option(LearnerConfig, "processes that learn together")
