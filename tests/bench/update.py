"""`python -m tests.bench update`: one PPO update of ours against the same update written by hand in plain torch.

The batch is random; both sides see the same minibatches in the same order, and their weights are compared after it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from rlcli.bench.harness import Report, interleave, ratio
from rlcli.errors import NumericsError
from rlcli.learning.update import Update
from rlcli.modules import ActorCritic, build_actor_critic
from rlcli.objectives import ClipPPOLoss
from rlcli.objectives.value import GAE
from rlcli.specs import Bounded, Categorical, Composite, Unbounded
from tests.bench.peers.learning import torchrl_update

TOLERANCE = 1e-5  # of the weights after one epoch, in float32
HAND, FUSED, OURS, GENERAL = "plain torch, foreach Adam", "plain torch, fused Adam", "rlcli", "rlcli, autograd"


def measure(settings: dict[str, Any]) -> Report:
    """Check that all sides do the same, then time them in turns."""
    policy = _policy(settings)
    batch = _batch(policy, settings)
    report = Report("update", settings, unit="minibatch step")
    one_epoch = settings | {"optim.epochs": 1}
    reference = _weights_after(HAND, policy, batch, one_epoch)
    assert reference is not None
    for name in (FUSED, OURS, GENERAL, *(["torchrl"] if settings["peers"] else [])):
        weights = _weights_after(name, policy, batch, one_epoch)
        if weights is None:
            report.leave_out("torchrl")
            continue
        gap = float((weights - reference).abs().max())
        report.checks[f"weights of {name} and of {HAND} after one epoch"] = f"largest difference {gap:.1e}"
        if gap > TOLERANCE:
            raise NumericsError(f"{name} does not do the same update", why=f"weights differ by {gap:.1e}")
    sides = {name: _side(name, copy.deepcopy(policy), batch, settings) for name in (HAND, FUSED, OURS, GENERAL)}
    if not report.notes and settings["peers"]:
        sides["torchrl"] = _side("torchrl", copy.deepcopy(policy), batch, settings)
    steps = settings["optim.epochs"] * -(-settings["collector.frames_per_batch"] // settings["sampler.batch_size"])
    report.sides = interleave(sides, settings["rounds"], per=steps)
    report.ratios = [
        ratio(report.sides, OURS, HAND, "<= 1.05"),
        ratio(report.sides, OURS, FUSED),
        ratio(report.sides, GENERAL, HAND),
    ]
    if "torchrl" in sides:
        report.ratios.append(ratio(report.sides, "torchrl", OURS))
    return report


def _policy(settings: dict[str, Any]) -> ActorCritic:
    observations = Composite({"observation": Unbounded((settings["observation"],))})
    action = (
        Bounded(-1.0, 1.0, (settings["actions"],)) if settings["action"] == "box" else Categorical(settings["actions"])
    )
    options = {"hidden": settings["policy.hidden"], "activation": settings["policy.activation"]}
    return build_actor_critic(observations, action, generator=0, **options)


def _batch(policy: ActorCritic, settings: dict[str, Any]) -> TensorDictBase:
    """A full batch `[N]` with advantages; the old log-probabilities are those of a slightly different policy."""
    generator = torch.Generator().manual_seed(0)
    n = settings["collector.frames_per_batch"]
    obs, following = (torch.randn(n, settings["observation"], generator=generator) for _ in range(2))
    td = TensorDict({"observation": obs}, batch_size=[n])
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        law = policy.actor.get_dist(td.copy())
        td["action"] = law.sample()
        td["sample_log_prob"] = law.log_prob(td["action"]) + 0.1 * torch.randn(n)
    done = torch.rand(n, 1, generator=generator) < 0.05
    reward = torch.randn(n, 1, generator=generator)
    td["next"] = TensorDict(
        {"observation": following, "reward": reward, "done": done, "terminated": done}, batch_size=[n]
    )
    return GAE(gamma=0.99, lmbda=0.95, value_network=policy.critic, average_gae=True)(td)


def _side(name: str, policy: ActorCritic, batch: TensorDictBase, settings: dict[str, Any]):
    """The work of one round: an update that goes on from the weights of the last."""
    options: dict[str, Any] = {
        "epochs": settings["optim.epochs"],
        "batch_size": settings["sampler.batch_size"],
        "generator": torch.Generator().manual_seed(1),
    }
    if name in (OURS, GENERAL):
        loss = ClipPPOLoss(*policy, critic_coeff=0.5, loss_critic_type="l2")
        way = "auto" if name == OURS else "autograd"
        update = Update(loss, lr=3e-4, optimizer_options={"eps": 1e-5}, gradient=way, **options)
        return lambda: update(batch)
    if name == "torchrl":
        return torchrl_update(policy.actor, policy.critic, batch.exclude("next"), **options)
    keys = {"obs": "observation", "action": "action", "log_prob": "sample_log_prob"}
    columns: dict[str, Tensor] = {k: batch[key] for k, key in keys.items()}
    columns |= {"advantage": batch["advantage"].squeeze(-1), "target": batch["value_target"].squeeze(-1)}
    adam: dict[str, Any] = {"foreach": True} if name == HAND else {"fused": True}
    critic = policy.critic.module
    if settings["action"] == "box":
        net, scale = (stage.module for stage in policy.actor.module[0].module)
        return _by_hand(net, critic, columns, _gaussian(scale.log_std), [scale.log_std], **options, **adam)
    return _by_hand(policy.actor.module[0].module, critic, columns, _categorical, **options, **adam)


def _by_hand(
    actor: nn.Module,
    critic: nn.Module,
    batch: dict[str, Tensor],
    law: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    beside: Sequence[nn.Parameter] = (),
    *,
    epochs: int,
    batch_size: int,
    generator: torch.Generator,
    **adam: Any,
) -> Callable[[], None]:
    """The update in plain torch, nothing hidden, on flat columns `[N, ...]`; it computes no diagnostics, ours does.

    Parameters
    ----------
    law : callable
        From what the actor gives and the actions to their log-probabilities and entropies.
    beside : sequence of Parameter
        The actor's parameters that are not its net's.
    adam
        `foreach=True` or `fused=True`.
    """
    parameters = [*actor.parameters(), *beside, *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=3e-4, eps=1e-5, **adam)
    n = len(batch["action"])

    def update() -> None:
        for _ in range(epochs):
            for rows in torch.randperm(n, generator=generator).split(batch_size):
                obs, action, old, advantage, target = (
                    batch[key][rows] for key in ("obs", "action", "log_prob", "advantage", "target")
                )
                log_prob, entropy = law(actor(obs), action)
                ratio = (log_prob - old).exp()
                gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
                error = (critic(obs).squeeze(-1) - target).pow(2).mean()
                optimizer.zero_grad()
                (-gain + 0.5 * error - 0.01 * entropy.mean()).backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()

    return update


def _categorical(logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    log_p = logits.log_softmax(-1)
    return log_p.gather(-1, action.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def _gaussian(log_std: Tensor) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Actions `[N, D]` with a learned deviation that does not look at the state."""

    def law(mean: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        normal = torch.distributions.Normal(mean, log_std.exp(), validate_args=False)
        return normal.log_prob(action).sum(-1), normal.entropy().sum(-1)

    return law


def _weights_after(name: str, policy: ActorCritic, batch: TensorDictBase, settings: dict[str, Any]) -> Tensor | None:
    """All weights after one update from the same start; None where a peer is missing."""
    policy = copy.deepcopy(policy)
    update = _side(name, policy, batch, settings)
    if update is None:
        return None
    update()
    return torch.cat([p.detach().flatten() for p in policy.parameters()])
