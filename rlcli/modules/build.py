"""Policies inferred from an env's specs, or around a user's own network.

observation(s) -> layers -> logits, or loc and scale -> action, and a critic                       (PPO and its kin)
observation(s) -> layers -> action_value -> greedy, but for a share of uniform actions            (DQN)
observation(s) -> layers -> loc, scale -> tanh_normal -> action                                   (SAC, the actor)
observation(s), action -> layers -> state_action_value                                            (SAC, each critic)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import nn

from rlcli.arguments import refuse
from rlcli.errors import ArgumentError, ConfigError
from rlcli.keys import ACTION_VALUE, OBSERVATION, STATE_ACTION_VALUE, STATE_VALUE, Key, show
from rlcli.modules import recurrent
from rlcli.modules.actors import ActorCritic, ActorValueOperator, ValueOperator
from rlcli.modules.head import ActionHead, action_head, single_action
from rlcli.modules.masks import with_action_mask
from rlcli.modules.nets import MLP, evaluation_mode, front_of, network, observation_keys, seeded
from rlcli.specs import Bounded, Categorical, Composite, OneHot, TensorSpec, Unbounded

Activation = str | type[nn.Module]

TRUNK_KEY: Key = "hidden"
RECURRENT = ("gru", "lstm")
POLICY_GAIN, VALUE_GAIN = 0.01, 1.0  # Huang et al. 2022, "The 37 implementation details of PPO", detail 2


def build_actor_critic(
    observation_spec: Composite,
    action_spec: TensorSpec,
    *,
    net: str = "auto",
    hidden: Sequence[int] | None = None,
    activation: Activation | None = None,
    shared: bool | None = False,
    orthogonal: bool = True,
    distribution: str = "auto",
    init_std: float = 1.0,
    state_dependent_std: bool = False,
    in_keys: Sequence[Key] | None = None,
    action_mask_key: Key | None = None,
    return_log_prob: bool = True,
    recurrence: recurrent.Recurrence | None = None,
    generator: int | torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> ActorCritic:
    """An actor and a critic for an env.

    Parameters
    ----------
    observation_spec : Composite
        The env's, batch dims included (its `.shape`).
    action_spec : TensorSpec
        The env's; its kind decides the distribution (`rlcli.modules.head`).
    net : str
        `mlp` (one observation, flattened), `cnn` (one image), `dict` (any number, each encoded, then joined),
        or `auto` (whatever the observations need).
    hidden : sequence of int, optional
        Hidden layers after the encoder. Default (64, 64), or (512,) where an image is seen.
    activation : str or type, optional
        Default `tanh`, or `relu` where an image is seen. Convolutions always use ReLU.
    shared : bool, optional
        One trunk (encoder and hidden layers, written at `hidden`) for actor and critic. None: where it has
        convolutions and hidden layers.
    orthogonal : bool
        Orthogonal weights: gain sqrt(2), 0.01 for the policy's last layer, 1 for the value's.
    distribution : str
        One of `rlcli.modules.DISTRIBUTIONS`.
    init_std : float
        Initial standard deviation of a continuous action.
    state_dependent_std : bool
        The standard deviation is an output of the network, not a free parameter.
    in_keys : sequence of keys, optional
        Which observations to read, in order; default all but the mask and the counters that transforms add.
    action_mask_key : key, optional
        Of an observation with a flag for each option of the action: those whose flag is false are never taken.
    return_log_prob : bool
        The actor also writes `sample_log_prob`.
    recurrence : Recurrence, optional
        A recurrent layer at the end of the trunk, which actor and critic then share.
    generator : int or torch.Generator, optional
        Seed of the initial weights; torch's global random state is then left alone.
    device : torch.device or str, optional

    Returns
    -------
    ActorCritic
        `.actor` writes the action; `.critic` writes `state_value [*B, 1]`. It unpacks into the two.

    Raises
    ------
    ConfigError
        For observations or actions that no network or distribution here fits, with what to use instead.
    """
    keys = observation_keys(observation_spec, in_keys, action_mask_key)
    head = action_head(action_spec, len(observation_spec.shape), distribution)
    split = head.continuous and state_dependent_std
    outputs = head.features * (2 if split else 1)
    net_of = partial(
        network, observation_spec, keys, net=net, hidden=hidden, activation=activation, orthogonal=orthogonal
    )
    actor_of = partial(
        head.actor, spec=action_spec, init_std=init_std, state_dependent_std=split, return_log_prob=return_log_prob
    )
    if recurrence is not None:  # a critic with a state of its own would not be stepped while frames are collected
        shared = True
    if shared is None:
        with torch.random.fork_rng(devices=()):  # an encoder is made, with weights that nobody will see
            front = front_of(observation_spec, keys, net) if hidden is None or len(hidden) else None
        shared = front is not None and front.convolves
    with seeded(generator):
        if shared:
            refuse(hidden is not None and not hidden and recurrence is None, "a shared trunk needs a hidden layer",
                   where="policy.hidden", fix="Set policy.shared=false.", error=ConfigError)  # fmt: skip
            encoder = net_of(None)
            trunk: TensorDictModuleBase = TensorDictModule(encoder, keys, [TRUNK_KEY])
            width: int = encoder.out_features  # type: ignore[assignment]
            if recurrence is not None:
                trunk, width = recurrence.after(encoder, keys, TRUNK_KEY), recurrence.size
            policy_layer = MLP(width, outputs, (), orthogonal=orthogonal, last_gain=POLICY_GAIN)
            value_layer = MLP(width, 1, (), orthogonal=orthogonal, last_gain=VALUE_GAIN)
            operator = ActorValueOperator(
                trunk, actor_of(policy_layer, [TRUNK_KEY]), ValueOperator(value_layer, [TRUNK_KEY], [STATE_VALUE])
            )
            pair = ActorCritic(operator.get_policy_operator(), operator.get_value_operator())
        else:
            actor = actor_of(net_of(outputs, last_gain=POLICY_GAIN), keys)
            value_net = net_of(1, last_gain=VALUE_GAIN)
            pair = ActorCritic(actor, ValueOperator(value_net, keys, [STATE_VALUE]))
    if action_mask_key is not None:
        pair.actor = with_action_mask(pair.actor, action_mask_key, action_spec)  # type: ignore[arg-type]
    return pair if device is None else pair.to(device)


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
    action_mask_key: Key | None = None,
    recurrence: recurrent.Recurrence | None = None,
    generator: int | torch.Generator | None = None,
) -> ActorCritic:
    """An epsilon-greedy actor on action values; `.actor` is `TensorDictSequential(QValueActor, EGreedyModule)`.

    Parameters
    ----------
    observation_spec, action_spec, net, hidden, activation, orthogonal, in_keys, action_mask_key, generator
        As for `build_actor_critic`.
    dueling : bool
        Values as a state's value plus advantages, from one trunk.
    eps_init, eps_end, eps_frames
        See `EGreedyModule`.
    recurrence : Recurrence, optional
        A recurrent layer behind the hidden ones.

    Raises
    ------
    ConfigError
        The action is not one choice of several.
    """
    from rlcli.modules.values import DuelingHead, EGreedyModule, QValueActor  # of no other policy

    keys = observation_keys(observation_spec, in_keys, action_mask_key)
    key, spec = single_action(action_spec)
    if not isinstance(spec, Categorical | OneHot):
        raise ConfigError(
            "DQN chooses one of several actions", where=f"action '{show(key)}'", why=f"it is {spec!r}",
            fix="Use loss=sac for continuous actions, or loss=ppo_clip.",
        )  # fmt: skip
    net_of = partial(
        network, observation_spec, keys, net=net, hidden=hidden, activation=activation, orthogonal=orthogonal
    )
    with seeded(generator):
        module: nn.Module
        if recurrence is not None:
            trunk = recurrence.after(net_of(None), keys, TRUNK_KEY)
            size, same = recurrence.size, nn.Identity()
            head = DuelingHead(same, size, spec.n) if dueling else MLP(size, spec.n, (), orthogonal=orthogonal)
            module = TensorDictSequential(trunk, TensorDictModule(head, [TRUNK_KEY], [ACTION_VALUE]))
        elif dueling:
            module = net_of(None)
            module = DuelingHead(module, module.out_features, spec.n)  # type: ignore[arg-type]
        else:
            module = net_of(spec.n)
    values = QValueActor(module, in_keys=keys, spec=spec, action_mask_key=action_mask_key)
    tries = EGreedyModule(spec, eps_init, eps_end, eps_frames, action_mask_key=action_mask_key)
    return ActorCritic(TensorDictSequential(values, tries), None)  # type: ignore[arg-type]


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
    from rlcli.modules.values import LogScaleExtractor, StateActionMLP  # of no other policy

    keys = observation_keys(observation_spec, in_keys)
    key, spec = single_action(action_spec)
    if not isinstance(spec, Bounded | Unbounded) or not spec.dtype.is_floating_point:
        raise ConfigError(
            "SAC draws continuous actions", where=f"action '{show(key)}'", why=f"it is {spec!r}",
            fix="Use loss=dqn for a choice of several actions, or loss=ppo_clip.",
        )  # fmt: skip
    head = action_head(action_spec, len(observation_spec.shape), "tanh_normal")
    with seeded(generator):
        actor_net = network(
            observation_spec, keys, 2 * head.features, net=net, hidden=hidden, activation=activation,
            orthogonal=orthogonal,
        )  # fmt: skip
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
    actor = head.actor(actor_net, keys, spec=spec, return_log_prob=False, split=LogScaleExtractor())
    return ActorCritic(actor, nn.ModuleList(values))  # type: ignore[arg-type]


def _width(observation_spec: Composite, keys: Sequence[Key]) -> int:
    lanes, total = len(observation_spec.shape), 0
    for key in keys:
        shape = observation_spec[key].shape[lanes:]
        if len(shape) != 1 or not observation_spec[key].dtype.is_floating_point:
            raise ConfigError(
                "the critics of SAC read vectors of floats", where=f"observation '{show(key)}'",
                why=f"it is {observation_spec[key]!r}", fix="Flatten it: env.wrappers=[FlattenObservation].",
            )  # fmt: skip
        total += math.prod(shape)
    return total


def as_actor(
    module: nn.Module,
    observation_spec: Composite,
    action_spec: TensorSpec,
    *,
    in_keys: Sequence[Key] = (OBSERVATION,),
    distribution: str = "auto",
    init_std: float = 1.0,
    return_log_prob: bool = True,
) -> ProbabilisticTensorDictSequential:
    """An actor around `module`, checked.

    Parameters
    ----------
    module : nn.Module
        One of: a plain module mapping the tensors at `in_keys` to logits (discrete), to `loc [*B, d]`
        (continuous; a learned scale is added) or to both `[*B, 2 d]`; a tensordict module that writes
        `logits`, or `loc` and `scale`; or a finished probabilistic actor, which is only checked.
    observation_spec, action_spec : Composite, TensorSpec
        The env's, batch dims included.
    in_keys : sequence of keys
        What a plain module reads.
    distribution, init_std, return_log_prob
        As in `build_actor_critic`.

    Returns
    -------
    ProbabilisticTensorDictSequential

    Raises
    ------
    ArgumentError
        If the module's output has the wrong size, or it is not written where the distribution reads.
    """
    head = action_head(action_spec, len(observation_spec.shape), distribution)
    if isinstance(module, ProbabilisticTensorDictSequential):
        _probe(module, observation_spec)
        return module
    make = partial(head.actor, spec=action_spec, return_log_prob=return_log_prob)
    if isinstance(module, TensorDictModuleBase):
        out = _probe(module, observation_spec)
        missing = [key for key in head.param_keys if key not in module.out_keys]
        if missing:
            raise ArgumentError(
                f"the policy module does not write {' or '.join(map(show, missing))}", where=type(module).__name__,
                why=f"it writes {', '.join(map(show, module.out_keys))}; "
                f"{head.distribution_class.__name__} reads {', '.join(map(show, head.param_keys))}",
                fix="Rename its out_keys.",
            )  # fmt: skip
        for key in head.param_keys:
            _check_width(module, out.get(key).shape[-1], head, [head.features])
        return make(module, list(module.in_keys))
    missing = [key for key in in_keys if key not in observation_spec]
    if missing:
        raise ArgumentError(
            f"the env has no observation {', '.join(map(show, missing))}", where="in_keys",
            why=f"it has {', '.join(map(show, observation_spec.keys(True, True)))}",
            fix="Say what the network is called with: in_keys=[...].",
        )  # fmt: skip
    wrapped = TensorDictModule(module, list(in_keys), ["output"])
    width = _probe(wrapped, observation_spec).get("output").shape[-1]
    _check_width(module, width, head, [head.features] + [2 * head.features] * head.continuous)
    return make(module, list(in_keys), init_std=init_std, state_dependent_std=width != head.features)


def _probe(module: TensorDictModuleBase, observation_spec: Composite) -> TensorDictBase:
    """Return the outputs of one call on zeros, which leaves no trace."""
    with torch.random.fork_rng(devices=()), evaluation_mode(module), torch.no_grad():
        return module(observation_spec.zero())


def _check_width(module: nn.Module, got: int, head: ActionHead, allowed: list[int]) -> None:
    if got not in allowed:
        what = "numbers (loc, or loc and scale)" if head.continuous else "logits"
        raise ArgumentError(
            f"the policy's output has {got} features", where=type(module).__name__,
            why=f"{head.distribution_class.__name__} for action '{show(head.key)}' needs "
            f"{' or '.join(map(str, allowed))} {what}", fix="Change the size of its last layer.",
        )  # fmt: skip
