"""Actor and critic inferred from an env's specs: nobody types an input size.

observation(s) -> encoder -> hidden layers -> logits | loc, scale -> action
                                         \\-> state_value              (on a second net, unless shared)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from tensordict.nn import TensorDictModule
from torch import nn

from rlcli.errors import ConfigError
from rlcli.keys import STATE_VALUE, Key
from rlcli.modules.action_head import action_head
from rlcli.modules.actor_critic import ActorCritic
from rlcli.modules.initialise import seeded
from rlcli.modules.mlp import MLP
from rlcli.modules.network import convolves, network, observation_keys
from rlcli.modules.value import ActorValueOperator, ValueOperator
from rlcli.specs import Composite, TensorSpec

TRUNK_KEY: Key = "hidden"
POLICY_GAIN, VALUE_GAIN = 0.01, 1.0  # Huang et al. 2022, "The 37 implementation details of PPO", detail 2


def build_actor_critic(
    observation_spec: Composite,
    action_spec: TensorSpec,
    *,
    net: str = "auto",
    hidden: Sequence[int] | None = None,
    activation: str | type[nn.Module] | None = None,
    shared: bool | None = False,
    orthogonal: bool = True,
    distribution: str = "auto",
    init_std: float = 1.0,
    state_dependent_std: bool = False,
    in_keys: Sequence[Key] | None = None,
    return_log_prob: bool = True,
    generator: int | torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> ActorCritic:
    """An actor and a critic for an env.

    Parameters
    ----------
    observation_spec : Composite
        The env's, batch dims included (its `.shape`).
    action_spec : TensorSpec
        The env's; its kind decides the distribution (`rlcli.modules.action_head`).
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
        Which observations to read, in order; default all but the counters that transforms add.
    return_log_prob : bool
        The actor also writes `sample_log_prob`.
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
    keys = observation_keys(observation_spec, in_keys)
    head = action_head(action_spec, len(observation_spec.shape), distribution)
    split = head.continuous and state_dependent_std
    outputs = head.features * (2 if split else 1)
    net_of = partial(
        network, observation_spec, keys, net=net, hidden=hidden, activation=activation, orthogonal=orthogonal
    )
    actor_of = partial(
        head.actor,
        spec=action_spec,
        init_std=init_std,
        state_dependent_std=split,
        return_log_prob=return_log_prob,
    )
    if shared is None:
        shared = (hidden is None or len(hidden) > 0) and convolves(observation_spec, keys, net)
    with seeded(generator):
        if shared:
            if hidden is not None and not hidden:
                raise ConfigError(
                    "a shared trunk needs a hidden layer",
                    where="policy.hidden",
                    fix="Set policy.shared=false.",
                )
            trunk = net_of(None)
            policy_layer = MLP(trunk.out_features, outputs, (), orthogonal=orthogonal, last_gain=POLICY_GAIN)
            value_layer = MLP(trunk.out_features, 1, (), orthogonal=orthogonal, last_gain=VALUE_GAIN)
            operator = ActorValueOperator(
                TensorDictModule(trunk, keys, [TRUNK_KEY]),
                actor_of(policy_layer, [TRUNK_KEY]),
                ValueOperator(value_layer, [TRUNK_KEY], [STATE_VALUE]),
            )
            pair = ActorCritic(operator.get_policy_operator(), operator.get_value_operator())
        else:
            actor = actor_of(net_of(outputs, last_gain=POLICY_GAIN), keys)
            value_net = net_of(1, last_gain=VALUE_GAIN)
            pair = ActorCritic(actor, ValueOperator(value_net, keys, [STATE_VALUE]))
    return pair if device is None else pair.to(device)
