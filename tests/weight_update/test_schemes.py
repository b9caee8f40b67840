"""From a trained model to one that acts, by every scheme: the same numbers, or a sentence and nothing at all."""

from __future__ import annotations

import contextlib
import pickle

import numpy as np
import pytest
import torch
from face import Worker, WorkerGroup, packed, refused
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from weight_workers import fill
from weight_workers import model as numbered

from rlcli.errors import ArgumentError, DamagedDataError
from rlcli.weight_update import (
    DistributedTransport,
    DistributedWeightSyncScheme,
    DistributedWeightUpdater,
    MPTransport,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    RayTransport,
    RayWeightSyncScheme,
    RayWeightUpdater,
    RPCTransport,
    RPCWeightSyncScheme,
    RPCWeightUpdater,
    SharedMemWeightSyncScheme,
    TransportBackend,
    WeightStrategy,
    open_receiver,
)
from rlcli.weight_update.tensors import named_tensors

SCHEMES = [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme]


class Odd(nn.Module):
    """Of all kinds of tensors: one shared, odd dtypes, no dimension, no element, other strides, not persistent."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(width)
        self.rough = nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.randn(()))
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.register_buffer("mask", torch.rand(7) > 0.5)
        self.register_buffer("count", torch.randint(2**40, (3,)))
        self.register_buffer("wave", torch.randn(2, dtype=torch.complex64))
        self.register_buffer("nothing", torch.zeros(0, 4))
        self.register_buffer("seen", torch.randn(2), persistent=False)


def same(one: nn.Module, other: nn.Module, but: str = "-") -> bool:
    mine, theirs = named_tensors(one), named_tensors(other)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine if k != but)


@pytest.fixture(params=SCHEMES)
def scheme(request):
    return request.param()


def receiver_of(sender, acting):
    """As in a worker: what it is told has been pickled."""
    return open_receiver(pickle.loads(pickle.dumps(sender.handle())), sender.fd, acting)


def passed_on(sender, *receivers) -> None:
    """What a collector does after `send`."""
    message = sender.message()
    if message is not None:
        for receiver in receivers:
            receiver.take(message)


def pair(scheme, make=Odd):
    trained, acting = make(), make()
    sender = scheme.create_sender("policy", trained)
    return sender, trained, receiver_of(sender, acting), acting


# ---- all of it -------------------------------------------------------------------------------------------------------
def test_every_tensor_of_every_kind_arrives(scheme):
    sender, trained, receiver, acting = pair(scheme)
    assert not receiver.waiting and receiver.receive() == 0 and not same(trained, acting)
    acts_on = acting.first.weight
    for version in (3, 4):
        with torch.no_grad():
            trained.first.weight.add_(1)
            trained.count.add_(1)
        sender.send(version=version)
        passed_on(sender, receiver)
        assert receiver.waiting and receiver.receive() == receiver.version == sender.version == version
        assert same(trained, acting) and not receiver.waiting and receiver.receive() == version
    assert acting.second.weight is acting.first.weight is acts_on and acts_on.requires_grad
    assert acting.conv.weight.is_contiguous(memory_format=torch.channels_last)
    x = torch.randn(4, 3)
    assert torch.equal(acting.norm.eval()(acting.second(x)), trained.norm.eval()(trained.second(x)))


def test_two_workers_adopt_at_their_own_time(scheme):
    sender, trained, first, one = pair(scheme)
    two = Odd()
    second = receiver_of(sender, two)
    sender.send(version=1)
    passed_on(sender, first, second)
    assert first.receive() == 1 and same(one, trained) and not same(two, trained)
    sender.send(Odd(), version=2)
    passed_on(sender, first, second)
    assert second.receive() == 2 and first.version == 1 and first.receive() == 2 and same(one, two)


def test_weights_in_every_form_are_the_same_version(scheme):
    sender, trained, receiver, acting = pair(scheme)
    source = Odd()
    arrays = {k: v.detach().numpy() for k, v in named_tensors(source).items() if k != "rough"}
    forms = {
        "module": source, "tensordict": TensorDict.from_module(source), "data": TensorDict.from_module(source).data,
        "state_dict": source.state_dict(), "arrays": arrays | {"rough": source.rough},
    }  # fmt: skip
    for version, (form, weights) in enumerate(forms.items(), 1):
        sender.send(version=9)
        sender.send(weights, version=version)
        passed_on(sender, receiver)
        receiver.receive()
        assert same(source, acting, but="seen"), form
        whose = trained if form == "state_dict" else source  # a state_dict never holds it
        assert torch.equal(acting.seen, whose.seen), form


def test_a_tensordict_module_by_its_own_names(scheme):
    def make():
        return TensorDictModule(nn.Linear(2, 2), ["a"], ["b"])

    sender, trained, receiver, acting = pair(scheme, make)
    sender.send(TensorDict.from_module(trained), version=1)
    passed_on(sender, receiver)
    assert receiver.receive() == 1 and same(trained, acting)


def test_other_dtypes_are_converted_where_they_arrive(scheme):
    sender, trained, receiver, acting = pair(scheme, lambda: nn.Linear(2, 2))
    wide = nn.Linear(2, 2).double()
    second = receiver_of(sender, wide)
    sender.send({k: v.double() for k, v in trained.state_dict().items()}, version=1)
    passed_on(sender, receiver, second)
    assert receiver.receive() == second.receive() == 1
    assert (
        same(trained, acting) and wide.weight.dtype == torch.float64 and torch.equal(wide.weight.float(), acting.weight)
    )


def test_a_model_without_weights_has_versions_all_the_same(scheme):
    sender, _, receiver, _ = pair(scheme, nn.Tanh)
    sender.send(version=1)
    passed_on(sender, receiver)
    assert receiver.receive() == 1


@pytest.mark.parametrize("inference", [False, True])
def test_a_worker_that_collects_under_inference_mode_adopts_too(scheme, inference):
    sender, trained, receiver, acting = pair(scheme)
    with torch.inference_mode(inference):
        sender.send(version=1)
        passed_on(sender, receiver)
        receiver.receive()
    assert same(trained, acting)
    acting.first(torch.randn(2, 3)).sum().backward()  # no inference tensors among its parameters


class Expanded(nn.Module):
    """Buffers and a parameter whose elements share memory."""

    def __init__(self, value: float = 1.5) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.full((2,), value).expand(3, 2))
        self.register_buffer("scale", torch.tensor(value).expand(4))
        self.register_buffer("windows", torch.full((5,), value).unfold(0, 3, 1))
        self.register_buffer("turned", torch.full((2, 3), value).t())


def test_elements_that_share_memory_arrive_each_in_its_own(scheme):
    sender, trained, receiver, acting = pair(scheme, Expanded)
    wide = Expanded().double()
    second = receiver_of(sender, wide)
    for version in (1, 2):
        trained.windows = trained.windows + torch.arange(9).view(3, 3)
        sender.send(Expanded(2.0) if version == 2 else None, version=version)
        passed_on(sender, receiver, second)
        assert receiver.receive() == second.receive() == version
        source = Expanded(2.0) if version == 2 else trained
        assert same(source, acting) and same(source.double(), wide)
    other = Expanded()
    WeightStrategy().apply_weights(other, {name: x + torch.rand(x.shape) for name, x in named_tensors(trained).items()})
    assert other.scale.unique().numel() > 1 and not same(other, trained)


# ---- models that change after they were opened -----------------------------------------------------------------------
@pytest.mark.parametrize("change", ["double", "assign", "data", "submodule"])
def test_a_model_that_moves_in_memory_is_still_written_to(scheme, change):
    sender, trained, receiver, acting = pair(scheme)
    sender.send(version=1)
    passed_on(sender, receiver)
    receiver.receive()
    for module in (acting, trained):
        if change == "double":
            module.double().float()
            module.rough.data = module.rough.data.bfloat16()
        elif change == "assign":
            module.load_state_dict({k: v.clone() for k, v in Odd().state_dict().items()}, assign=True)
            module.second.weight = module.first.weight  # which that set free
        elif change == "data":
            module.scale.data = torch.randn(())
        else:
            module.norm = nn.BatchNorm1d(3)
            nn.init.normal_(module.norm.weight)
    sender.send(version=2)
    passed_on(sender, receiver)
    assert receiver.receive() == 2 and same(trained, acting)


def test_a_model_that_changes_its_shape_is_refused_at_either_end(scheme):
    sender, trained, receiver, acting = pair(scheme)
    sender.send(version=1)
    passed_on(sender, receiver)
    acting.scale.data = torch.randn(2)
    refused(ArgumentError, "policy scale", lambda: receiver.receive())
    trained.norm = nn.BatchNorm1d(4)
    refused(ArgumentError, "policy norm.weight", lambda: sender.send(version=2))
    assert sender.version == 1


# ---- what does not fit -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ({"weight": torch.zeros(2, 2)}, "bias"),
        ({"weight": torch.zeros(2, 2), "bias": torch.zeros(1)}, "bias"),
        ({"weight": torch.zeros(2, 2), "bias": "b"}, "bias"),
        (nn.Linear(2, 3), "weight"),
        (17, "weights"),
    ],
)
def test_weights_that_do_not_fit_are_not_published(scheme, weights, sentence):
    sender, trained, receiver, acting = pair(scheme, lambda: nn.Linear(2, 2))
    sender.send(version=1)
    passed_on(sender, receiver)
    receiver.receive()
    before = sender.message()
    refused(ArgumentError, sentence, lambda: sender.send(weights, version=2))
    assert sender.version == 1 and sender.message() == before and not receiver.waiting and same(trained, acting)


def test_a_worker_with_another_model_is_told_how_it_differs(scheme):
    sender = scheme.create_sender("critic", nn.Linear(2, 2))
    for model, sentence in (
        (nn.Linear(2, 2, bias=False), "the worker's 'critic' has no 'bias'"),
        (nn.Linear(3, 2), r"does not fit: 'weight' is \(2, 3\): in the model that is sent it is \(2, 2\)"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), "the worker's 'critic' has no 'weight'"),
    ):
        with pytest.raises(ArgumentError, match=sentence):
            receiver_of(sender, model)
    bare = scheme.create_sender("critic", nn.Linear(2, 2, bias=False))
    refused(ArgumentError, "critic bias", lambda: receiver_of(bare, nn.Linear(2, 2)))


def test_models_that_cannot_be_sent_are_refused(scheme):
    refused(ArgumentError, "policy", lambda: scheme.create_sender("policy", same))
    refused(ArgumentError, "weight", lambda: scheme.create_sender("policy", nn.LazyLinear(2)))
    sparse = nn.Module()
    sparse.register_buffer("rows", torch.eye(2).to_sparse())
    refused(ArgumentError, "rows", lambda: scheme.create_sender("policy", sparse))


def test_a_worker_without_the_descriptor_says_so():
    sender = SharedMemWeightSyncScheme().create_sender("policy", nn.Linear(2, 2))
    refused(ArgumentError, "descriptor", lambda: open_receiver(sender.handle(), None, nn.Linear(2, 2)))
    sender.close()
    refused(ArgumentError, "descriptor", lambda: receiver_of(sender, nn.Linear(2, 2)))


def test_a_message_that_was_altered_is_not_adopted():
    sender, _, receiver, _ = pair(MultiProcessWeightSyncScheme(), lambda: nn.Linear(2, 2))
    sender.send(version=1)
    message = bytearray(sender.message())
    message[20] ^= 1
    receiver.take(bytes(message))
    refused(DamagedDataError, "altered way", lambda: receiver.receive())
    refused(DamagedDataError, "length", lambda: receiver.take(b"12345"))
    assert receiver.version == 0


def test_a_message_holds_the_bytes_and_nothing_else():
    sender, *_ = pair(MultiProcessWeightSyncScheme(), lambda: nn.Linear(2, 2))
    assert sender.message() is None and sender.fd is None
    sender.send(version=1)
    assert len(sender.message()) == 16 + 2 * 64
    shared = SharedMemWeightSyncScheme().create_sender("policy", nn.Linear(2, 2))
    shared.send(version=1)
    assert shared.message() is None and shared.fd > 2


# ---- schemes ---------------------------------------------------------------------------------------------------------
def test_several_models_each_by_its_scheme():
    schemes = {
        "policy": SharedMemWeightSyncScheme(), "value": MultiProcessWeightSyncScheme(strategy="state_dict"),
        "world": NoWeightSyncScheme(),
    }  # fmt: skip
    schemes = pickle.loads(pickle.dumps(schemes))
    trained, acting = {name: Odd() for name in schemes}, {name: Odd() for name in schemes}
    senders = {name: scheme.create_sender(name, trained[name]) for name, scheme in schemes.items()}
    receivers = {name: receiver_of(sender, acting[name]) for name, sender in senders.items()}
    for sender in senders.values():
        sender.send(version=5)
        passed_on(sender, receivers[sender.model_id])
    assert {name: r.receive() for name, r in receivers.items()} == {"policy": 5, "value": 5, "world": 0}
    assert same(trained["policy"], acting["policy"]) and same(trained["value"], acting["value"], but="seen")
    assert not same(trained["world"], acting["world"]) and senders["world"].fd is None


def test_both_strategies_send_the_same_weights():
    """All but a buffer that is not persistent: it stays each process's own with `state_dict`."""
    trained, found = Odd(), {}
    for strategy in ("tensordict", "state_dict"):
        acting = Odd()
        own = acting.seen.clone()
        sender = SharedMemWeightSyncScheme(strategy).create_sender("policy", trained)
        receiver = receiver_of(sender, acting)
        sender.send(version=1)
        receiver.receive()
        found[strategy] = acting
        assert torch.equal(acting.seen, trained.seen if strategy == "tensordict" else own)
    assert same(found["tensordict"], found["state_dict"], but="seen")


@pytest.mark.parametrize("extract_as", ["tensordict", "state_dict"])
def test_what_a_strategy_takes_from_a_model_it_gives_to_another(extract_as):
    strategy, source, target = WeightStrategy(extract_as), Odd(), Odd()
    weights = strategy.extract_weights(source)
    assert isinstance(weights, TensorDict if extract_as == "tensordict" else dict)
    strategy.apply_weights(target, weights)
    assert same(source, target, but="-" if extract_as == "tensordict" else "seen")
    refused(ArgumentError, "rough", lambda: strategy.apply_weights(target, {"scale": torch.zeros(())}))


def test_an_unknown_strategy_is_refused():
    with pytest.raises(ArgumentError, match=r"unknown strategy 'pickle'. Choose one of tensordict, state_dict"):
        SharedMemWeightSyncScheme(strategy="pickle")


CARRIED = {
    MultiProcessWeightSyncScheme: MPTransport,
    RayWeightSyncScheme: RayTransport,
    DistributedWeightSyncScheme: DistributedTransport,
    RPCWeightSyncScheme: RPCTransport,
}


def test_any_process_follows_a_sender_by_messages_alone():
    with contextlib.closing(WorkerGroup(lambda: Worker("weight_workers:adopt", start_method="fork"), 1)) as group:
        for version, (kind, transport) in enumerate(CARRIED.items(), 3):
            trained, scheme = fill(numbered(), version), kind()
            sender = scheme.create_sender("value", trained)
            handle = pickle.loads(pickle.dumps(sender.handle()))
            assert sender.fd is None and not scheme.local and handle.transport is transport
            group.order(0, packed(("follow", scheme, handle, 40)))
            sender.send(version=version)
            group.order(0, packed(("take", sender.message())))
            assert group.order(0, packed(("receive",))) == [(True, version, {float(version)})]
    assert SharedMemWeightSyncScheme().local


def test_an_updater_posts_messages_to_whatever_follows():
    for kind in (RayWeightUpdater, DistributedWeightUpdater, RPCWeightUpdater):
        sender, trained, receiver, acting = pair(MultiProcessWeightSyncScheme())
        refused(ArgumentError, "post=", lambda kind=kind, sender=sender: kind(sender=sender))
        kind(sender=sender, post=receiver.take).push_weights()
        assert receiver.receive() == 1 and same(trained, acting)


class Folder(TransportBackend):
    """A user's own: all workers read one list of versions."""

    sent: list = []  # noqa: RUF012

    def __init__(self, layout, fd=None) -> None:
        self.layout, self.read = layout, 0

    def send_weights(self, version, tensors) -> None:
        memory = np.zeros(self.layout.nbytes, np.uint8)
        for view, tensor in zip(self.layout.views(memory).values(), tensors, strict=True):
            view.copy_(tensor)
        self.sent.append((version, memory))

    @property
    def waiting(self) -> bool:
        return self.read < len(self.sent)

    def receive_weights(self, memory) -> int:
        self.read = len(self.sent)
        version, memory[:] = self.sent[-1]
        return version


def test_a_transport_of_the_users_own():
    class Mine(SharedMemWeightSyncScheme):
        transport = Folder

    with torch.no_grad():
        sender, trained, receiver, acting = pair(Mine())
        sender.send(version=8)
    assert receiver.receive() == 8 and same(trained, acting)


# ---- accelerators ----------------------------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: weights of a GPU were not tried")
@pytest.mark.parametrize("train", ["cpu", "cuda"])
@pytest.mark.parametrize("act", ["cpu", "cuda"])
def test_weights_between_devices(scheme, train, act):
    trained, acting = Odd().to(train), Odd().to(act)
    sender = scheme.create_sender("policy", trained)
    receiver = receiver_of(sender, acting)
    for version in (1, 2, 3):
        sender.send(Odd(), version=version - 1)
        sender.send(version=version)
        passed_on(sender, receiver)
        assert receiver.receive() == version and same(trained.cpu(), acting.cpu())
        trained.to(train), acting.to(act)
