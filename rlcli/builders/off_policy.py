"""Loss, target networks and update of an off-policy run, from its configuration."""

from __future__ import annotations

import torch

from rlcli.builders.collector import keys_of
from rlcli.builders.optimizer import optimizer_options
from rlcli.config.schemas import Config
from rlcli.errors import ConfigError
from rlcli.keys import ACTION, Key
from rlcli.modules import ActorCritic, QValueActor
from rlcli.modules.distributions.tanh_normal import TanhNormalFamily
from rlcli.objectives import DQNLoss, HardUpdate, SACLoss, SoftUpdate
from rlcli.objectives.bootstrap import BootstrappedLoss
from rlcli.objectives.targets import TargetUpdate
from rlcli.specs import Composite, TensorSpec
from rlcli.training.off_policy_update import OffPolicyUpdate
from rlcli.training.schedules import Linear


def build_loss(cfg: Config, policy: ActorCritic, spec: TensorSpec, generator: torch.Generator) -> BootstrappedLoss:
    """DQN's or SAC's."""
    return build_dqn(cfg, policy) if cfg.loss.kind == "dqn" else build_sac(cfg, policy, spec, generator)


def build_dqn(cfg: Config, policy: ActorCritic) -> DQNLoss:
    """The loss on the greedy part of the actor."""
    network = next((m for m in policy.actor.modules() if isinstance(m, QValueActor)), None)
    if network is None:
        raise ConfigError(
            "DQN needs an actor that chooses by value",
            where=f"policy={cfg.policy.kind}",
            why=f"its builder gave {type(policy.actor).__name__}",
            fix="Return rlcli.modules.QValueActor(net, spec=action_spec), with an EGreedyModule behind it to explore.",
        )
    o = cfg.loss
    return DQNLoss(network, loss_function=o.distance, double_dqn=o.double, gamma=cfg.value.gamma)


def build_sac(cfg: Config, policy: ActorCritic, spec: TensorSpec, generator: torch.Generator) -> SACLoss:
    """The losses of the actor and its critics."""
    if not isinstance(policy.critic, torch.nn.ModuleList):
        raise ConfigError(
            "SAC needs an actor and a list of critics that read observations and action",
            where=f"policy={cfg.policy.kind}",
            fix="Return (actor, nn.ModuleList([ValueOperator(net, ['observation', 'action']), ...])).",
        )
    o = cfg.loss
    loss = SACLoss(
        policy.actor, list(policy.critic), loss_function=o.distance, gamma=cfg.value.gamma, action_spec=_leaf(spec),
        alpha_init=o.alpha_init if o.alpha == "auto" else float(o.alpha), fixed_alpha=o.alpha != "auto",
        generator=generator,
    )  # fmt: skip
    if o.target_entropy == "auto":
        loss.target_entropy += _log_width(loss)
    else:
        loss.target_entropy = float(o.target_entropy)
    return loss


def _leaf(spec: TensorSpec) -> TensorSpec:
    return spec[ACTION] if isinstance(spec, Composite) else spec


def _log_width(loss: SACLoss) -> float:
    """What an action's entropy gains by its units, against actions scaled to [-1, 1]."""
    family = loss.density.family
    return float(torch.from_numpy(family._half).log().sum()) if isinstance(family, TanhNormalFamily) else 0.0


def keys_to_keep(cfg: Config, loss: BootstrappedLoss) -> list[Key]:
    """What a stored row holds: what the loss reads, and nothing else."""
    return [*loss.in_keys, *keys_of(cfg.memory.keep)]


def build_update(cfg: Config, loss: BootstrappedLoss, generator: torch.Generator) -> OffPolicyUpdate:
    """The update stage and the target networks' way to follow."""
    o, targets = cfg.optim, cfg.loss
    follow: TargetUpdate
    if targets.tau == 1.0:
        follow = HardUpdate(loss, value_network_update_interval=targets.target_every)
    else:
        follow = SoftUpdate(loss, tau=targets.tau, every=targets.target_every)
    return OffPolicyUpdate(
        loss, follow, optimizer=o.kind, lr=Linear(o.lr) if o.anneal_lr else o.lr,
        optimizer_options=optimizer_options(o), max_grad_norm=o.max_grad_norm, generator=generator,
        compile=o.compile,
    )  # fmt: skip
