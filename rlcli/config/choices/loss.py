"""Options of `loss`, `value` and `optim`: what is minimised, by which estimates, and how gradients become weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from rlcli.config.choices.collect import GradientActor, GreedyActor
from rlcli.config.option import Options, Reads, option
from rlcli.config.problem import Problem


# ---- optim -----------------------------------------------------------------------------------------------------------
class OptimOptions(Options, group="optim"):
    lr: float = option(3e-4, "learning rate", gt=0)
    anneal_lr: bool = option(False, "lower the learning rate to 0 over total_frames")
    max_grad_norm: float | None = option(0.5, "clip the gradient norm at this; null: no clipping", gt=0)
    weight_decay: float = option(0.0, "weight decay", ge=0)
    compile: bool = option(False, "torch.compile the update")


class EpsOptions(OptimOptions):
    eps: float = option(1e-5, "epsilon in the denominator", gt=0)


class AdamOptions(EpsOptions):
    betas: list[float] = option([0.9, 0.999], "decay rates of the two moments", ge=0, lt=1)

    def problems(self) -> Iterator[Problem]:
        if len(self.betas) != 2:
            yield Problem(f"optim.betas is a pair, not {self.betas}", "such as optim.betas=[0.9,0.999]")


class SGDOptions(OptimOptions):
    momentum: float = option(0.0, "momentum", ge=0, lt=1)


class RMSpropOptions(EpsOptions, SGDOptions):
    alpha: float = option(0.99, "smoothing constant of RMSprop", ge=0, lt=1)


OPTIMIZERS: dict[str, type[Options]] = {
    "adam": AdamOptions, "adamw": AdamOptions, "rmsprop": RMSpropOptions, "sgd": SGDOptions
}  # fmt: skip


class OptimConfig(AdamOptions, RMSpropOptions):
    """How gradients become weights."""

    kind: str = option("adam", "which optimizer choice this is")
    epochs: int = option(10, "passes over each batch; with sampler=slice as many rows are drawn", ge=1)
    updates_per_frame: float = option(1.0, "gradient updates per collected frame", gt=0)


# ---- value -----------------------------------------------------------------------------------------------------------
class Estimates(Options, group="value"):  # how advantages and value targets are estimated, whatever the estimator
    kind: str = option("gae", "which estimator choice this is")
    average: bool = option(True, "normalise advantages to mean 0, standard deviation 1")
    average_over: str = option(
        "minibatch",
        "rows that advantages are normalised over",
        choices=("batch", "minibatch"),
    )
    shifted: bool = option(
        False, "one value network call for observations and next observations; stores no next observations"
    )
    shifted_budget: int = option(1, "shifted: room for so many extra next observations per env and batch", ge=1)
    normaliser: str = option("none", "normalise value targets", choices=("none", "running", "popart"))
    two_calls: bool = option(False, "value net on observations and on next observations, one call each")
    num_chunks: int | None = option(None, "call the value net on so many parts of a batch: less memory", ge=1)
    value_chunk_size: int | None = option(None, "the same by size: envs, or rows of a flat batch, in a part", ge=1)
    compute_dtype: str = option(
        "float32", "precision the value net is called in for estimates", choices=("float32", "bfloat16", "float16")
    )
    backend: str = option("auto", "implementation of the recursion", choices=("auto", "reference", "cpu", "triton"))

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


class TD0Options(Estimates, place="rlcli.objectives.value:TD0Estimator"):
    gamma: float = option(0.99, "discount per step", ge=0, le=1)
    kwargs: dict[str, Any] = option({}, "arguments for a registered estimator of your own")


class GAEOptions(TD0Options, place="rlcli.objectives.value:GAE"):
    lmbda: float = option(0.95, "lambda of GAE and TD(lambda): 0 is one-step, 1 Monte Carlo", ge=0, le=1)


class VTraceOptions(TD0Options, place="rlcli.objectives.value:VTrace"):
    rho_thresh: float = option(1.0, "upper limit of a step's importance weight", gt=0)
    c_thresh: float = option(1.0, "upper limit of the weight that is carried through a step", gt=0)

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.c_thresh > self.rho_thresh:
            what = f"value.c_thresh={self.c_thresh} is more than value.rho_thresh={self.rho_thresh}"
            yield Problem(what, "use value.c_thresh <= value.rho_thresh")


ESTIMATORS: dict[str, type[Options]] = {
    "gae": GAEOptions, "td0": TD0Options, "td1": TD0Options.at("rlcli.objectives.value:TD1Estimator"),
    "td_lambda": GAEOptions.at("rlcli.objectives.value:TDLambdaEstimator"), "vtrace": VTraceOptions,
}  # fmt: skip


class ValueConfig(VTraceOptions, GAEOptions):
    """Advantages and value targets."""


# ---- loss ------------------------------------------------------------------------------------------------------------
class LossOptions(Options, group="loss"):
    kwargs: dict[str, Any] = option({}, "arguments for a registered algorithm of your own")


class PolicyGradientOptions(LossOptions):  # a policy gradient with its value and entropy terms
    reads: ClassVar[Reads] = (
        GradientActor, Estimates, "value.lmbda", "value.rho_thresh", "value.c_thresh", "optim.epochs"
    )  # fmt: skip

    entropy_coeff: float | int | str = option(
        "auto", "weight of the entropy bonus; auto: 0 for Box actions, otherwise 0.01", ge=0, words=("auto",)
    )
    critic_coeff: float = option(0.5, "weight of the value loss", ge=0)


class A2COptions(PolicyGradientOptions, place="rlcli.algorithms.one_pass:A2C"):
    clip_value: float | None = option(None, "clip range of value changes", gt=0)


class PPOOptions(A2COptions):
    target_kl: float | None = option(None, "stop the epochs of a batch once the mean KL divergence exceeds this", gt=0)


class ClipPPOOptions(PPOOptions, place="rlcli.algorithms.ppo:ClipPPO"):
    clip_epsilon: float = option(0.2, "clip range of the probability ratio", gt=0, lt=1)
    anneal_clip: bool = option(False, "lower clip_epsilon to 0 over total_frames")


class PenalisedPPOOptions(PPOOptions, place="rlcli.algorithms.ppo:PenalisedPPO"):
    kl_target: float = option(0.01, "target KL divergence per batch", gt=0)
    kl_coeff: float = option(1.0, "initial weight of the KL penalty", ge=0)


class ReinforceOptions(PolicyGradientOptions, place="rlcli.algorithms.one_pass:Reinforce"):
    baseline: bool = option(True, "subtract a learned state value from returns")

    def problems(self) -> Iterator[Problem]:
        if self.critic_coeff != 0.5 and not self.baseline:
            what = "loss.critic_coeff has no meaning with loss.baseline=false"
            yield Problem(what, "use loss.baseline=true, or leave it out")


class BootstrappedOptions(LossOptions):  # learning from stored rows towards values that target networks give
    reads: ClassVar[Reads] = ("optim.updates_per_frame",)
    off_policy = True

    distance: str = option("smooth_l1", "loss between a value and its target", choices=("smooth_l1", "l2", "l1"))
    n_steps: int = option(1, "steps of n-step returns", ge=1)
    tau: float = option(1.0, "Polyak coefficient of the target networks (1: copy)", gt=0, le=1)
    target_every: int = option(1, "gradient updates between two updates of the target networks", ge=1)


class DQNOptions(BootstrappedOptions, place="rlcli.algorithms.dqn:DQN"):
    reads = ("optim.updates_per_frame", GreedyActor)

    double: bool = option(
        False, "double DQN: the online network chooses the next action, the target network evaluates it"
    )
    start_state: str = option(
        "stored", "the state that slices begin from, of a recurrent policy", choices=("stored", "zero")
    )


class SACOptions(BootstrappedOptions, place="rlcli.algorithms.sac:SAC"):
    alpha: float | int | str = option("auto", "entropy coefficient (temperature); auto: learned", gt=0, words=("auto",))
    alpha_init: float = option(1.0, "initial value of a learned alpha", gt=0)
    target_entropy: float | int | str = option(
        "auto", "target entropy of a learned alpha; auto: minus the number of action dims", words=("auto",)
    )

    def problems(self) -> Iterator[Problem]:
        learned = {"alpha_init": self.alpha_init != 1, "target_entropy": self.target_entropy != "auto"}
        for name in (name for name, given in learned.items() if given and self.alpha != "auto"):
            what = f"loss.{name} has no meaning with loss.alpha={self.alpha}"
            yield Problem(what, "use loss.alpha=auto, or leave it out")


ALGORITHMS: dict[str, type[Options]] = {
    "ppo_clip": ClipPPOOptions, "ppo_kl": PenalisedPPOOptions, "a2c": A2COptions, "reinforce": ReinforceOptions,
    "dqn": DQNOptions, "sac": SACOptions,
}  # fmt: skip


class LossConfig(ClipPPOOptions, PenalisedPPOOptions, ReinforceOptions, DQNOptions, SACOptions):  # type: ignore[misc]
    """What is minimised: a policy gradient with its value and entropy terms, DQN's or SAC's losses."""

    kind: str = option("ppo_clip", "which loss choice this is")
