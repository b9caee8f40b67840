"""The parts of an off-policy run: a buffer, its storage and sampler, DQN's or SAC's loss, target networks."""

from __future__ import annotations

import torch

from rlcli.config import build, build_learning
from rlcli.config.schemas import Config
from rlcli.envs import EnvBase
from rlcli.errors import ConfigError
from rlcli.jobs import row_buffer
from rlcli.jobs.given_rows import Given, give
from rlcli.jobs.wiring import Wiring
from rlcli.keys import ACTION, Key
from rlcli.modules import ActorCritic, EGreedyModule, QValueActor
from rlcli.modules.distributions.tanh_normal import TanhNormalFamily
from rlcli.objectives import DQNLoss, HardUpdate, SACLoss, SoftUpdate
from rlcli.objectives.bootstrap import BootstrappedLoss
from rlcli.objectives.targets import TargetUpdate
from rlcli.specs import Composite, TensorSpec
from rlcli.training.off_policy import OffPolicy
from rlcli.training.off_policy_update import OffPolicyUpdate
from rlcli.training.run_folder import Run
from rlcli.training.schedules import Linear

KINDS = ("dqn", "sac")


def wire(cfg: Config, env: EnvBase, policy: ActorCritic, run: Run) -> Wiring:
    """See the top of the file."""
    device = build.devices(cfg)["train_device"]
    generator = torch.Generator(device or "cpu").manual_seed(cfg.seed)
    loss = build_loss(cfg, policy, env.action_spec, generator)
    if device is not None:
        loss.to(device)
    collector = build.build_collector(cfg, env, policy, keys_to_keep(cfg, loss))
    update = build_update(cfg, loss, generator)
    buffer = row_buffer.build_buffer(cfg, run, device, collector)
    exploring = [m for m in policy.actor.modules() if isinstance(m, EGreedyModule)]
    beta = Linear(cfg.sampler.beta, 1.0)
    return Wiring(
        collector,
        update,
        loss.in_keys,
        lambda reporter, saver, play: OffPolicy(
            collector,
            buffer,
            update,
            reporter,
            saver,
            cfg.total_frames,
            updates_per_frame=cfg.optim.updates_per_frame,
            learning_starts=cfg.collector.init_random_frames,
            explore=exploring[0].step if exploring else None,
            beta=beta.at if cfg.sampler.kind == "prioritized" else None,
            evaluation=play,
        ),
        more={"buffer": buffer},
        warm=lambda: row_buffer.load_compiler(cfg),
        begin=lambda loop: begin(cfg, env, loop),
    )


def begin(cfg: Config, env: EnvBase, loop: OffPolicy) -> Given | None:
    """Put the rows into the buffer that `storage.init_from` names."""
    if cfg.storage.init_from is None:
        return None
    given = give(cfg, loop.buffer, loop.collector, env)
    loop.begin_with(given.rows)
    return given


def keys_to_keep(cfg: Config, loss: BootstrappedLoss) -> list[Key]:
    """What a stored row holds: what the loss reads, and nothing else."""
    return [*loss.in_keys, *build.keys_of(cfg.memory.keep)]


# ---- losses ----------------------------------------------------------------------------------------------------
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
        optimizer_options=build_learning.optimizer_options(o), max_grad_norm=o.max_grad_norm, generator=generator,
        compile=o.compile,
    )  # fmt: skip
