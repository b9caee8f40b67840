"""What a network on tensordicts is taken apart into, and what is left whole because it is more than it seems."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from face import refused
from tensordict import TensorDict, TensorDictParams
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule, TensorDictSequential
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from rlcli.errors import ArgumentError, MissingKeyError
from rlcli.modules import (
    Categorical,
    IndependentNormal,
    NormalParamExtractor,
    ProbabilisticActor,
    StateIndependentScale,
    ValueOperator,
)
from rlcli.modules.stages import take_apart
from rlcli.modules.watch import ModuleWatch
from rlcli.objectives.networks import Lowered


def module(out: str = "logits", reads: str = "observation", net: nn.Module | None = None) -> TensorDictModule:
    torch.manual_seed(0)
    return TensorDictModule(net or nn.Linear(4, 4), [reads], [out])


def actor(net=None, kind: type = ProbabilisticActor) -> ProbabilisticTensorDictSequential:
    return kind(net or module(), ["logits"], distribution_class=Categorical, return_log_prob=True)


class OnlyInit(ProbabilisticActor):
    """A subclass that changes nothing of what a call does."""


class OwnForward(TensorDictModule):
    def forward(self, td):
        return super().forward(td).set("logits", torch.zeros(4))


class OwnDistribution(ProbabilisticActor):
    def get_dist_params(self, *args, **kwargs):
        return super().get_dist_params(*args, **kwargs)


class ByName(nn.Linear):
    def forward(self, *, x):
        return super().forward(x)


def hooked(net: nn.Module) -> nn.Module:
    net.register_forward_hook(lambda *_: None)
    return net


def replaced(net: nn.Module) -> nn.Module:
    net.forward = lambda td: td
    return net


def test_stages_run_in_order_give_what_the_network_gives():
    nested = TensorDictSequential(module("a"), TensorDictSequential(module("b", "a"), module("logits", "b")))
    stages, head, _ = take_apart(actor(nested))
    assert [stage.out_keys for stage in stages] == [("a",), ("b",), ("logits",)]
    assert head is not None and list(head.in_keys) == ["logits"]
    obs = torch.randn(5, 4)
    values, td = {"observation": obs}, nested(TensorDict({"observation": obs}, [5]))
    for stage in stages:
        stage.run(values)
    assert all(torch.equal(values[key], td[key]) for key in ("a", "b", "logits"))
    refused(MissingKeyError, "observation", lambda: stages[0].run({}))


@pytest.mark.parametrize(
    "net",
    [
        actor(kind=OnlyInit),
        TensorDictSequential(module("hidden"), actor(module(reads="hidden"))),
        ValueOperator(nn.Linear(4, 1)),
    ],
    ids=["a subclass that adds nothing", "an actor in a sequence", "a critic"],
)
def test_what_is_plain_is_taken_apart(net):
    stages, head, _ = take_apart(net)
    assert all(stage.layers is not None for stage in stages)
    assert (head is None) == isinstance(net, ValueOperator)


@pytest.mark.parametrize(
    "net",
    [
        lambda td: td,
        OwnForward(nn.Linear(4, 4), ["observation"], ["logits"]),
        OwnDistribution(module(), ["logits"], distribution_class=Categorical),
        TensorDictModule(ByName(4, 4), {"x": "observation"}, ["logits"]),
        TensorDictModule(nn.Linear(4, 4), ["observation"], ["logits"], method="__call__"),
        hooked(actor()),
        actor(hooked(module())),
        actor(replaced(module())),
        TensorDictSequential(actor(), module("after")),
        TensorDictSequential(module("hidden"), module(reads="other"), partial_tolerant=True),
        TensorDictModule(nn.Linear(4, 4), ["observation"], ["logits"], strict=True),
    ],
    ids=[
        "no module",
        "forward",
        "get_dist_params",
        "by name",
        "method",
        "hook",
        "inner hook",
        "replaced",
        "not last",
        "tolerant",
        "strict",
    ],
)
def test_what_is_more_than_it_seems_stays_whole(net):
    assert take_apart(net) is None


class Optional(nn.Module):
    def forward(self, x, hint=None):
        return x if hint is None else x + hint


def test_a_key_that_is_not_there_is_none_as_in_a_tensordict():
    net = TensorDictModule(Optional(), ["observation", "hint"], ["logits"])
    obs = torch.randn(5, 4)
    for columns in ({"observation": obs}, {"observation": obs, "hint": obs}):
        assert torch.equal(Lowered(net)(columns)["logits"], net(TensorDict(columns, [5]))["logits"])
    refused(MissingKeyError, "observation", lambda: Lowered(net)({"hint": obs}))


def test_a_module_may_return_its_outputs_in_a_tensordict():
    inner = nn.Linear(4, 4)
    net = TensorDictModule(lambda x: TensorDict({"logits": inner(x), "more": x}), ["observation"], ["logits"])
    obs = torch.randn(5, 4)
    assert torch.equal(Lowered(net)({"observation": obs})["logits"], inner(obs))


def test_outputs_are_as_many_as_their_keys():
    net = TensorDictModule(lambda x: (x, x), ["observation"], ["logits"])
    refused(ArgumentError, "returns", lambda: Lowered(net)({"observation": torch.ones(5, 4)}))


def test_a_hook_inside_is_run_because_the_module_is_called():
    (stage,), *_ = take_apart(module(net=hooked(nn.Sequential(nn.Linear(4, 4)))))
    assert stage.layers is None
    (scale,), *_ = take_apart(module("scale", "loc", StateIndependentScale(2)))
    assert scale.is_plain(StateIndependentScale) and scale.layers is None
    hooked(scale.module)
    assert not scale.is_plain(StateIndependentScale)


def test_a_watch_sees_whatever_a_module_gets_or_loses():
    def own_forward(net):
        net[0].forward = lambda x: x

    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh()))
    changes = [
        own_forward,
        lambda net: vars(net[0]).pop("forward"),
        lambda net: net[1][0].register_forward_pre_hook(lambda *_: None),
        lambda net: net[1][0]._forward_pre_hooks.clear(),
        lambda net: net.append(nn.Tanh()),
        lambda net: net[1].__setitem__(0, nn.ReLU()),
        lambda net: setattr(net[0], "inner", nn.Tanh()),
        lambda net: net[0].__delattr__("inner"),
        lambda net: net.load_state_dict(net.state_dict(), assign=True),
        lambda net: net[0].register_buffer("more", torch.zeros(1)),
    ]
    for change in changes:
        watch = ModuleWatch(net)
        assert watch.version == 0
        change(net)
        assert watch.version == 1 and watch.version == 1
    handle = register_module_forward_hook(lambda *_: None)
    try:
        watch = ModuleWatch(net)
        assert watch.version == 0
    finally:
        handle.remove()
    assert watch.version == 1 and watch.version == 1


class Floored(torch.distributions.Independent):
    def __init__(self, loc, scale, floor):
        super().__init__(torch.distributions.Normal(loc, scale + floor), 1)


def normal(distribution, **constants):
    net = TensorDictModule(nn.Sequential(nn.Linear(3, 4), NormalParamExtractor()), ["observation"], ["loc", "scale"])
    return ProbabilisticActor(net, ["loc", "scale"], distribution_class=distribution, **constants)


def parameters_by_name(learned):
    return TensorDictParams(TensorDict({"floor": torch.ones(2)}), no_convert=not learned)


@pytest.mark.parametrize("learned", [False, True])
def test_a_watch_looks_at_constants_that_are_parameters(learned):
    head = normal(Floored, distribution_kwargs=parameters_by_name(learned))[-1]
    watch = ModuleWatch(head)
    assert watch.version == 0
    head.distribution_kwargs = parameters_by_name(learned)
    assert watch.version == 1 and watch.version == 1


class Maker:
    """A function with a memory that cannot be copied."""

    def __init__(self):
        self.lock = threading.Lock()

    def make(self, loc, scale):
        return IndependentNormal(loc, scale)


def test_a_watch_looks_at_functions_themselves():
    values, head = TensorDictModule(lambda x: x, ["observation"], ["state_value"]), normal(Maker().make)[-1]
    for part, name, other in ((values, "module", lambda x: 2 * x), (head, "distribution_class", Maker().make)):
        watch = ModuleWatch(part)
        assert watch.version == 0
        setattr(part, name, other)
        assert watch.version == 1 and watch.version == 1


def test_a_copied_network_is_looked_at_for_itself():
    watched = copy.deepcopy(Lowered(module(net=nn.Linear(4, 4))))
    columns = {"observation": torch.zeros(3, 4)}
    assert watched(columns).keys() > columns.keys()
    watched.module.forward = lambda td: td.set(watched.out_keys[0], torch.full((3, 4), 7.0))
    assert (watched(columns)[watched.out_keys[0]] == 7).all()
