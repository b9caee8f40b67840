"""Placement is decided once, as the tables of the collector's documentation say. No accelerator is needed to ask."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from face import refused
from torch import nn
from worlds import Counter

from rlcli.collectors import Collector, MultiSyncCollector
from rlcli.collectors.devices import Placement, column_memory, on_device, one_device, place, resolve, synchronize
from rlcli.collectors.options import CollectorOptions
from rlcli.envs import EnvBase, GymEnv
from rlcli.errors import ArgumentError, ConfigError
from rlcli.specs import Categorical, Composite, Unbounded
from rlcli.weight_update.tensors import matched, wait, write

CPU, META = torch.device("cpu"), torch.device("meta")


def placed(**devices):
    return place(CollectorOptions(create_env_fn=Counter, **devices))


def test_on_one_device_nothing_is_copied_and_nothing_waits():
    for arguments in ({}, {"device": "cpu"}, {"policy_device": "cpu"}, {"storing_device": "cpu"}):
        found = placed(**arguments)
        assert not found.policy_is_elsewhere and not found.storing_is_elsewhere


def test_a_policy_elsewhere_has_rows_copied_and_storage_elsewhere_batches():
    assert placed(policy_device=META).policy_is_elsewhere and not placed(policy_device=META).storing_is_elsewhere
    assert placed(storing_device=META).storing_is_elsewhere and not placed(storing_device=META).policy_is_elsewhere


def test_the_cpu_is_one_device_whatever_its_index():
    assert resolve("cpu:0") == CPU and one_device(["cpu", "cpu:0"]) == "cpu"
    policy = nn.Linear(2, 2, device="cpu:0")
    assert on_device(policy, CPU) is policy is on_device(policy, torch.device("cpu:0"))
    given = nn.Linear(2, 3)
    for device in ("cpu", "cpu:0"):
        assert not Collector(GymEnv(Counter()), given, frames_per_batch=4, device=device).is_copy


def test_device_sets_all_three_and_each_may_override_it():
    found = placed(device=META, env_device="cpu")
    assert (found.env, found.policy, found.storing) == (CPU, META, META)


@pytest.mark.parametrize(("device", "waits"), [("mps", True), ("cuda:1", False), ("meta", False)])
def test_a_copy_is_waited_for_where_nothing_else_keeps_its_order(monkeypatch, device, waits):
    waited = []
    module = SimpleNamespace(synchronize=lambda: waited.append(device))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    synchronize(torch.device(device))
    assert waited == [device] * waits


def test_a_version_of_weights_is_whole_before_another_stream_reads_it(monkeypatch):
    waited, gpu = [], torch.device("cuda", 1)
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    wait([torch.ones(1)])
    assert waited == []
    wait([torch.ones(1), SimpleNamespace(device=gpu), SimpleNamespace(device=gpu)])
    assert waited == [gpu]


@pytest.mark.parametrize("skips", [True, False])
def test_no_cuda_sync_leaves_the_waits_out(monkeypatch, skips):
    waited = []
    monkeypatch.setattr("rlcli.collectors.collector.synchronize", waited.append)
    Collector(GymEnv(Counter()), frames_per_batch=4, storing_device="meta", no_cuda_sync=skips).rollout()
    assert waited == [] if skips else [META]


@pytest.mark.parametrize("name", ["cuda", "cuda:3", "gpu", "mps"])
def test_a_device_that_is_not_there_is_refused_with_its_name(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=name):
        resolve(name)


def test_a_policy_is_copied_exactly_when_one_of_its_tensors_lies_elsewhere():
    policy = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert on_device(policy, CPU) is policy
    copy = on_device(policy, META)
    assert copy is not policy and next(copy.parameters()).device == META
    policy.to("meta")
    policy[1].running_mean = torch.zeros(2)  # one buffer elsewhere is enough
    assert on_device(policy, META) is not policy

    def call(td):
        return td

    assert on_device(call, META) is call


def test_copied_weights_are_the_sources_and_strangers_are_refused():
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    write(matched(a, b), b)
    assert torch.equal(a.weight, b.weight) and torch.equal(a.bias, b.bias)
    refused(ArgumentError, "bias", lambda: matched(nn.Linear(2, 2, bias=False), b))


# ---- devices: the list -------------------------------------------------------------------------------------------
def test_a_list_that_names_one_device_is_that_device():
    assert one_device(["cpu"]) == one_device(("cpu", CPU)) == one_device("cpu") == "cpu"


@pytest.mark.parametrize(
    ("listed", "words"),
    [(["cpu", "meta"], "meta"), ([], "empty")],
)
def test_several_devices_are_for_workers(listed, words):
    refused(ArgumentError, words, lambda: one_device(listed))


def test_a_collector_takes_the_list():
    made = Collector(GymEnv(Counter()), frames_per_batch=4, devices=["cpu"], storing_device="cpu")
    assert made.placement.env == made.placement.policy == made.placement.storing == CPU
    assert made.rollout().shape == (4,)
    refused(ArgumentError, "devices meta", lambda: Collector(GymEnv(Counter()), devices=["cpu", "meta"]))
    refused(ArgumentError, "device devices", lambda: Collector(GymEnv(Counter()), device="cpu", devices=["cpu"]))


def test_an_env_of_tensors_is_moved_to_its_device():
    class Tensors(EnvBase):
        def __init__(self) -> None:
            super().__init__()
            self.observation_spec = Composite({"observation": Unbounded(shape=(2,))}, shape=())
            self.action_spec = Categorical(3)

    for env_device, expected in ((None, None), ("cpu", None), ("meta", META)):
        env = Tensors()
        Collector(env, frames_per_batch=4, env_device=env_device)
        assert env.device == expected


def test_warnings_of_this_process_are_shown_whatever_is_said_of_workers():
    class Loud(Counter):
        def step(self, action):
            warnings.warn("from the env", stacklevel=1)
            return super().step(action)

    for choice in (True, False):
        made = Collector(GymEnv(Loud()), frames_per_batch=4, filter_warnings_subprocess=choice)
        with pytest.warns(UserWarning, match="from the env"):
            made.rollout()


@pytest.mark.parametrize("next_obs", ["exact", "full"])
@pytest.mark.parametrize(
    ("asked", "device"), [({}, None), ({"device": "cpu"}, "cpu"), ({"storing_device": "cpu"}, "cpu")]
)
def test_a_batch_says_the_device_that_was_asked_for(asked, device, next_obs):
    make, wanted = (lambda: GymEnv("CartPole-v1")), None if device is None else torch.device(device)
    options = {"frames_per_batch": 8, "total_frames": 8, "next_obs": next_obs, **asked}
    for collector in (Collector(make(), None, **options), MultiSyncCollector([make], None, **options)):
        for batch in collector:
            assert batch.device == batch["next"].device == wanted
        collector.shutdown()


def test_where_nobody_waits_for_copies_a_batch_lies_in_memory_from_which_they_are_taken_at_once():
    there = Placement(None, None, torch.device("cuda", 0), True, False, True)  # of pinned memory they are not
    assert column_memory(there) is np.empty
