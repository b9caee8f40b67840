"""Soft actor-critic with twin critics and a learned temperature (arXiv:1812.05905).

Reads the networks' in_keys, those under `next`, action, reward, terminated and what `bootstrap` names. Writes
`loss_actor`, `loss_qvalue`, `loss_alpha` (their sum is minimised; each reaches only its own parameters), diagnostics.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase
from torch import Tensor, nn

from rlcli import arguments
from rlcli.arguments import refuse
from rlcli.errors import ArgumentError
from rlcli.keys import STATE_ACTION_VALUE, TD_ERROR, Key, show, under_next
from rlcli.modules.nets import seeded
from rlcli.modules.watch import ModuleWatch
from rlcli.objectives.bootstrap import BootstrappedLoss, Pair, mean_of, next_columns, target_of
from rlcli.objectives.keyed import Elsewhere
from rlcli.objectives.loss import Terms
from rlcli.objectives.networks import Columns, Density, Lowered, alone, one_a_row, parted
from rlcli.objectives.reduction import per_row, value_error
from rlcli.specs import Composite, TensorSpec


class SACLoss(BootstrappedLoss):
    """Losses of an actor, its critics and the temperature `alpha`.

    Parameters
    ----------
    actor_network : ProbabilisticTensorDictSequential
        Draws differentiable actions, such as a `TanhNormal`'s.
    qvalue_network : TensorDictModuleBase or sequence of them
        Reads observations and action, writes `state_action_value [*B, 1]`. One is copied `num_qvalue_nets` times, with
        weights drawn anew: what it shares with the actor, its copies do not.
    num_qvalue_nets : int
    loss_function : {"l2", "l1", "smooth_l1"}
        Of the critics.
    alpha_init : float
    min_alpha, max_alpha : float, optional
        Bounds of the temperature.
    action_spec : TensorSpec, optional
        For the target entropy, where the actor has no spec.
    fixed_alpha : bool
        The temperature stays; `loss_alpha` is reported and has no gradient.
    target_entropy : float or "auto"
        Auto: minus the number of action dims.
    delay_qvalue : bool
        Targets come from target networks.
    separate_losses : bool
        Keep the critics' gradient out of every parameter that the actor has too.
    reduction : {"mean", "sum", "none"}
    gamma : float
    generator : torch.Generator, optional
        Of the actions that are drawn, on the device of the actor; torch's global one by default.
    **upstream
        See `BootstrappedLoss`.
    """

    fast = True
    closed_form = "gradient_bootstrapped:closed_sac"
    upstream_options: ClassVar[dict[str, Elsewhere]] = {
        **BootstrappedLoss.upstream_options,
        "value_network": ((None,), "Leave it out: targets are those of the qvalue networks."),
        "delay_actor": ((False,), "Leave it out: there is no target network of the actor."),
        "delay_value": (None, ""),  # of the value network that there is not
        "skip_done_states": ((False,), "Leave it out: what follows a terminated step is of no effect here."),
        "scalar_output_mode": ((None,), "Leave it out: diagnostics are means."),
    }

    upstream_keys: ClassVar[tuple[str, ...]] = ("loss_actor", "loss_qvalue", "loss_alpha", "alpha", "entropy")
    default_keys: ClassVar[dict[str, Key]] = {**BootstrappedLoss.default_keys, "state_action_value": STATE_ACTION_VALUE}

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        qvalue_network: TensorDictModuleBase | Sequence[TensorDictModuleBase],
        *,
        num_qvalue_nets: int = 2,
        loss_function: str = "smooth_l1",
        alpha_init: float = 1.0,
        min_alpha: float | None = None,
        max_alpha: float | None = None,
        action_spec: TensorSpec | None = None,
        fixed_alpha: bool = False,
        target_entropy: str | float = "auto",
        delay_qvalue: bool = True,
        separate_losses: bool = False,
        reduction: str | None = "mean",
        gamma: float | None = 0.99,
        generator: torch.Generator | None = None,
        **upstream: Any,
    ) -> None:
        super().__init__(loss_function, gamma, reduction, upstream)
        for name, x in (("alpha_init", alpha_init), ("min_alpha", min_alpha), ("max_alpha", max_alpha)):
            refuse(x is not None and x <= 0, f"{name} must be above 0", why=f"got {x}")
        self.actor_network, self.generator = actor_network, generator
        self.separate_losses, self.num_qvalue_nets = separate_losses, num_qvalue_nets
        self.qvalue_network = nn.ModuleList(_several(qvalue_network, num_qvalue_nets))
        self.target_qvalue_network = target_of(self.qvalue_network) if delay_qvalue else None
        self.delay_qvalue, self.fixed_alpha = delay_qvalue, fixed_alpha
        self.take_up_networks()
        weight = next(actor_network.parameters(), None)
        start = torch.tensor(math.log(alpha_init), device=None if weight is None else weight.device)
        if fixed_alpha:
            self.register_buffer("log_alpha", start)
        else:
            self.log_alpha = nn.Parameter(start)
        self.log_alpha_bounds = tuple(None if x is None else math.log(x) for x in (min_alpha, max_alpha))
        if STATE_ACTION_VALUE not in self.critics[0].out_keys:
            self.tensor_keys.state_action_value = self.critics[0].out_keys[-1]
        spec = action_spec if action_spec is not None else getattr(actor_network, "spec", None)
        self.target_entropy = _entropy(target_entropy, spec, self.tensor_keys.action)

    def __setattr__(self, name: str, value: Any) -> None:
        given = name == "qvalue_network" or (name == "target_qvalue_network" and value is not None)
        if given and not (isinstance(value, nn.ModuleList) and len(value)):
            value = nn.ModuleList(_several(value, self.num_qvalue_nets if name == "qvalue_network" else 1))
        super().__setattr__(name, value)

    def take_up_networks(self) -> None:
        self.density = Density(self.actor_network)
        nets, targets = self.qvalue_network, self.target_qvalue_network or self.qvalue_network
        self._critics = ModuleWatch(nets, partial(_functions, "a qvalue network"))
        self._target_critics = ModuleWatch(targets, partial(_functions, "a target qvalue network"))

    @property
    def critics(self) -> list[Lowered]:
        """The qvalue networks as functions; one that was replaced inside their list is taken up here."""
        return self._critics()

    @property
    def target_critics(self) -> list[Lowered]:
        """Those that targets come from."""
        return self._target_critics()

    @property
    def loss_keys(self) -> list[str]:
        return ["loss_actor", "loss_qvalue", "loss_alpha"]

    @property
    def out_keys(self) -> list[str]:
        return [*self.loss_keys, "alpha", "entropy", "q_value"]

    @property
    def in_keys(self) -> list[Key]:
        own, critic = self.density.in_keys, [key for critic in self.critics for key in critic.in_keys]
        later = [*own, *(k for k in critic if k != self.tensor_keys.action)]
        keys = [*own, *critic, self.tensor_keys.action, *map(under_next, later), *self.next_keys]
        return list(dict.fromkeys(keys))

    @property
    def draws_noise(self) -> bool:
        """Say whether all that it draws is standard normal noise of its `generator`."""
        family = self.density.family
        return family is not None and family.has_rsample

    def target_pairs(self) -> list[Pair]:
        return [] if self.target_qvalue_network is None else [(self.qvalue_network, self.target_qvalue_network)]

    @property
    def alpha(self) -> Tensor:
        """The temperature, without gradient."""
        return self.log_alpha.detach().exp()

    def clamp_alpha_(self) -> Tensor:
        """The temperature, moved into its bounds first: an optimizer knows nothing of them."""
        low, high = self.log_alpha_bounds
        if low is not None or high is not None:
            self.log_alpha.data.clamp_(low, high)
        return self.alpha

    def terms(self, columns: Columns, batch_dims: int = 1) -> Terms:
        critics = self.critics
        read = self._check(critics)
        columns, mask, weights = self.rows(columns, batch_dims)
        alpha = self.clamp_alpha_()
        with torch.no_grad():
            target = self._target(columns, read, alpha, batch_dims)
        own, shared = parted(self.actor_network, self.qvalue_network)
        values: Sequence[Tensor]
        if self.separate_losses and shared:
            values = alone(lambda x: self._values(critics, x, batch_dims), columns, own, shared)
        else:
            values = self._values(critics, columns, batch_dims)
        error = sum(value_error(q, target, self.loss_function) for q in values)
        action, log_prob = self._draw(columns, batch_dims)
        given = {**columns, self.tensor_keys.action: action}
        # the action gets a gradient through the critics, which get none
        drawn = alone(lambda x: self._values(critics, x, batch_dims), given, [], [*own, *shared])
        least = torch.stack(drawn).amin(0)
        entropy = -log_prob.detach()
        terms = {
            "loss_actor": self.reduced(alpha * log_prob - least, mask, weights),
            "loss_qvalue": self.reduced(error, mask, weights),  # type: ignore[arg-type]
            "loss_alpha": self.reduced(self.log_alpha * (entropy - self.target_entropy), mask, weights),
            "alpha": alpha,
            "entropy": mean_of(entropy, mask),
            "q_value": mean_of(values[0], mask),
        }
        with torch.no_grad():
            terms[TD_ERROR] = torch.stack([(q - target).abs() for q in values]).amax(0)
        return terms

    def _check(self, critics: Sequence[Lowered]) -> list[Key]:
        """Check what critics read beside the action."""
        key, written = self.tensor_keys.action, self.tensor_keys.state_action_value
        reads: dict[Key, None] = {}
        for critic in critics:
            if key not in (read := critic.in_keys):
                raise ArgumentError(
                    f"the qvalue_network of SACLoss does not read {show(key)}",
                    why=f"it reads {', '.join(map(show, read))}",
                    fix=f'Use ValueOperator(net, in_keys=["observation", "{show(key)}"]), or loss.set_keys(action=...)',
                )
            if written not in critic.out_keys:
                raise ArgumentError(
                    f"a qvalue_network of SACLoss does not write {show(written)}",
                    why=f"it writes {', '.join(map(show, critic.out_keys))}",
                    fix="Have all of them write one key, or use loss.set_keys(state_action_value=...).",
                )
            reads.update((k, None) for k in read if k != key)
        return list(reads)

    def _target(self, columns: Columns, read: Sequence[Key], alpha: Tensor, batch_dims: int) -> Tensor:
        """Return `r + gamma (min_i Q'_i(s', a') - alpha log pi(a' | s'))`, of critics of these keys."""
        later = next_columns(columns, list(dict.fromkeys([*self.density.in_keys, *read])))
        drawn, log_prob = self._draw(later, batch_dims)
        values = self._values(self.target_critics, {**later, self.tensor_keys.action: drawn}, batch_dims)
        return self.target(columns, torch.stack(values).amin(0) - alpha * log_prob)

    def _draw(self, columns: Columns, batch_dims: int) -> tuple[Tensor, Tensor]:
        """Return a differentiable action and its log-probability `[*B]`."""
        family, size = self.density.family, next(iter(columns.values())).shape[:batch_dims]
        if family is not None and family.has_rsample:
            params, _ = self.density.parameters(columns)
            action, log_prob = family.rsample_and_log_prob(params, self.generator)
            return action, one_a_row(log_prob, size, family)
        dist, _ = self.density.dist(columns, size)
        if not dist.has_rsample:
            raise ArgumentError(
                "SAC needs actions that are differentiable in the actor's outputs",
                why=f"{type(dist).__name__} has no rsample",
                fix="Use policy.distribution=tanh_normal; discrete actions are for loss=dqn.",
            )
        with seeded(self.generator):
            action = dist.rsample()
        return action, one_a_row(dist.log_prob(action), size, dist)

    def _values(self, critics: Sequence[Lowered], columns: Columns, batch_dims: int) -> list[Tensor]:
        key = self.tensor_keys.state_action_value
        size = next(iter(columns.values())).shape[:batch_dims]
        return [per_row(critic(columns, batch_dims)[key], size, show(key)) for critic in critics]


def _functions(name: str, networks: nn.ModuleList) -> list[Lowered]:
    return [Lowered(net, name) for net in networks]  # type: ignore[arg-type]


def _several(given: TensorDictModuleBase | Sequence[TensorDictModuleBase], count: int) -> list[TensorDictModuleBase]:
    if isinstance(given, Sequence | nn.ModuleList) and len(given) and not isinstance(given, str):
        return list(given)
    if not isinstance(given, TensorDictModuleBase):
        raise ArgumentError(
            "SACLoss needs a qvalue_network that works on tensordicts, or a list of them",
            why="the list is empty" if isinstance(given, Sequence | nn.ModuleList) else f"got {type(given).__name__}",
            fix='Wrap it: ValueOperator(net, in_keys=["observation", "action"])',
        )
    nets = [given] + [copy.deepcopy(given) for _ in range(arguments.count("num_qvalue_nets", count) - 1)]
    for net in nets[1:]:
        for module in net.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    return nets


def _entropy(wanted: str | float, spec: TensorSpec | None, key: Key) -> float:
    if wanted != "auto":
        return float(wanted)
    leaf = spec[key] if isinstance(spec, Composite) else spec
    if leaf is None:
        raise ArgumentError(
            "the target entropy cannot be derived", why="the actor has no spec",
            fix="Give action_spec=env.action_spec, or target_entropy=-(number of action dims).",
        )  # fmt: skip
    batch = spec.shape if isinstance(spec, Composite) else ()
    return -float(math.prod(leaf.shape[len(batch) :]) if batch else leaf.shape[-1] if leaf.shape else 1)
