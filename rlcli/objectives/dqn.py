"""Q-learning of discrete actions: DQN (Mnih et al. 2015), double (arXiv:1509.06461), n-step and prioritized.

Reads the network's in_keys, those under `next`, action, reward, terminated and what `bootstrap` names. Writes `loss`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from rlcli.errors import ArgumentError
from rlcli.keys import ACTION_VALUE, TD_ERROR, Key, show, under_next
from rlcli.modules.stages import Stage, take_apart_values
from rlcli.modules.values import QValueActor, action_space_of, chosen, greedy
from rlcli.objectives.bootstrap import BootstrappedLoss, Pair, mean_of, next_columns, target_of
from rlcli.objectives.loss import Terms
from rlcli.objectives.networks import Columns, Lowered, plain_stages
from rlcli.objectives.reduction import value_error
from rlcli.specs import TensorSpec


class DQNLoss(BootstrappedLoss):
    """Distance of `Q(s, a)` from `r + gamma max_b Q'(s', b)`.

    Parameters
    ----------
    value_network : QValueActor or nn.Module
        Writes `action_value [*B, n]`. A plain module is wrapped; then `action_space` is needed.
    loss_function : {"l2", "l1", "smooth_l1"}
    delay_value : bool
        Q' is a target network, which an updater moves; otherwise it is Q itself, without gradient.
    double_dqn : bool
        b is the best action of Q, valued by Q'.
    action_space : str or TensorSpec, optional
        "categorical" or "one_hot"; by default what the network says.
    reduction : {"mean", "sum", "none"}
    gamma : float
    **upstream
        See `BootstrappedLoss`.

    Notes
    -----
    The priority of a row is its squared error, as upstream's; a sampler's exponent of half the size makes it |error|.
    """

    upstream_keys: ClassVar[tuple[str, ...]] = ("loss",)
    default_keys: ClassVar[dict[str, Key]] = {**BootstrappedLoss.default_keys, "action_value": ACTION_VALUE}

    def __init__(
        self,
        value_network: QValueActor | nn.Module,
        *,
        loss_function: str = "l2",
        delay_value: bool = True,
        double_dqn: bool = False,
        action_space: str | TensorSpec | None = None,
        reduction: str | None = "mean",
        gamma: float | None = 0.99,
        **upstream: Any,
    ) -> None:
        super().__init__(loss_function, gamma, reduction, upstream)
        if double_dqn and not delay_value:
            raise ArgumentError("double_dqn=True needs delay_value=True", why="without a target network both are one")
        spec = action_space if isinstance(action_space, TensorSpec) else None
        said = None if isinstance(action_space, TensorSpec) else action_space
        if not isinstance(value_network, nn.Module):
            raise ArgumentError(
                "DQNLoss needs a network of action values",
                why=f"got {type(value_network).__name__}",
                fix="Use QValueActor(net, spec=env.action_spec).",
            )
        if not isinstance(value_network, TensorDictModuleBase):
            value_network = QValueActor(value_network, spec=spec, action_space=said)
        known = getattr(value_network, "action_space", None)
        self.action_space: str = action_space_of(said or (known if spec is None else None), spec)  # type: ignore
        self.value_network, self.delay_value, self.double_dqn = value_network, delay_value, double_dqn
        self.target_value_network = target_of(value_network) if delay_value else None
        self.take_up_networks()
        if (parts := take_apart_values(value_network)) is not None:
            self.tensor_keys.action_value = parts.choice.action_value_key

    def take_up_networks(self) -> None:
        self.online = action_values(self.value_network)
        self.delayed = self.online if self.target_value_network is None else action_values(self.target_value_network)

    @property
    def loss_keys(self) -> list[str]:
        return ["loss"]

    @property
    def out_keys(self) -> list[str]:
        return ["loss", "q_value"]

    @property
    def in_keys(self) -> list[Key]:
        own = self.online.in_keys
        return [*own, self.tensor_keys.action, *map(under_next, own), *self.next_keys]

    def target_pairs(self) -> list[Pair]:
        return [] if self.target_value_network is None else [(self.value_network, self.target_value_network)]

    def priority_column(self, error: Tensor) -> Tensor:
        return error.square().unsqueeze(-1)  # as torchrl's; Schaul et al. 2016 rank rows by the error itself

    def terms(self, columns: Columns, batch_dims: int = 1) -> Terms:
        columns, mask, weights = self.rows(columns, batch_dims)
        if (key := self.tensor_keys.action_value) not in self.online.out_keys:
            raise ArgumentError(
                f"the network of DQNLoss does not write {show(key)}",
                why=f"it writes {', '.join(map(show, self.online.out_keys))}",
                fix="Use QValueActor(net, spec=env.action_spec), or loss.set_keys(action_value=...)",
            )
        values = self.online(columns, batch_dims)[key]
        value = chosen(values, self.need(columns, self.tensor_keys.action), self.action_space)
        with torch.no_grad():
            later = next_columns(columns, self.online.in_keys)
            next_values = self.delayed(later, batch_dims)[key]
            if next_values.shape != values.shape:
                raise ArgumentError(
                    "the target network values other actions than the value network",
                    why=f"it writes {tuple(next_values.shape)}, the value network {tuple(values.shape)}",
                    fix="Replace both, and make their updater anew.",
                )
            if self.double_dqn:
                best = greedy(self.online(later, batch_dims)[key], self.action_space)
                next_value = chosen(next_values, best, self.action_space)
            else:
                next_value = next_values.amax(-1)
            target = self.target(columns, next_value)
            error = (value - target).abs()
        loss = self.reduced(value_error(value, target, self.loss_function), mask, weights)
        return {"loss": loss, "q_value": mean_of(value, mask), TD_ERROR: error}


def action_values(network: TensorDictModuleBase) -> Lowered:
    """A `QValueActor` as a function of columns; where it can be taken apart it gives its values and chooses nothing.

    With an action mask its choice lowers the values of illegal actions, so it is called as it is.
    """
    return Lowered(network, _stages_of_values, "the network of action values")


def _stages_of_values(network: TensorDictModuleBase) -> tuple[Stage, ...] | None:
    parts = take_apart_values(network)
    if parts is None or parts.choice.action_mask_key is not None:
        return plain_stages(network)
    return parts.stages
