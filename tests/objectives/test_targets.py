"""Target networks: frozen copies that follow when they are told to."""

import pytest
import torch
from face import refused
from tensordict import TensorDict
from torch import nn

from rlcli.errors import ArgumentError, MissingKeyError
from rlcli.modules import MLP, QValueActor
from rlcli.objectives import DQNLoss, HardUpdate, SoftUpdate


def dqn(**options):
    torch.manual_seed(0)
    return DQNLoss(QValueActor(MLP(4, 2, (8,)), action_space="categorical"), **options)


def moved(loss, by=1.0):
    with torch.no_grad():
        for p in loss.value_network.parameters():
            p += by


def weights(network):
    return torch.cat([p.detach().reshape(-1) for p in network.parameters()])


def test_targets_begin_equal_and_are_not_trained():
    loss = dqn()
    assert torch.equal(weights(loss.value_network), weights(loss.target_value_network))
    assert not any(p.requires_grad for p in loss.target_value_network.parameters())
    moved(loss)
    assert not torch.equal(weights(loss.value_network), weights(loss.target_value_network))


@pytest.mark.parametrize("options", [{"tau": 0.25}, {"eps": 0.75}])
def test_a_soft_update_moves_a_share_of_the_way(options):
    loss = dqn()
    update = SoftUpdate(loss, **options)
    before = weights(loss.target_value_network)
    moved(loss)
    update.step()
    assert torch.allclose(weights(loss.target_value_network), before + 0.25, atol=1e-6)


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_an_interval_is_counted_in_steps_and_survives_a_checkpoint(kind):
    loss = dqn()
    make = lambda: HardUpdate(loss, value_network_update_interval=3) if kind == "hard" else SoftUpdate(loss, tau=0.5, every=3)  # noqa: E731, E501  # fmt: skip
    update, before = make(), weights(loss.target_value_network)
    moved(loss)
    update.step()
    update.step()
    assert torch.equal(weights(loss.target_value_network), before)
    resumed = make()
    resumed.load_state_dict(update.state_dict())
    resumed.step()
    assert torch.allclose(weights(loss.target_value_network), before + (1.0 if kind == "hard" else 0.5), atol=1e-6)


def test_an_update_follows_weights_that_were_replaced():
    loss = dqn()
    update = SoftUpdate(loss, tau=1.0)
    loss.value_network.load_state_dict({k: x + 2 for k, x in loss.value_network.state_dict().items()}, assign=True)
    update.step()
    assert torch.equal(weights(loss.value_network), weights(loss.target_value_network))


def replace_bias(net):
    net[-1].bias = nn.Parameter(torch.full_like(net[-1].bias, 7.0))


REPLACED = {
    "the last layer": lambda net: net.__setitem__(-1, nn.Linear(8, 2)),
    "a bias": replace_bias,
    "the memory of a bias": lambda net: setattr(net[-1].bias, "data", torch.full_like(net[-1].bias, 7.0)),
    "the network": lambda net: None,
}


@pytest.mark.parametrize("make", [lambda x: SoftUpdate(x, tau=1.0), lambda x: HardUpdate(x, value_network_update_interval=1)])  # fmt: skip  # noqa: E501
@pytest.mark.parametrize("what", REPLACED)
def test_an_update_follows_whatever_is_replaced(make, what):
    loss = dqn()
    update = make(loss)
    update.step()
    if what == "the network":
        loss.value_network = QValueActor(MLP(4, 2, (8,)), action_space="categorical")
    REPLACED[what](loss.value_network.module[0].module)
    assert not torch.equal(weights(loss.value_network), weights(loss.target_value_network))
    update.step()
    assert torch.equal(weights(loss.value_network), weights(loss.target_value_network))


def test_networks_that_are_no_longer_alike_are_told_of():
    loss = dqn()
    update = SoftUpdate(loss, tau=0.5)
    loss.value_network.module[0].module[-1] = nn.Linear(8, 3)
    refused(ArgumentError, "follow", lambda: update.step())
    nothing = DQNLoss(nn.Flatten(), action_space="categorical")
    refused(ArgumentError, "parameters", lambda: SoftUpdate(nothing, tau=0.5).step())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SoftUpdate(dqn()), "exactly"),
        (lambda: SoftUpdate(dqn(), eps=0.9, tau=0.1), "eps tau"),
        (lambda: SoftUpdate(dqn(), tau=1.5), "tau"),
        (lambda: SoftUpdate(dqn(), tau=0.5, every=-3), "every"),
        (lambda: HardUpdate(dqn(), value_network_update_interval=0), "value_network_update_interval"),
        (lambda: HardUpdate(dqn(delay_value=False)), "delay_value"),
        (lambda: HardUpdate(nn.Linear(1, 1)), "networks"),
        (lambda: dqn(delay_value=False, double_dqn=True), "delay_value"),
        (lambda: dqn(loss_function="l3"), "loss_function"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(make, said):
    refused(ArgumentError, said, lambda: make())


def test_a_batch_without_next_observations_is_told_what_keeps_them():
    columns = {
        "observation": torch.randn(3, 4),
        "action": torch.zeros(3, dtype=torch.int64),
        ("next", "reward"): torch.zeros(3, 1),
        ("next", "terminated"): torch.zeros(3, 1, dtype=torch.bool),
        ("next", "done"): torch.zeros(3, 1, dtype=torch.bool),
    }
    refused(MissingKeyError, "memory=exact", lambda: dqn().terms(columns))
    del columns["action"]
    refused(MissingKeyError, "action", lambda: dqn().terms({**columns, ("next", "observation"): torch.randn(3, 4)}))


def test_the_reward_and_the_ends_of_a_loss_lie_under_next_said_or_not():
    td = TensorDict({"observation": torch.ones(3, 4), "action": torch.tensor([0, 1, 1])}, [3])
    ended = torch.tensor([[False], [True], [False]])
    td["next"] = {"observation": torch.ones(3, 4) / 2, "score": torch.ones(3, 1), "over": ended, "dead": ended}
    found = []
    for below in ((), ("next",)):
        loss = dqn()
        loss.set_keys(reward=(*below, "score"), done=(*below, "over"), terminated=(*below, "dead"))
        found.append(loss(td.copy())["loss"])
        assert loss.next_keys == [("next", "score"), ("next", "over"), ("next", "dead")]
    assert torch.equal(*found)
