"""An updater of the user's own is called where it says it wants to be; ours bring weights where they belong."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch
from face import refused
from tensordict import TensorDict, TensorDictBase
from torch import nn

from rlcli.errors import ArgumentError
from rlcli.weight_update import (
    MultiProcessedWeightUpdater,
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
    VanillaWeightUpdater,
    WeightUpdaterBase,
    open_receiver,
)


class Halved(WeightUpdaterBase):
    """Takes weights from a server, halves them, and leaves worker 1 out. It calls no `super().__init__`."""

    def __init__(self) -> None:
        self.calls = []

    def _get_server_weights(self):
        return TensorDict(a=torch.tensor(8.0))

    def _maybe_map_weights(self, policy_or_weights):
        return super()._maybe_map_weights(policy_or_weights).apply(lambda x: x / 2)

    def all_worker_ids(self):
        return [0, 1, 2]

    def _skip_update(self, worker_id):
        return worker_id == 1

    def _sync_weights_with_worker(self, *, worker_id=None, server_weights):
        self.calls.append((worker_id, {k: v.sum().item() for k, v in server_weights.items()}))


class Collector:
    """Something that can be referred to weakly."""


def test_every_step_of_a_users_updater_is_called():
    updater, after = Halved(), []
    updater.register_post_hook(lambda: after.append(len(updater.calls)))
    updater.push_weights()
    assert updater.calls == [(0, {"a": 4.0}), (2, {"a": 4.0})] and after == [2]
    updater(TensorDict(a=torch.tensor(2.0)), worker_ids=2)
    assert updater.calls[2:] == [(2, {"a": 1.0})] and after == [2, 3]
    updater(nn.Linear(1, 1, bias=False).requires_grad_(False), [1, 0])
    assert [worker for worker, _ in updater.calls[3:]] == [0] and updater.calls[3][1].keys() == {"weight"}


def test_an_updater_knows_the_collectors_that_are_left():
    updater, one, two = Halved(), Collector(), Collector()
    assert updater.collector is None and Halved.from_policy(nn.Linear(1, 1)) is None
    updater.register_collector(one)
    assert updater.collector is one
    updater.register_collector(two)
    with refused(ArgumentError, "serves"):
        _ = updater.collector
    assert updater.collectors == [one, two]
    del one
    gc.collect()
    assert updater.collectors == [two] and Halved().collectors == []


def test_a_base_without_a_way_to_workers_cannot_be_made():
    refused(TypeError, "_sync_weights_with_worker", lambda: WeightUpdaterBase())


@pytest.mark.parametrize("held", ["module", "tensordict"])
def test_vanilla_overwrites_the_policy(held):
    policy, source = nn.Linear(2, 2), nn.Linear(2, 2)
    kept = policy if held == "module" else TensorDict.from_module(policy)
    updater = VanillaWeightUpdater(weight_getter=lambda: TensorDict.from_module(source).data, policy_weights=kept)
    updater.push_weights()
    assert torch.equal(policy.weight, source.weight)
    updater.push_weights(nn.Linear(2, 2).requires_grad_(False))
    assert not torch.equal(policy.weight, source.weight)
    VanillaWeightUpdater.from_policy(policy).push_weights(source)
    assert torch.equal(policy.weight, source.weight)
    VanillaWeightUpdater(policy_weights=policy).push_weights()  # nothing to get them from
    assert torch.equal(policy.weight, source.weight)
    refused(ArgumentError, "fit", lambda: VanillaWeightUpdater.from_policy(policy).push_weights(nn.Linear(3, 2)))


@pytest.mark.parametrize("held", ["module", "tensordict", "data"])
@pytest.mark.parametrize("form", ["module", "tensordict", "state_dict", "arrays"])
def test_vanilla_takes_weights_in_every_form_or_none(held, form):
    def make():
        net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
        net[2].weight = net[0].weight
        return net

    policy, source = make(), make()
    kept = policy if held == "module" else TensorDict.from_module(policy)
    updater = VanillaWeightUpdater(policy_weights=kept.data if held == "data" else kept)
    weights = {
        "module": source, "tensordict": TensorDict.from_module(source), "state_dict": source.state_dict(),
        "arrays": {name: x.numpy() for name, x in source.state_dict().items()},
    }[form]  # fmt: skip
    updater.push_weights(weights)
    assert all(torch.equal(x, source.state_dict()[name]) for name, x in policy.state_dict().items())
    narrow = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    given = {"module": narrow, "tensordict": TensorDict.from_module(narrow)}.get(form, narrow.state_dict())
    for wrong, words in ((given, "do not fit"), ({}, "have no"), (3, "are no weights")):
        with pytest.raises(ArgumentError, match=words):
            updater.push_weights(wrong)
    assert all(torch.equal(x, source.state_dict()[name]) for name, x in policy.state_dict().items())


def test_multi_processed_publishes_the_next_version():
    trained, acting, other = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    sender = SharedMemWeightSyncScheme().create_sender("policy", trained)
    receiver = open_receiver(sender.handle(), sender.fd, acting)
    MultiProcessedWeightUpdater(sender=sender).push_weights()
    assert receiver.receive() == 1 and torch.equal(acting.weight, trained.weight)
    MultiProcessedWeightUpdater(sender=sender, get_server_weights=lambda: other).push_weights()
    assert receiver.receive() == 2 and torch.equal(acting.weight, other.weight)

    class Doubled(MultiProcessedWeightUpdater):
        def _maybe_map_weights(self, policy_or_weights):
            weights = super()._maybe_map_weights(policy_or_weights)
            assert isinstance(weights, TensorDictBase)
            return weights.apply(lambda x: 2 * x)

    Doubled(sender=sender).push_weights(trained)
    assert receiver.receive() == 3 and torch.equal(acting.weight, 2 * trained.weight)


def test_messages_are_carried_by_whoever_is_given_or_the_updater_is_refused():
    trained, acting = nn.Linear(2, 2), nn.Linear(2, 2)
    sender = MultiProcessWeightSyncScheme().create_sender("policy", trained)
    receiver = open_receiver(sender.handle(), sender.fd, acting)
    refused(ArgumentError, "messages", lambda: MultiProcessedWeightUpdater(sender=sender))
    updater = MultiProcessedWeightUpdater(sender=sender, post=receiver.take)
    for version in (1, 2):
        nn.init.constant_(trained.weight, version)
        updater.push_weights()
        assert receiver.receive() == version and torch.equal(acting.weight, trained.weight)


def test_updates_from_several_threads_are_versions_each(monkeypatch):
    trained, found = nn.Linear(2, 2), []
    sender = SharedMemWeightSyncScheme().create_sender("policy", trained)
    updater = MultiProcessedWeightUpdater(sender=sender)
    send = sender.send

    def slowly(source, *, version):
        time.sleep(1e-4)  # another thread's turn
        send(source, version=version)
        found.append(version)

    monkeypatch.setattr(sender, "send", slowly)
    threads = [threading.Thread(target=lambda: [updater.push_weights() for _ in range(20)]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == list(range(1, 61))
