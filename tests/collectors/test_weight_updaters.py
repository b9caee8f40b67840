"""A collector's weight updater is asked for every update of the policy, and what it publishes are versions."""

from __future__ import annotations

import pytest
import torch
from face import refused
from tensordict.nn import TensorDictModule
from torch import nn
from worlds import Still

from rlcli.collectors import Collector, MultiAsyncCollector, MultiSyncCollector, WeightUpdaterBase
from rlcli.collectors import MultiProcessedWeightUpdater as Published
from rlcli.collectors import VanillaWeightUpdater as Vanilla
from rlcli.envs import GymEnv
from rlcli.errors import ArgumentError

VERSION = ("collector", "policy_version")


def make():
    return GymEnv(Still())


def policy(value: float = 0.0) -> TensorDictModule:
    """Its action is `value`."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, value)
    return TensorDictModule(net, ["observation"], ["action"])


KINDS = {
    "sync": lambda *given, **options: Collector(make, *given, **options),
    "multi_sync": lambda *given, **options: MultiSyncCollector([make], *given, **options),
    "multi_async": lambda *given, **options: MultiAsyncCollector([make], *given, **options),
}
of_every_kind = pytest.mark.parametrize("kind", KINDS)


def collector(kind: str, *given, **options):
    return KINDS[kind](*given, **{"frames_per_batch": 4, "track_policy_version": True} | options)


def acts(made) -> tuple[float, int]:
    """The action of the newest version, and that version: an asynchronous worker may have batches of older ones."""
    while True:
        batch = made.next()
        if (batch[VERSION] == made.policy_version).all():
            return batch["action"].unique().item(), made.policy_version


class Doubled(Vanilla):
    """Publishes twice of what it is given."""

    def _maybe_map_weights(self, policy_or_weights):
        return super()._maybe_map_weights(policy_or_weights).apply(lambda x: 2 * x)


class Told(WeightUpdaterBase):
    """A user's own, which calls no `super().__init__`."""

    def __init__(self) -> None:
        self.calls = []

    def _sync_weights_with_worker(self, *, worker_id=None, server_weights):
        self.calls.append((worker_id, server_weights))


@of_every_kind
def test_an_updater_of_the_users_own_is_called_and_knows_its_collector(kind):
    with collector(kind, policy(), weight_updater=Told) as made:
        updater = made.weight_updater
        assert type(updater) is Told and updater.collector is made
        made.update_policy_weights_()
        made.update_policy_weights_({"a": 1}, worker_ids=[0, 3])
        assert updater.calls == [(None, None), (0, {"a": 1}), (3, {"a": 1})] and made.policy_version == 0


@of_every_kind
@pytest.mark.parametrize("updater", [Vanilla, Published])
def test_weights_from_a_server_are_versions_that_rows_name(kind, updater):
    server = policy(3)
    name = "weight_getter" if updater is Vanilla else "get_server_weights"
    with collector(kind, policy(1), weight_updater=updater(**{name: lambda: server})) as made:
        assert acts(made) == (1, 0)
        made.update_policy_weights_()
        assert acts(made) == (3, 1)
        made.update_policy_weights_(policy(5))
        assert acts(made) == (5, 2)
        made.weight_updater.push_weights(policy(7).state_dict())
        assert acts(made) == (7, 3)


@of_every_kind
def test_an_updater_may_change_weights_on_their_way(kind):
    trained = policy(1)
    with collector(kind, trained, weight_updater=Doubled()) as made:
        made.update_policy_weights_(policy(4))
        assert acts(made) == (8, 1)


def test_before_every_batch_the_updater_is_asked_where_the_collector_updates_by_itself():
    server = iter([policy(3), policy(4)])
    updater = Vanilla(weight_getter=lambda: next(server))
    with collector("sync", policy(), weight_updater=updater, update_at_each_batch=True) as made:
        assert [made.next()["action"].unique().item() for _ in range(2)] == [3, 4] and made.policy_version == 2


@of_every_kind
def test_without_one_there_is_one_that_does_the_same_and_whose_hooks_are_called(kind):
    trained, after = policy(1), []
    with collector(kind, trained) as made:
        usual = made.weight_updater
        assert made.weight_updater is usual and type(usual) is (Vanilla if kind == "sync" else Published)
        usual.register_post_hook(lambda: after.append(made.policy_version))
        nn.init.constant_(trained.module.weight, 2)
        usual.push_weights()
        assert acts(made) == (2, 1)
        made.update_policy_weights_(policy(3))
        assert acts(made) == (3, 2) and after == [1, 2]
        made.weight_updater = None
        made.update_policy_weights_(policy(4))
        assert acts(made) == (4, 3) and after == [1, 2]


def test_a_further_model_is_published_without_the_updater():
    trained, used = nn.Linear(1, 1), nn.Linear(1, 1)
    with collector("sync", policy(), weight_updater=Told()) as made:
        made.register_model("critic", trained, used)
        made.update_policy_weights_(model_id="critic")
        assert torch.equal(used.weight, trained.weight) and made.weight_updater.calls == []
        made.update_policy_weights_(model_id="policy")
        assert len(made.weight_updater.calls) == 1


def test_what_is_no_updater_is_refused():
    for wrong in (3, dict, lambda: None):
        with refused(ArgumentError, "weight_updater WeightUpdaterBase"):
            collector("sync", policy(), weight_updater=wrong)
    with collector("sync", policy()) as made, refused(ArgumentError, "worker_ids"):
        made.update_policy_weights_(worker_ids=0)
    for updater in (Vanilla(), Published()):
        with refused(ArgumentError, "send weights"):
            updater.push_weights()


def test_an_updater_is_prepared_through_the_collector():
    class Prepared(Told):
        def init(self, address, *, port):
            self.place = address, port

    with collector("sync", policy(), weight_updater=Prepared) as made:
        made.init_updater("here", port=3)
        assert made.weight_updater.place == ("here", 3)
