"""Q-learning of discrete actions: DQN (Mnih et al. 2015), double (arXiv:1509.06461), n-step, prioritized and recurrent
(R2D2, Kapturowski et al. 2019).

Reads the network's in_keys, those under `next`, action, reward, terminated and what `bootstrap` names. Writes `loss`.
A network that remembers learns from slices of trajectories, `is_init` where they begin (`sequences`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from rlcli import arguments
from rlcli.arguments import refuse
from rlcli.errors import ArgumentError
from rlcli.keys import ACTION_VALUE, BURN_IN, IS_INIT, STEPS_TO_NEXT_OBS, TD_ERROR, Key, show, under_next, unravel
from rlcli.modules.stages import take_apart
from rlcli.modules.values import QValueActor, QValueModule, action_space_of, chosen, greedy
from rlcli.objectives.bootstrap import BootstrappedLoss, Pair, mean_of, next_columns, target_of
from rlcli.objectives.loss import Terms
from rlcli.objectives.networks import Columns, Lowered
from rlcli.objectives.reduction import value_error
from rlcli.specs import TensorSpec
from rlcli.transforms.primer import recurrent_parts

if TYPE_CHECKING:
    from rlcli.objectives.sequences import SequenceActionValues
    from rlcli.objectives.value.reading import Ends

START_STATES = ("stored", "zero")


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
    n_steps : int
        Of a recurrent network: rewards that a target sums before the next value, fewer where a slice ends.
    start_state : {"stored", "zero"}
        Of a recurrent network: the state that slices begin from. One that was not stored is zero.
    **upstream
        See `BootstrappedLoss`.

    Notes
    -----
    The priority of a row is its squared error, as upstream's; a sampler's exponent of half the size makes it |error|.
    """

    fast = True
    closed_form = "gradient_bootstrapped:closed_dqn"
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
        n_steps: int = 1,
        start_state: str = "stored",
        **upstream: Any,
    ) -> None:
        super().__init__(loss_function, gamma, reduction, upstream)
        arguments.choice("start_state", start_state, START_STATES)
        self.n_steps, self.start_state = arguments.count("n_steps", n_steps), start_state
        if double_dqn and not delay_value:
            raise ArgumentError("double_dqn=True needs delay_value=True", why="without a target network both are one")
        spec = action_space if isinstance(action_space, TensorSpec) else None
        space = None if isinstance(action_space, TensorSpec) else action_space
        refuse(not isinstance(value_network, nn.Module), "DQNLoss needs a network of action values",
               why=f"got {type(value_network).__name__}",
               fix="Use QValueActor(net, spec=env.action_spec).")  # fmt: skip
        if not isinstance(value_network, TensorDictModuleBase):
            value_network = QValueActor(value_network, spec=spec, action_space=space)
        declared = getattr(value_network, "action_space", None)
        self.action_space: str = action_space_of(space or (declared if spec is None else None), spec)  # type: ignore
        self.value_network, self.delay_value, self.double_dqn = value_network, delay_value, double_dqn
        self.target_value_network = target_of(value_network) if delay_value else None
        if (parts := take_apart(value_network)) is not None and isinstance(parts[1], QValueModule):
            self.tensor_keys.action_value = parts[1].action_value_key
        self.take_up_networks()
        refuse(n_steps > 1 and not self.recurrent, "n_steps are those of a recurrent network",
               why="the batch of another one says how many it has",
               fix="Use MultiStepTransform(n_steps, gamma) in the buffer.")  # fmt: skip

    def take_up_networks(self) -> None:
        self.online = self._values_of(self.value_network)
        self.delayed = self.online if self.target_value_network is None else self._values_of(self.target_value_network)

    def set_keys(self, **names: Key) -> None:
        super().set_keys(**names)
        self.take_up_networks()

    def _values_of(self, network: TensorDictModuleBase) -> Lowered | SequenceActionValues:
        online = Lowered(network, "the network of action values", without=QValueModule)
        if recurrent_parts(network):
            from rlcli.objectives.sequences import SequenceActionValues

            return SequenceActionValues(online, self.tensor_keys.action_value, self.start_state == "stored")
        return online

    @property
    def loss_keys(self) -> list[str]:
        return ["loss"]

    @property
    def out_keys(self) -> list[str]:
        return ["loss", "q_value"]

    @property
    def in_keys(self) -> list[Key]:
        own = self.online.in_keys
        observed = own if isinstance(self.online, Lowered) else self.online.observed
        return [*own, self.tensor_keys.action, *map(under_next, observed), *self.next_keys]

    @property
    def optional_keys(self) -> Sequence[Key]:
        return [*super().optional_keys, BURN_IN] if self.recurrent else super().optional_keys

    def target_pairs(self) -> list[Pair]:
        return [] if self.target_value_network is None else [(self.value_network, self.target_value_network)]

    def priority_column(self, error: Tensor) -> Tensor:
        return error.square().unsqueeze(-1)  # as torchrl's; Schaul et al. 2016 rank rows by the error itself

    def next_value(self, values: Tensor, target_values: Tensor) -> Tensor:
        """Value `[*B]` of the next state, of its action values `[*B, n]` by the network and by the target network."""
        if self.double_dqn:
            return chosen(target_values, greedy(values, self.action_space), self.action_space)
        return target_values.amax(-1)

    def terms(self, columns: Columns, batch_dims: int = 1) -> Terms:
        columns, mask, weights = self.rows(columns, batch_dims)
        key = self.tensor_keys.action_value
        if key not in map(unravel, self.value_network.out_keys):
            raise ArgumentError(
                f"the network of DQNLoss does not write {show(key)}",
                why=f"it writes {', '.join(map(show, self.value_network.out_keys))}",
                fix="Use QValueActor(net, spec=env.action_spec), or loss.set_keys(action_value=...)",
            )
        online, delayed = self.online, self.delayed
        if not (isinstance(online, Lowered) and isinstance(delayed, Lowered)):
            return self._of_slices(columns, batch_dims, mask, weights)
        values = online(columns, batch_dims)[key]
        with torch.no_grad():
            later = next_columns(columns, online.in_keys)
            next_values = delayed(later, batch_dims)[key]
            choosing = online(later, batch_dims)[key] if self.double_dqn else next_values
        return self._from(columns, values, choosing, next_values, None, mask, weights)

    def _of_slices(
        self, columns: dict[Key, Tensor], batch_dims: int, mask: Tensor | None, weights: Tensor | None
    ) -> Terms:
        """Return `terms` of a network that remembers; errors of rows that only warm it up are 0."""
        from rlcli.objectives.sequences import flat, slice_ends, without_burn_in

        if STEPS_TO_NEXT_OBS in columns:
            raise ArgumentError(
                "a recurrent network takes the next row for the successor",
                why=f"the batch has {show(STEPS_TO_NEXT_OBS)}: its successors are several steps away",
                fix="Leave out MultiStepTransform, and use DQNLoss(n_steps=...).",
            )
        self.need(columns, IS_INIT)
        flags, burn, burn_in = columns.get(BURN_IN), None, None
        if flags is not None:
            burn = flags.bool()
            columns, burn_in = without_burn_in(flat(columns, batch_dims), burn.reshape(-1))
            mask, weights = (None if x is None else x.reshape(-1)[~burn.reshape(-1)] for x in (mask, weights))
            batch_dims = 1
        size = self.need(columns, self.next_keys[0]).shape[:batch_dims]
        ends = slice_ends(columns, self.next_keys[1], self.ended_key(columns), size)
        online, delayed = self.online, self.delayed
        assert not (isinstance(online, Lowered) or isinstance(delayed, Lowered))
        values, following = online(columns, ends, burn_in)
        following = following.detach()
        with torch.no_grad():
            next_values = following if delayed is online else delayed(columns, ends, burn_in)[1]
        choosing = following if self.double_dqn else next_values
        terms = self._from(columns, values, choosing, next_values, ends, mask, weights)
        if burn is not None:
            error = terms[TD_ERROR]
            terms[TD_ERROR] = error.new_zeros(burn.shape).masked_scatter_(~burn, error)
        return terms

    def _from(
        self,
        columns: Columns,
        values: Tensor,
        choosing: Tensor,
        next_values: Tensor,
        ends: Ends | None,
        mask: Tensor | None,
        weights: Tensor | None,
    ) -> Terms:
        """Return the terms from values `[*B, n]`: of a step, to choose the next action by, and of the target."""
        value = chosen(values, self.need(columns, self.tensor_keys.action), self.action_space)
        with torch.no_grad():
            need_same_actions(values, next_values)
            next_value = self.next_value(choosing, next_values)
            target = self.target(columns, next_value)
            for _ in range(self.n_steps - 1):  # r + gamma (r' + gamma (... Q)), up to an end
                assert ends is not None
                after = torch.where(ends.cut[..., :-1], next_value[..., :-1], target[..., 1:])
                target = self.target(columns, torch.cat([after, next_value[..., -1:]], -1))
            error = (value - target).abs()
        loss = self.reduced(value_error(value, target, self.loss_function), mask, weights)
        return {"loss": loss, "q_value": mean_of(value, mask), TD_ERROR: error}


def need_same_actions(values: Tensor, next_values: Tensor) -> None:
    """Raise where values `[*B, n]` by the target network are of other actions."""
    if next_values.shape != values.shape:
        raise ArgumentError(
            "the target network values other actions than the value network",
            why=f"it writes {tuple(next_values.shape)}, the value network {tuple(values.shape)}",
            fix="Replace both, and make their updater anew.",
        )
