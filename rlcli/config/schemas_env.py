"""The fields of `env` and `policy`: the world a run steps in, and who chooses the actions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlcli.config.option import option
from rlcli.config.schemas_learn import GRADIENTS

# `used_by` of an option
ATARI, BUILT = {"env": ("atari",)}, {"policy": ("mlp", "cnn", "dict", "auto")}


@dataclass
class AtariConfig:
    """Frames of the Atari screen before the policy sees them (read by `env=atari` only)."""

    noop_max: int = option(30, "up to this many no-op steps at the start of an episode", ge=0, used_by=ATARI)
    frame_skip: int = option(4, "emulator frames per step; the last two are maximised", ge=1, used_by=ATARI)
    screen_size: int = option(84, "side of the resized square frame, in pixels", ge=1, used_by=ATARI)
    grayscale: bool = option(True, "one luminance channel instead of three colours", used_by=ATARI)
    terminal_on_life_loss: bool = option(False, "a lost life ends the episode for learning", used_by=ATARI)
    clip_reward: bool = option(True, "keep only the sign of the reward", used_by=ATARI)


@dataclass
class EnvConfig:
    """The environment, its wrappers, and how many of it are stepped together."""

    kind: str = option("gym", "which env choice this is", choices=("gym", "atari", "mujoco", "envpool"))
    id: str = option("CartPole-v1", "gymnasium id, or a name from the registry")
    num: int = option(8, "environments stepped together in this process", ge=1, le=1_000_000)
    mode: str = option(
        "auto",
        "serial: one by one; native: the env's own vector engine; auto: the faster that resumes exactly",
        choices=("auto", "serial", "native"),
    )
    kwargs: dict[str, Any] = option({}, "arguments for gymnasium.make")
    max_episode_steps: int | None = option(None, "truncate episodes here; null keeps the env's own limit", ge=1)
    frame_stack: int | None = option(None, "last k observations, stacked, for the policy", ge=1)
    normalize_observation: bool = option(False, "scale observations by their running mean and deviation")
    normalize_reward: bool = option(False, "scale rewards by the running deviation of the return")
    reward_scale: float = option(1.0, "multiply every reward by this", gt=0)
    out_of_bounds: str = option(
        "count",
        "an observation outside the declared space: refuse: stop there; count: go on and report; ignore: do not look",
        choices=("refuse", "count", "ignore"),
    )
    step_timeout: float | None = option(
        None, "seconds after which an env that does not answer ends the run; null: that is only said, after 60", gt=0
    )
    wrappers: list[Any] = option([], "names, or {Name: {argument: value}}, applied in order, innermost first")
    transforms: list[Any] = option([], "further transforms of what the envs give, written as wrappers are")
    atari: AtariConfig = option(AtariConfig, "preprocessing of Atari frames")


@dataclass
class PolicyConfig:
    """The network, or whatever else picks the actions. Layer input sizes follow from the env."""

    kind: str = option(
        "auto", "which policy choice this is", choices=("auto", "mlp", "cnn", "dict", "random", "checkpoint")
    )
    hidden: list[int] | None = option(
        None,
        "units of each hidden layer; []: none, a linear network; null: [512] behind convolutions, else [64,64]",
        ge=1,
        used_by=BUILT,
    )
    activation: str = option(
        "auto",
        "between layers; auto: relu behind convolutions, else tanh",
        choices=("auto", "tanh", "relu", "elu", "gelu", "silu", "leaky_relu"),
        used_by=BUILT,
    )
    shared: bool | None = option(
        None,
        "one trunk for actor and critic instead of one each; null: where it has convolutions and hidden layers",
        used_by={**BUILT, **GRADIENTS},
    )
    orthogonal: bool = option(True, "orthogonal initial weights, small for the last actor layer", used_by=BUILT)
    distribution: str = option(
        "auto",
        "of the actions; auto: categorical for discrete spaces, normal for boxes (clipped when executed)",
        choices=("auto", "categorical", "multi_categorical", "normal", "tanh_normal"),
    )
    init_std: float = option(1.0, "initial deviation of a continuous action", gt=0, used_by={**BUILT, **GRADIENTS})
    state_dependent_std: bool = option(
        False, "the deviation is an output of the network, not a free parameter", used_by={**BUILT, **GRADIENTS}
    )
    dueling: bool = option(False, "dqn: values as a state's value plus advantages", used_by={**BUILT, "loss": ("dqn",)})
    eps_init: float = option(
        1.0, "dqn: share of uniform actions at the start", ge=0, le=1, used_by={**BUILT, "loss": ("dqn",)}
    )
    eps_end: float = option(0.05, "dqn: the same after eps_frames", ge=0, le=1, used_by={**BUILT, "loss": ("dqn",)})
    eps_frames: int = option(
        10_000, "dqn: frames over which it falls, in a straight line", ge=1, used_by={**BUILT, "loss": ("dqn",)}
    )
    exploration: str = option(
        "random",
        "how actions are taken while collecting",
        choices=("random", "mode", "mean", "deterministic"),
    )
    path: str | None = option(
        None, "policy=checkpoint: a run folder or one of its checkpoints", used_by={"policy": ("checkpoint",)}
    )
    kwargs: dict[str, Any] = option({}, "arguments for a registered policy of your own")
