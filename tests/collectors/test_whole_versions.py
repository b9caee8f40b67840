"""A forward sees one version of the weights: publications are whole, and adopted where a leg begins."""

from __future__ import annotations

import copy
import threading
import time

import numpy as np
import pytest
import torch
from face import FastActor, TensorDictActor, refused
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from worlds import Still

from rlcli.collectors import Collector
from rlcli.envs import EnvBase, GymEnv, SerialEnv
from rlcli.errors import ArgumentError
from rlcli.modules import IndependentNormal, ProbabilisticActor, StateIndependentScale
from rlcli.specs import Composite, Unbounded

VERSION = ("collector", "policy_version")


class Shows(EnvBase):
    """Shows a key that its specs do not name."""

    def __init__(self):
        super().__init__()
        self.observation_spec = Composite({"observation": Unbounded((1,))})
        self.action_spec = Unbounded((1,))

    def _set_seed(self, seed):
        pass

    def _reset(self, td):
        return TensorDict({"observation": torch.ones(1), "more": torch.ones(2)}, [])

    def _step(self, td):
        over = torch.zeros(1, dtype=torch.bool)
        return TensorDict(
            {"observation": torch.ones(1), "more": torch.ones(2), "reward": torch.zeros(1), "terminated": over}, []
        )


class Kept(list):
    """A buffer that keeps what it is given."""

    def extend(self, batch):
        self.append(batch.clone())


class Layers(nn.Module):
    """Every parameter holds the version; the action is what the last layer saw, and `told` gets all of them."""

    def __init__(self, told=lambda seen: None, pause: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(3))
        self.told, self.pause = told, pause

    def forward(self, observation):
        seen = []
        for layer in self.layers:
            seen += [layer.weight.item(), layer.bias.item()]
            if layer is self.layers[0]:
                time.sleep(self.pause)
        self.told(seen)
        return torch.full_like(observation, seen[-1])


class Pause(nn.Module):
    def __init__(self, told) -> None:
        super().__init__()
        self.told = told

    def forward(self, x):
        time.sleep(2e-5)
        self.told([])
        return x + 0


def taken_apart(told) -> nn.Module:
    """An actor that is lowered: two replayed layers with a called one in between, and a constant deviation."""
    stages = [
        TensorDictModule(nn.Linear(1, 1), ["observation"], ["hidden"]),
        TensorDictModule(Pause(told), ["hidden"], ["paused"]),
        TensorDictModule(nn.Linear(1, 1), ["paused"], ["loc"]),
        TensorDictModule(StateIndependentScale(1), ["loc"], ["scale"]),
    ]
    return ProbabilisticActor(
        TensorDictSequential(*stages), in_keys=["loc", "scale"], distribution_class=IndependentNormal
    )


def fill(tensors, version: float) -> None:
    """Write a version where it is, tensor by tensor, as optimizers do."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.fill_(version / 100 if "log_std" in name else version)


def check_rows(batch, lowered: bool) -> None:
    """Every row was made by the version that it names."""
    version = batch[VERSION].unsqueeze(-1).float()
    if not lowered:
        assert torch.equal(batch["action"], version)
        return
    assert torch.equal(batch["hidden"], 2 * version)
    assert torch.equal(batch["loc"], 2 * version**2 + version)
    assert torch.equal(batch["scale"], (version / 100).exp())


def collector(policy, lanes: int = 2, **options) -> Collector:
    env = SerialEnv(lanes, lambda: GymEnv(Still()))
    return Collector(env, policy, **{"frames_per_batch": 64, "track_policy_version": True, "seed": 0} | options)


def publish_in_the_background(lowered, source, swap, forwards: int, publications: int) -> None:
    seen, buffer = [], Kept()
    policy = taken_apart(seen.append) if lowered else Layers(seen.append, 2e-5)
    given = {name: tensor.detach() for name, tensor in policy.named_parameters()}
    other = copy.deepcopy(policy)
    published = {
        "the policy": (given, None),
        "module": (dict(other.named_parameters()), other),
        "state_dict": ((weights := copy.deepcopy(policy.state_dict())), weights),
        "tensordict": (dict((td := TensorDict.from_module(other)).flatten_keys(".").items()), td),
    }
    tensors, argument = published[source]
    fill(given, 0)
    made = collector(policy, replay_buffer=buffer, weights_swap=swap, frames_per_batch=16)
    assert isinstance(made._engine.actor, FastActor if lowered else TensorDictActor)
    since = []  # of each version, how many forwards had ended when it was published
    with made:
        seen.clear()
        made.start()
        for version in range(1, publications + 1):
            fill(tensors, version)
            made.update_policy_weights_(argument)
            since.append(len(seen))
            fill(tensors, -1)  # the publisher goes on in the same memory
            while len(seen) < version * forwards // publications:
                time.sleep(2e-4)
    assert len(seen) >= forwards
    assert all(len(set(parameters)) <= 1 for parameters in seen)
    rows = torch.cat(list(buffer), -1)
    check_rows(rows, lowered)
    versions = rows[VERSION][0].tolist()
    assert versions == sorted(versions) and len(set(versions)) > (10 if swap == "rollout" else publications // 3)
    if swap == "rollout":
        assert all(batch[VERSION].unique().numel() == 1 for batch in buffer)
    else:  # it acts from the next step on: one may be in the middle of its forward
        assert all(acting >= version for version, n in enumerate(since, 1) for acting in versions[n + 1 : n + 2])


EVERY_WAY = [
    pytest.mark.parametrize("swap", ["rollout", "step"]),
    pytest.mark.parametrize("source", ["the policy", "module", "state_dict", "tensordict"]),
    pytest.mark.parametrize("lowered", [False, True]),
]


def in_every_way(test):
    for mark in EVERY_WAY:
        test = mark(test)
    return test


@in_every_way
@pytest.mark.every(3)
def test_of_400_forwards_under_50_publications_none_sees_two_versions(lowered, source, swap):
    publish_in_the_background(lowered, source, swap, 400, 50)


@pytest.mark.slow
@in_every_way
def test_of_2400_forwards_under_300_publications_none_sees_two_versions(lowered, source, swap):
    publish_in_the_background(lowered, source, swap, 2400, 300)


@pytest.mark.parametrize("swap", ["rollout", "step"])
@pytest.mark.parametrize("lowered", [False, True])
def test_a_publication_in_the_middle_of_a_batch_acts_from_the_next_step_or_batch_on(lowered, swap):
    calls = []

    def told(seen):
        calls.append(seen)
        if len(calls) in (4, 5, 7):
            weights = {name: torch.empty_like(tensor) for name, tensor in policy.state_dict().items()}
            fill(weights, len(calls))
            made.update_policy_weights_(weights)

    policy = taken_apart(told) if lowered else Layers(told)
    fill(dict(policy.named_parameters()), 0)
    made = collector(policy, frames_per_batch=20, weights_swap=swap)
    calls.clear()
    batches = [made.rollout().clone() for _ in range(2)]
    ones = torch.ones(1, 10, dtype=torch.int64)
    if swap == "rollout":
        assert [batch[VERSION].unique().tolist() for batch in batches] == [[0], [3]]
        assert batches[0][VERSION].shape == (2, 10)
        if not lowered:
            assert [batch["action"].unique().tolist() for batch in batches] == [[0], [7]]
    else:
        expected = torch.tensor([0, 0, 0, 0, 1, 2, 2, 3, 3, 3])
        assert torch.equal(batches[0][VERSION][0], expected) and torch.equal(batches[1][VERSION][:1], 3 * ones)
        weights = torch.tensor([0.0, 4, 5, 7])[expected]
        if lowered:
            assert torch.equal(batches[0]["hidden"][0, :, 0], 2 * weights)
            assert torch.equal(batches[0]["scale"][0, :, 0], (weights / 100).exp())
        else:
            assert torch.equal(batches[0]["action"][0, :, 0], weights)


@pytest.mark.parametrize("lowered", [False, True])
def test_where_nothing_is_published_a_leg_of_one_step_changes_no_bit(lowered):
    def batches(swap):
        torch.manual_seed(0)
        policy = taken_apart(lambda seen: None) if lowered else Layers()
        made = collector(policy, weights_swap=swap, init_random_frames=6)
        return [made.rollout().clone() for _ in range(2)]

    for one, other in zip(batches("rollout"), batches("step"), strict=True):
        assert all(torch.equal(one.get(key), other.get(key)) for key in one.keys(True, True))


def test_an_unknown_swap_is_refused_with_those_there_are():
    refused(ArgumentError, "weights_swap", lambda: collector(Layers(), weights_swap="batch"))


# ---- publications ------------------------------------------------------------------------------------------------
def in_flight(made, publish):
    """Publish in the middle of a batch, once."""
    calls = []

    def hook(*_):
        if not calls:
            calls.append(publish())

    handle = made.policy.register_forward_hook(hook)
    try:
        made.rollout()
    finally:
        handle.remove()


def test_of_several_versions_that_wait_the_newest_acts_and_each_model_keeps_its_own():
    policy, critic, used = Layers(), nn.Linear(1, 1), nn.Linear(1, 1)
    made = collector(policy)
    made.register_model("critic", critic, used)

    def publish():
        for version in (1, 2):
            weights = copy.deepcopy(policy.state_dict())
            fill(weights, version)
            made.update_policy_weights_(weights, model_id="policy")
        fill(dict(critic.named_parameters()), 7)
        made.update_policy_weights_(model_id="critic")
        fill(dict(critic.named_parameters()), 8)
        assert used.weight.item() != 7

    in_flight(made, publish)
    batch = made.rollout()
    assert batch["action"].unique().tolist() == [2] and batch[VERSION].unique().tolist() == [2]
    assert used.weight.item() == 7 and made.policy_version == 2


def test_what_is_published_after_a_batch_is_newer_than_what_waited_in_it():
    policy = Layers()
    made = collector(policy)
    older, newer = copy.deepcopy(policy.state_dict()), copy.deepcopy(policy.state_dict())
    fill(older, 1)
    fill(newer, 2)
    in_flight(made, lambda: made.update_policy_weights_(older))
    made.update_policy_weights_(newer)
    assert made.rollout()["action"].unique().tolist() == [2]


def test_weights_of_one_model_that_do_not_fit_keep_all_from_being_published():
    policy, used = Layers(), nn.Linear(1, 1)
    made = collector(policy)
    made.register_model("critic", nn.Linear(2, 1), used)
    weights, before = copy.deepcopy(policy.state_dict()), used.weight.item()
    fill(weights, 1)
    refused(ArgumentError, "fit", lambda: made.update_policy_weights_(weights))
    assert made.policy_version == 0 and used.weight.item() == before
    assert 1 not in made.rollout()["action"].unique().tolist()


def test_layers_may_change_places_with_each_other():
    policy = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1))
    made = collector(TensorDictModule(policy, ["observation"], ["action"]))
    a, b = made.policy.state_dict()["module.0.weight"], made.policy.state_dict()["module.1.weight"]
    expected = [b.item(), a.item()]
    made.update_policy_weights_({**made.policy.state_dict(), "module.0.weight": b, "module.1.weight": a})
    assert [policy[0].weight.item(), policy[1].weight.item()] == expected


def test_what_is_no_tensor_is_refused_by_name():
    policy = Layers()
    made, weights = collector(policy), policy.state_dict()
    refused(ArgumentError, "layers.0.bias", lambda: made.update_policy_weights_({**weights, "layers.0.bias": "one"}))
    arrays = {name: np.full(tensor.shape, 3.0, np.float64) for name, tensor in weights.items()}
    made.update_policy_weights_(arrays)
    assert made.rollout()["action"].unique().tolist() == [3]


def test_a_resumed_collector_goes_on_counting_versions():
    one = collector(Layers())
    one.update_policy_weights_()
    other = collector(Layers())
    other.load_state_dict(one.state_dict())
    assert other.policy_version == 1 and other.rollout()[VERSION].unique().tolist() == [1]


def test_what_waits_is_not_adopted_where_a_resume_brings_other_weights(monkeypatch):
    made = collector(Layers())
    state, other = made.state_dict(), {name: x + 5 for name, x in Layers().state_dict().items()}
    expected, collect = made.rollout()["action"].unique(), made._engine.collect
    monkeypatch.setattr(made._engine, "collect", lambda *args: made.update_policy_weights_(other) or collect(*args))
    made.rollout()
    monkeypatch.undo()
    made.load_state_dict(state)
    batch = made.rollout()
    assert batch[VERSION].unique().tolist() == [made.policy_version] == [0]
    assert torch.equal(batch["action"].unique(), expected)


def test_models_registered_before_the_first_batch_stay_registered():
    made = Collector(Shows(), frames_per_batch=4)
    trained, used = nn.Linear(1, 1), nn.Linear(1, 1)
    made.register_model("critic", trained, used)
    assert "more" in made.rollout().keys()  # noqa: SIM118  a tensordict
    made.update_policy_weights_(model_id="critic")
    assert torch.equal(trained.weight, used.weight)


# ---- in the background -------------------------------------------------------------------------------------------
def until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


@pytest.mark.parametrize("lowered", [False, True])
def test_what_trains_the_given_policy_in_place_is_not_seen_until_it_is_published(lowered):
    policy, buffer = taken_apart(lambda seen: None) if lowered else Layers(), Kept()
    weights = dict(policy.named_parameters())
    fill(weights, 0)
    with collector(policy, replay_buffer=buffer) as made:
        made.start()
        assert made.is_copy and made.policy is not policy
        fill(weights, 5)
        until(lambda: len(buffer) > 3)
        assert all(batch[VERSION].unique().tolist() == [0] for batch in buffer)
        made.update_policy_weights_()
        fill(weights, 6)
        n = len(buffer)
        until(lambda: len(buffer) > n + 2)
    action = "hidden" if lowered else "action"
    shown = torch.cat([batch[action] for batch in buffer], -2)
    assert shown.unique().tolist() == ([0, 10] if lowered else [0, 5])


def test_the_copy_goes_on_acting_where_the_first_reset_shows_more_than_the_specs():
    policy = TensorDictModule(Layers(), ["observation"], ["action"])
    weights, buffer = dict(policy.named_parameters()), Kept()
    fill(weights, 1)
    with Collector(Shows(), policy, frames_per_batch=4, replay_buffer=buffer) as made:
        made.start()
        fill(weights, 2)
        until(lambda: len(buffer) > 1)
        assert made.is_copy and made.policy is not policy
    rows = torch.cat(list(buffer))
    assert "more" in rows.keys() and rows["action"].unique().tolist() == [1]  # noqa: SIM118  a tensordict


def test_a_policy_that_collected_before_it_is_started_goes_on_with_its_episodes():
    def run(start):
        torch.manual_seed(0)
        buffer = Kept()
        made = collector(taken_apart(lambda seen: None), total_frames=64 * 3, replay_buffer=buffer)
        buffer.append(made.rollout().clone())
        if start:
            made.start()
            made.background.thread.join(30)
            made.async_shutdown()
        else:
            list(made)
        return buffer

    for one, other in zip(run(False), run(True), strict=True):
        assert all(torch.equal(one.get(key), other.get(key)) for key in one.keys(True, True))


def test_registered_models_are_whole_for_the_thread_that_uses_them():
    trained, used, torn, rounds = nn.Linear(1, 1), nn.Linear(1, 1), [], []
    fill(dict(trained.named_parameters()), 0)

    def hook(batch):
        before = used.weight.item()
        time.sleep(1e-3)
        rounds.append(used.bias.item())
        torn.append((before, used.bias.item()))

    made = collector(Layers(), replay_buffer=Kept(), post_collect_hook=hook, frames_per_batch=8)
    made.register_model("critic", trained, used)
    made.update_policy_weights_()
    with made:
        made.start()
        for version in range(50):
            fill(dict(trained.named_parameters()), version)
            made.update_policy_weights_()
            n = len(rounds)
            until(lambda n=n: len(rounds) > n)
    assert all(weight == bias for weight, bias in torn) and len(set(rounds)) > 20


def test_a_policy_that_cannot_be_copied_acts_itself_and_says_so():
    class Locked(Layers):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()

    policy = Locked()
    with collector(policy, replay_buffer=Kept()) as made:
        with pytest.warns(UserWarning, match="cannot be copied.*lock"):
            made.start()
        assert made.policy.module is policy and not made.is_copy


def test_without_a_thread_nothing_is_copied():
    policy = Layers()
    made = collector(TensorDictModule(policy, ["observation"], ["action"]))
    places = [tensor.data_ptr() for tensor in made.policy.parameters()]
    made.rollout()
    made.update_policy_weights_()
    made.rollout()
    assert made.policy.module is policy and [tensor.data_ptr() for tensor in policy.parameters()] == places
    assert all(tensor._version == policy.layers[0].weight._version for tensor in policy.parameters())


def test_a_batch_is_not_begun_in_the_middle_of_another():
    made = collector(policy := Layers())
    refused(ArgumentError, "middle", lambda: in_flight(made, made.rollout))
    fill(dict(policy.named_parameters()), 3)
    assert made.rollout()["action"].unique().tolist() == [3]
