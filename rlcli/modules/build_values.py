"""What DQN and SAC train, inferred from an env's specs.

observation(s) -> layers -> action_value -> greedy, but for a share of uniform actions            (DQN)
observation(s) -> layers -> loc, scale -> tanh_normal -> action                                   (SAC, the actor)
observation(s), action -> layers -> state_action_value                                            (SAC, each critic)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from rlcli.errors import ConfigError
from rlcli.keys import STATE_ACTION_VALUE, Key, show
from rlcli.modules.action_head import action_head, single_action
from rlcli.modules.actor import ProbabilisticActor
from rlcli.modules.actor_critic import ActorCritic
from rlcli.modules.dueling import DuelingHead
from rlcli.modules.e_greedy import EGreedyModule
from rlcli.modules.heads import LogScaleExtractor
from rlcli.modules.initialise import seeded
from rlcli.modules.network import network, observation_keys
from rlcli.modules.q_value import QValueActor
from rlcli.modules.state_action import StateActionMLP
from rlcli.modules.value import ValueOperator
from rlcli.specs import Bounded, Categorical, Composite, OneHot, TensorSpec, Unbounded

Activation = str | type[nn.Module]


def build_q_actor(
    observation_spec: Composite,
    action_spec: TensorSpec,
    *,
    net: str = "auto",
    hidden: Sequence[int] | None = None,
    activation: Activation | None = None,
    dueling: bool = False,
    orthogonal: bool = False,
    eps_init: float = 1.0,
    eps_end: float = 0.05,
    eps_frames: int = 10_000,
    in_keys: Sequence[Key] | None = None,
    generator: int | torch.Generator | None = None,
) -> ActorCritic:
    """An epsilon-greedy actor on action values; `.actor` is `TensorDictSequential(QValueActor, EGreedyModule)`.

    Parameters
    ----------
    observation_spec, action_spec, net, hidden, activation, orthogonal, in_keys, generator
        As for `build_actor_critic`.
    dueling : bool
        Values as a state's value plus advantages, from one trunk.
    eps_init, eps_end, eps_frames
        See `EGreedyModule`.

    Raises
    ------
    ConfigError
        The action is not one choice of several.
    """
    keys = observation_keys(observation_spec, in_keys)
    key, spec = single_action(action_spec)
    if not isinstance(spec, Categorical | OneHot):
        raise ConfigError(
            "DQN chooses one of several actions",
            where=f"action '{show(key)}'",
            why=f"it is {spec!r}",
            fix="Use loss=sac for continuous actions, or loss=ppo_clip.",
        )
    with seeded(generator):
        features = None if dueling else spec.n
        module: nn.Module = network(
            observation_spec, keys, features, net=net, hidden=hidden, activation=activation, orthogonal=orthogonal
        )
        if dueling:
            module = DuelingHead(module, module.out_features, spec.n)  # type: ignore[arg-type]
    values = QValueActor(module, in_keys=keys, spec=spec)
    return ActorCritic(TensorDictSequential(values, EGreedyModule(spec, eps_init, eps_end, eps_frames)), None)  # type: ignore[arg-type]


def build_soft_actor_critic(
    observation_spec: Composite,
    action_spec: TensorSpec,
    *,
    net: str = "auto",
    hidden: Sequence[int] | None = None,
    activation: Activation | None = None,
    orthogonal: bool = False,
    critics: int = 2,
    in_keys: Sequence[Key] | None = None,
    generator: int | torch.Generator | None = None,
) -> ActorCritic:
    """A squashed Gaussian actor whose deviation depends on the state, and its critics (`.critic`, a `ModuleList`).

    Raises
    ------
    ConfigError
        The action is not a bounded vector, or an observation is an image.
    """
    keys = observation_keys(observation_spec, in_keys)
    key, spec = single_action(action_spec)
    if not isinstance(spec, Bounded | Unbounded) or not spec.dtype.is_floating_point:
        raise ConfigError(
            "SAC draws continuous actions",
            where=f"action '{show(key)}'",
            why=f"it is {spec!r}",
            fix="Use loss=dqn for a choice of several actions, or loss=ppo_clip.",
        )
    head = action_head(action_spec, len(observation_spec.shape), "tanh_normal")
    with seeded(generator):
        actor_net = network(
            observation_spec, keys, 2 * head.features, net=net, hidden=hidden, activation=activation,
            orthogonal=orthogonal,
        )  # fmt: skip
        stages = TensorDictSequential(
            TensorDictModule(actor_net, keys, ["loc_and_scale"]),
            TensorDictModule(LogScaleExtractor(), ["loc_and_scale"], ["loc", "scale"]),
        )
        width = head.features + _width(observation_spec, keys)
        own = {
            "hidden": (64, 64) if hidden is None else hidden,
            "activation": activation or "tanh",
            "orthogonal": orthogonal,
        }
        values = [
            ValueOperator(StateActionMLP(width, **own), [*keys, head.key], [STATE_ACTION_VALUE])  # type: ignore[arg-type]
            for _ in range(critics)
        ]
    actor = ProbabilisticActor(
        stages, head.param_keys, [head.key], spec=spec, distribution_class=head.distribution_class,
        distribution_kwargs=head.distribution_kwargs,
    )  # fmt: skip
    return ActorCritic(actor, nn.ModuleList(values))  # type: ignore[arg-type]


def _width(observation_spec: Composite, keys: Sequence[Key]) -> int:
    lanes, total = len(observation_spec.shape), 0
    for key in keys:
        shape = observation_spec[key].shape[lanes:]
        if len(shape) != 1 or not observation_spec[key].dtype.is_floating_point:
            raise ConfigError(
                "the critics of SAC read vectors of floats",
                where=f"observation '{show(key)}'",
                why=f"it is {observation_spec[key]!r}",
                fix="Flatten it: env.wrappers=[FlattenObservation].",
            )
        total += math.prod(shape)
    return total
