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
from rlcli.bench.settings import SETTINGS, read
from rlcli.errors import NumericsError
from rlcli.modules import ActorCritic, build_actor_critic
from rlcli.objectives import ClipPPOLoss
from rlcli.objectives.value import GAE
from rlcli.specs import Bounded, Categorical, Composite, Unbounded
from rlcli.training.update import Update

TOLERANCE = 1e-5  # of the weights after one epoch, in float32
HAND, FUSED, OURS, GENERAL = "plain torch, foreach Adam", "plain torch, fused Adam", "rlcli", "rlcli, autograd"


def run(overrides: list[str]) -> dict[str, Any]:
    """Measure; the result is `Report.as_dict()`."""
    return measure(overrides).as_dict()


def measure(overrides: list[str]) -> Report:
    """Check that all sides do the same, then time them in turns."""
    given = read(SETTINGS["update"], overrides)
    torch.set_num_threads(given["threads"])
    policy = _policy(given)
    batch = _batch(policy, given)
    report = Report("update", given, unit="minibatch step")
    one_epoch = given | {"optim.epochs": 1}
    reference = _weights_after(HAND, policy, batch, one_epoch)
    assert reference is not None
    for name in (FUSED, OURS, GENERAL, *(["torchrl"] if given["peers"] else [])):
        weights = _weights_after(name, policy, batch, one_epoch)
        if weights is None:
            report.notes.append("torchrl is not installed: left out (pip install 'rlcli[peers]')")
            continue
        gap = float((weights - reference).abs().max())
        report.checks[f"weights of {name} and of {HAND} after one epoch"] = f"largest difference {gap:.1e}"
        if gap > TOLERANCE:
            raise NumericsError(f"{name} does not do the same update", why=f"weights differ by {gap:.1e}")
    sides = {name: _side(name, copy.deepcopy(policy), batch, given) for name in (HAND, FUSED, OURS, GENERAL)}
    if not report.notes and given["peers"]:
        sides["torchrl"] = _side("torchrl", copy.deepcopy(policy), batch, given)
    steps = given["optim.epochs"] * -(-given["collector.frames_per_batch"] // given["sampler.batch_size"])
    report.sides = interleave(sides, given["rounds"], per=steps)
    report.ratios = [
        ratio(report.sides, OURS, HAND, "<= 1.05"),
        ratio(report.sides, OURS, FUSED),
        ratio(report.sides, GENERAL, HAND),
    ]
    if "torchrl" in sides:
        report.ratios.append(ratio(report.sides, "torchrl", OURS))
    return report


def _policy(given: dict[str, Any]) -> ActorCritic:
    observations = Composite({"observation": Unbounded((given["observation"],))})
    action = Bounded(-1.0, 1.0, (given["actions"],)) if given["action"] == "box" else Categorical(given["actions"])
    options = {"hidden": given["policy.hidden"], "activation": given["policy.activation"]}
    return build_actor_critic(observations, action, generator=0, **options)


def _batch(policy: ActorCritic, given: dict[str, Any]) -> TensorDictBase:
    """A full batch `[N]` with advantages; the old log-probabilities are those of a slightly different policy."""
    generator = torch.Generator().manual_seed(0)
    n = given["collector.frames_per_batch"]
    obs, following = (torch.randn(n, given["observation"], generator=generator) for _ in range(2))
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


def _side(name: str, policy: ActorCritic, batch: TensorDictBase, given: dict[str, Any]):
    """The work of one round: an update that goes on from the weights of the last."""
    options: dict[str, Any] = {
        "epochs": given["optim.epochs"],
        "batch_size": given["sampler.batch_size"],
        "generator": torch.Generator().manual_seed(1),
    }
    if name in (OURS, GENERAL):
        loss = ClipPPOLoss(*policy, critic_coeff=0.5, loss_critic_type="l2")
        way = "auto" if name == OURS else "autograd"
        update = Update(loss, lr=3e-4, optimizer_options={"eps": 1e-5}, gradient=way, **options)
        return lambda: update(batch)
    if name == "torchrl":
        from rlcli.bench.peers import torchrl_update

        return torchrl_update.update(policy.actor, policy.critic, batch.exclude("next"), **options)
    keys = {"obs": "observation", "action": "action", "log_prob": "sample_log_prob"}
    columns: dict[str, Tensor] = {k: batch[key] for k, key in keys.items()}
    columns |= {"advantage": batch["advantage"].squeeze(-1), "target": batch["value_target"].squeeze(-1)}
    adam: dict[str, Any] = {"foreach": True} if name == HAND else {"fused": True}
    critic = policy.critic.module
    if given["action"] == "box":
        net, scale = (stage.module for stage in policy.actor.module[0].module)
        return update_loops.continuous(net, scale.log_std, critic, columns, **options, **adam)
    return update_loops.discrete(policy.actor.module[0].module, critic, columns, **options, **adam)


def _weights_after(name: str, policy: ActorCritic, batch: TensorDictBase, given: dict[str, Any]) -> Tensor | None:
    """All weights after one update from the same start; None where a peer is missing."""
    policy = copy.deepcopy(policy)
    update = _side(name, policy, batch, given)
    if update is None:
        return None
    update()
    return torch.cat([p.detach().flatten() for p in policy.parameters()])
