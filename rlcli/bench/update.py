"""`rlcli bench update`: one PPO update of ours against the same update written by hand in plain torch.

The batch is random; both sides see the same minibatches in the same order, and their weights are compared after it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from rlcli.bench import update_loops
from rlcli.bench.harness import Report, interleave, ratio
from rlcli.bench.peers import torchrl_learning
from rlcli.errors import NumericsError
from rlcli.learning.update import Update
from rlcli.modules import ActorCritic, build_actor_critic
from rlcli.objectives import ClipPPOLoss
from rlcli.objectives.value import GAE
from rlcli.specs import Bounded, Categorical, Composite, Unbounded

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
        return torchrl_learning.update(policy.actor, policy.critic, batch.exclude("next"), **options)
    keys = {"obs": "observation", "action": "action", "log_prob": "sample_log_prob"}
    columns: dict[str, Tensor] = {k: batch[key] for k, key in keys.items()}
    columns |= {"advantage": batch["advantage"].squeeze(-1), "target": batch["value_target"].squeeze(-1)}
    adam: dict[str, Any] = {"foreach": True} if name == HAND else {"fused": True}
    critic = policy.critic.module
    if settings["action"] == "box":
        net, scale = (stage.module for stage in policy.actor.module[0].module)
        return update_loops.continuous(net, scale.log_std, critic, columns, **options, **adam)
    return update_loops.discrete(policy.actor.module[0].module, critic, columns, **options, **adam)


def _weights_after(name: str, policy: ActorCritic, batch: TensorDictBase, settings: dict[str, Any]) -> Tensor | None:
    """All weights after one update from the same start; None where a peer is missing."""
    policy = copy.deepcopy(policy)
    update = _side(name, policy, batch, settings)
    if update is None:
        return None
    update()
    return torch.cat([p.detach().flatten() for p in policy.parameters()])
