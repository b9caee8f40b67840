"""Whose weights act: the trained tensors themselves, or copies that follow them when they are told to."""

from __future__ import annotations

import copy

import pytest
import torch
from face import refused
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from worlds import Walk

from rlcli.collectors import Collector, wiring
from rlcli.envs import GymEnv, SerialEnv
from rlcli.errors import ArgumentError


class Plain(nn.Module):
    """Acts the same wherever it is: the action is its bias."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)
        self.set(0.1)

    def forward(self, place, image):
        return self.net(place.float() * 0)

    def set(self, value: float) -> Plain:
        nn.init.constant_(self.net.bias, value)
        return self


@pytest.fixture(params=["plain", "tensordict"])
def policy(request):
    net = Plain()
    return net if request.param == "plain" else TensorDictModule(net, ["place", ("eye", "image")], ["action"])


@pytest.fixture
def copies(monkeypatch):
    """Policies are copied as if they acted on another device."""
    monkeypatch.setattr(wiring, "on_device", lambda policy, device: copy.deepcopy(policy))


def collector(policy, **options) -> Collector:
    env = SerialEnv(2, lambda: GymEnv(Walk(), narrow=True))
    return Collector(env, policy, frames_per_batch=6, total_frames=24, policy_device="cpu", **options)


def bias(policy) -> nn.Parameter:
    return next(p for name, p in policy.named_parameters() if name.endswith("bias"))


def acted(made) -> float:
    (value,) = made.rollout()["action"].unique().tolist()
    return round(value, 3)


def test_a_copy_acts_on_old_weights_until_it_is_told(policy, copies):
    made = collector(policy, track_policy_version=True)
    nn.init.constant_(bias(policy), 0.5)
    assert acted(made) == 0.1
    made.update_policy_weights_()
    assert acted(made) == 0.5 and made.policy_version == 1


def test_update_at_each_batch_tells_it_before_every_batch(policy, copies):
    made, seen = collector(policy, update_at_each_batch=True), []
    for i, batch in enumerate(made):
        seen.append(round(batch["action"].unique().item(), 3))
        nn.init.constant_(bias(policy), (i + 1) / 10 + 0.2)
    assert seen == [0.1, 0.3, 0.4, 0.5]


def test_without_a_copy_nothing_needs_telling(policy):
    made = collector(policy)
    nn.init.constant_(bias(policy), 0.5)
    assert acted(made) == 0.5


@pytest.mark.parametrize("form", [lambda p: p, lambda p: p.state_dict(), TensorDict.from_module])
def test_new_weights_may_come_in_any_form(policy, copies, form):
    made, other = collector(policy), copy.deepcopy(policy)
    nn.init.constant_(bias(other), 0.7)
    made.update_policy_weights_(form(other))
    assert acted(made) == 0.7 and bias(policy)[0].item() == pytest.approx(0.1)


def test_weights_that_do_not_fit_change_nothing(policy, copies):
    made = collector(policy)
    name = next(iter(policy.state_dict()))
    for wrong, words in [
        ({**policy.state_dict(), name: torch.zeros(1)}, "do not fit"),
        ({}, "have no"),
        (3, "are no weights"),
    ]:
        with pytest.raises(ArgumentError, match=words):
            made.update_policy_weights_(wrong)
    assert acted(made) == 0.1


def test_weights_for_what_has_none_are_refused():
    for policy, words in ((None, "random actions"), (lambda td: td.set("action", torch.zeros(2, 2)), "function")):
        made = collector(policy)
        made.update_policy_weights_()
        with pytest.raises(ArgumentError, match=words):
            made.update_policy_weights_(Plain())


def test_registered_models_follow_with_the_policy_or_alone(copies):
    policy, made = Plain(), None
    made = collector(policy)
    pairs = {name: (nn.Linear(2, 2), nn.Linear(2, 2)) for name in ("critic", "world")}
    for name, (trained, used) in pairs.items():
        made.register_model(name, trained, used)
    policy.set(0.5)
    made.update_policy_weights_(model_id="critic")
    assert torch.equal(*(m.weight for m in pairs["critic"])) and not torch.equal(*(m.weight for m in pairs["world"]))
    assert acted(made) == 0.1 and made.policy_version == 0
    made.update_policy_weights_(policy)
    assert torch.equal(*(m.weight for m in pairs["world"])) and acted(made) == 0.5
    other = nn.Linear(2, 2)
    made.update_policy_weights_(other.state_dict(), model_id="world")
    assert torch.equal(pairs["world"][1].weight, other.weight)


def test_a_model_may_be_registered_by_its_place():
    model, used = nn.Linear(2, 2), nn.Linear(2, 2)
    made = collector(None)
    made.env.judge = used
    made.register_model("judge", model, "env.judge")
    made.update_policy_weights_()
    assert torch.equal(model.weight, used.weight)
    made.register_model("again", model, "judge")
    assert made.model("again") is used


def test_a_model_that_is_used_itself_needs_no_copy_and_strangers_are_refused():
    made, model = collector(None), nn.Linear(2, 2)
    made.register_model("critic", model)
    before = model.weight.clone()
    made.update_policy_weights_()
    assert torch.equal(model.weight, before)
    for call, words in [
        (lambda: made.register_model("policy", model), "own policy"),
        (lambda: made.register_model("other", nn.Linear(2, 2), "critic"), "'other' would be written over .*'critic'"),
        (lambda: made.register_model("critic", 3), "int"),
        (lambda: made.register_model("critic", model, 3), "int"),
        (lambda: made.register_model("critic", model, "env"), "no model is at 'env': it is a"),
        (lambda: made.register_model("critic", model, "env.nope"), "no model is at 'env.nope': .*nope"),
        (lambda: made.update_policy_weights_(model_id="criticc"), "policy, critic"),
    ]:
        with pytest.raises(ArgumentError, match=words):
            call()


def test_a_list_of_envs_is_refused_with_what_to_type():
    refused(ArgumentError, "SerialEnv", lambda: Collector([lambda: GymEnv(Walk())] * 2))


def test_a_state_dict_need_not_hold_what_it_never_holds(copies):
    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(3, 2)
            self.register_buffer("scale", torch.ones(()), persistent=False)
            self.register_buffer("shift", torch.zeros(()))

        def forward(self, place):
            return super().forward(place) * self.scale + self.shift

    trained = Scaled()
    made = collector(TensorDictModule(trained, ["place"], ["action"]))
    nn.init.zeros_(trained.weight)
    nn.init.constant_(trained.bias, 0.5)
    made.update_policy_weights_(made.policy.__class__(trained, ["place"], ["action"]).state_dict())
    assert acted(made) == 0.5
    weights = made.policy.state_dict()
    with refused(ArgumentError, "shift"):  # this one a state_dict does hold
        made.update_policy_weights_({name: x for name, x in weights.items() if "shift" not in name})
