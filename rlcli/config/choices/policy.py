"""Options of `policy`: the network, or whatever else picks the actions."""

from __future__ import annotations

from typing import Any, ClassVar

from rlcli.config.choices.options import Options, Reads, names
from rlcli.config.option import option


class GradientActor(Options, group="policy"):
    shared: bool | None = option(
        None, "one trunk for actor and critic instead of one each; null: where it has convolutions and hidden layers"
    )
    init_std: float = option(1.0, "initial standard deviation of continuous actions", gt=0)
    state_dependent_std: bool = option(False, "standard deviation as an output of the network, not a free parameter")


class GreedyActor(Options, group="policy"):  # an actor that chooses by value
    dueling: bool = option(False, "dueling network: state value plus advantages")
    eps_init: float = option(1.0, "initial epsilon of epsilon-greedy exploration", ge=0, le=1)
    eps_end: float = option(0.05, "final epsilon", ge=0, le=1)
    eps_frames: int = option(10_000, "frames over which epsilon falls linearly", ge=1)


class PolicyOptions(Options, group="policy"):
    kwargs: dict[str, Any] = option({}, "arguments for a registered policy of your own")


class ActingOptions(PolicyOptions):
    reads: ClassVar[Reads] = ("collector.init_random_frames",)

    exploration: str = option(
        "random",
        "how actions are chosen while collecting; random: sampled from the policy",
        choices=("random", "mode", "mean", "deterministic"),
    )


class RandomOptions(PolicyOptions):
    action_mask_key: str | None = option(
        None, "the observation that says which actions are allowed; null: one called action_mask; none: there is none"
    )


class RegisteredPolicyOptions(ActingOptions, RandomOptions):
    """A policy that a user's package registers."""


class CheckpointOptions(ActingOptions):
    path: str | None = option(None, "a run folder, RUN:FRAMES, RUN:best, or the folder of a checkpoint")


class LayersOptions(RegisteredPolicyOptions):
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


class NetOptions(GradientActor, GreedyActor, LayersOptions):
    """`policy=mlp`, `cnn`, `dict` and `auto`."""


class RecurrentNetOptions(NetOptions):
    reads = (
        "collector.init_random_frames", "memory.recurrent_state_stride", "memory.recurrent_recompute"
    )  # fmt: skip

    recurrent_size: int = option(64, "units of the recurrent layer, which reads the last hidden one", ge=1)
    recurrent_layers: int = option(1, "recurrent layers on top of each other", ge=1, le=100)
    recurrent_backend: str = option(
        "auto",
        "implementation of sequences; auto: the fastest available",
        choices=("auto", "reference", "pad", "scan", "cpu", "triton"),
    )


POLICIES: dict[str, type[Options]] = {
    "mlp": NetOptions, "cnn": NetOptions, "dict": NetOptions, "gru": RecurrentNetOptions, "lstm": RecurrentNetOptions,
    "auto": NetOptions, "random": RandomOptions, "checkpoint": CheckpointOptions,
}  # fmt: skip


class PolicyConfig(CheckpointOptions, RecurrentNetOptions):
    """The network, or whatever else picks the actions. Layer input sizes follow from the env."""

    kind: str = option("auto", "which policy choice this is", choices=names(POLICIES))
    init_from: str | None = option(
        None, "begin with the trained weights and normalisation of another run: RUN, RUN:FRAMES or RUN:best"
    )
    init_strict: bool = option(
        True, "init_from: layers of other shapes are refused; false: they keep their own weights"
    )
