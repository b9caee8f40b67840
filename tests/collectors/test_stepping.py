"""The options of a collector in two parts: what a worker needs can be sent to it, or says what cannot."""

from __future__ import annotations

import inspect
import multiprocessing
import pickle
import threading
from dataclasses import FrozenInstanceError, fields
from functools import partial

import numpy as np
import pytest
import torch
from face import refused
from tensordict.nn import TensorDictModule
from torch import nn
from worlds import Counter

from rlcli.collectors import Collector
from rlcli.collectors.finish import TrajectoryPool
from rlcli.collectors.options import FIELDS, PARENT, CollectorOptions, in_scope
from rlcli.collectors.workers.each import pickled
from rlcli.envs import GymEnv, SerialEnv
from rlcli.errors import ArgumentError


def make_env(lanes: int = 2) -> SerialEnv:
    return SerialEnv(lanes, partial(counter))


def counter() -> GymEnv:
    return GymEnv(Counter())


class Greedy(nn.Linear):
    def forward(self, x):
        return nn.functional.one_hot(super().forward(x).argmax(-1), 3)


def make_policy() -> TensorDictModule:
    torch.manual_seed(3)
    return TensorDictModule(Greedy(2, 3), ["observation"], ["action"])


def stepping(**options) -> CollectorOptions:
    given = {"create_env_fn": make_env, "create_env_kwargs": {"lanes": 3}, "frames_per_batch": 12, "seed": 1}
    return CollectorOptions(**given | options)


def batch_of(sent: bytes) -> list:
    """What a worker collects with the options that it was sent."""
    torch.set_num_threads(1)
    collector = Collector(**vars(pickle.loads(sent)))
    batch = collector.rollout()
    return [(key, batch[key].tolist()) for key in sorted(batch.keys(True, True), key=str)]


# ---- one option, one scope ---------------------------------------------------------------------------------------
def test_every_option_has_one_default_and_a_scope():
    signature = {name: p.default for name, p in inspect.signature(Collector).parameters.items()}
    assert FIELDS.keys() == signature.keys() and {"seed", "postproc"} <= set(in_scope(PARENT))
    without = {"create_env_fn"}
    assert {name: field.default for name, field in FIELDS.items() if name not in without} == {
        name: default for name, default in signature.items() if name not in without
    }


def test_options_are_values():
    with pytest.raises(FrozenInstanceError):
        CollectorOptions(create_env_fn=make_env).seed = 5


@pytest.fixture(scope="module")
def worker():
    """A spawned process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield pool


# ---- sent to a worker --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"policy_factory": make_policy, "next_obs": "exact"},
        {"policy": make_policy(), "keep_keys": ["observation", "action", ("next", "reward")], "max_frames_per_traj": 4},
    ],
    ids=["random", "factory", "policy"],
)
def test_a_spawned_process_steps_with_what_it_is_sent(options, worker):
    here = stepping(**options)
    sent = pickled(here)
    assert worker.apply(batch_of, (sent,)) == batch_of(sent)


def test_functions_that_no_module_holds_are_sent_by_value():
    def make(lanes):
        return SerialEnv(lanes, counter)

    for maker in (make, lambda lanes: SerialEnv(lanes, counter)):
        assert batch_of(pickled(stepping(create_env_fn=maker))) == batch_of(pickled(stepping()))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"create_env_fn": threading.Lock().acquire}, "create_env_fn cannot be sent.*pickle.*partial"),
        ({"create_env_kwargs": {"lanes": threading.Lock()}}, "create_env_kwargs cannot.*it is a dict.*pickle.dumps"),
        ({"policy": threading.Lock()}, "policy cannot.*it is a lock.*policy_factory="),
        ({"policy_factory": threading.Lock().acquire}, "policy_factory cannot.*a function that makes"),
        ({"traj_pool": TrajectoryPool()}, "traj_pool cannot.*Leave it out"),
    ],
    ids=lambda x: x if isinstance(x, str) else next(iter(x)),
)
def test_what_cannot_be_sent_is_refused_by_its_name(options, sentence):
    with pytest.raises(ArgumentError, match="(?s)" + sentence):
        pickled(stepping(**options))


def test_every_member_is_named():
    for field in fields(CollectorOptions):
        held = object.__new__(CollectorOptions)
        values = {other.name: None for other in fields(CollectorOptions)} | {field.name: threading.Lock()}
        for name, value in values.items():
            object.__setattr__(held, name, value)
        with refused(ArgumentError, field.name):
            pickled(held)


# ---- refused before anything is made -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"policy": make_policy(), "policy_factory": make_policy}, "two ways to give one policy"),
        ({"frames_per_batch": 0}, "frames_per_batch must be at least 1"),
        ({"next_obs": "full", "compact_obs": True}, "contradict each other"),
        ({"frames_per_batch": "8"}, "frames_per_batch must be a whole number: got '8'"),
        ({"frames_per_batch": None}, "frames_per_batch must be a whole number"),
        ({"frames_per_batch": True}, "frames_per_batch must be a whole number"),
        ({"total_frames": 1.5}, "total_frames must be a whole number"),
        ({"init_random_frames": float("nan")}, "init_random_frames must be a whole number"),
        ({"max_frames_per_traj": "5"}, "max_frames_per_traj must be a whole number"),
        ({"seed": 1.5}, "seed must be a whole number"),
        ({"seed": "3"}, "seed must be a whole number"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"init_random_frames": -1}, "init_random_frames must be at least 0"),
    ],
)
def test_stepping_refuses_what_contradicts_itself(options, sentence):
    with pytest.raises(ArgumentError, match=sentence):
        stepping(**options)
    with pytest.raises(ArgumentError, match=sentence):
        Collector(make_env, **options)


def test_options_that_contradict_each_other_are_refused():
    with refused(ArgumentError, "split_trajs=True track_traj_ids=True"):
        stepping(split_trajs=True, track_traj_ids=False)
    assert stepping(trajs_per_batch=2).trajectories().per_batch == 2


def test_a_float_that_is_whole_and_numbers_of_numpy_are_taken_as_they_are_meant():
    made = stepping(
        frames_per_batch=np.float64(12), total_frames=1e2, init_random_frames=np.int32(4), max_frames_per_traj=5.0,
        seed=np.int64(3),
    )  # fmt: skip
    found = [made.frames_per_batch, made.total_frames, made.init_random_frames, made.max_frames_per_traj, made.seed]
    assert found == [12, 100, 4, 5, 3] and {type(number) for number in found} == {int}
    assert [batch.shape[1] for batch in Collector(**vars(made))] == [4] * 8 + [2]
    assert stepping(trajs_per_batch=2.0).trajs_per_batch == 2
    refused(ArgumentError, "trajs_per_batch", lambda: stepping(trajs_per_batch=2.5))


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("frames_per_batch", 0, "frames_per_batch"),
        ("frames_per_batch", 2.5, "frames_per_batch"),
        ("total_frames", 0, "total_frames"),
        ("init_random_frames", "5", "init_random_frames"),
    ],
)
def test_what_is_changed_between_batches_is_looked_at_as_at_first(name, value, sentence):
    made = Collector(make_env, frames_per_batch=4, total_frames=8)
    refused(ArgumentError, sentence, lambda: setattr(made, name, value))
    made.frames_per_batch, made.total_frames, made.init_random_frames = 2.0, np.int64(6), 1e1
    assert [batch.shape[-1] for batch in made] == [1, 1, 1] and made.init_random_frames == 10


def test_arguments_of_an_env_that_is_made_already_are_refused():
    with refused(ArgumentError, "create_env_kwargs render_mode"):
        Collector(make_env(), create_env_kwargs={"render_mode": "rgb_array"})
