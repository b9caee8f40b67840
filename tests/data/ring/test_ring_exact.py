"""`exact` in a ring: next observations kept once, and read back bit for bit, whatever was done to the batch before."""

import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from batches import same, twins
from face import Ring, refused
from ring_model import check
from tensordict import TensorDict

from rlcli.collectors import Collector
from rlcli.data.index import RandomStream
from rlcli.data.next_obs import full_next_obs
from rlcli.data.storages import LazyTensorStorage
from rlcli.envs import GymEnv, SerialEnv
from rlcli.errors import ArgumentError, MissingKeyError


def rings(max_size, ndim=1):
    """An exact ring and its full twin."""
    return Ring(LazyTensorStorage(max_size, ndim=ndim)), Ring(LazyTensorStorage(max_size, ndim=ndim), next_obs="full")


def marked(td, first_id=0):
    """One id for each env."""
    count = td.batch_size[:-1].numel()
    ids = torch.arange(count).reshape(*td.batch_size[:-1], 1).expand(td.batch_size) + first_id
    return td.set(("collector", "traj_ids"), ids.contiguous())


OPERATIONS = {
    "as it is": lambda td: td,
    "flat": lambda td: td.reshape(-1),
    "one env": lambda td: td[1],
    "a part of the time": lambda td: td[:, 1:4],
    "every second step": lambda td: td[:, ::2],
    "shuffled": lambda td: td.reshape(-1)[torch.randperm(td.numel(), generator=torch.Generator().manual_seed(0))],
    "masked": lambda td: td[torch.arange(td.numel()).reshape(td.shape) % 3 > 0],
    "stacked": lambda td: torch.stack([td[0], td[2]]),
    "joined": lambda td: torch.cat([td[:1], td[2:]]),
    "joined in time": lambda td: torch.cat([td[:, 3:], td[:, :3]], 1),
    "cloned": lambda td: td.clone(),
    "another dtype beside": lambda td: td.set("score", torch.arange(td.numel(), dtype=torch.float64).reshape(td.shape)),
    "observations replaced": lambda td: td.set("observation", td["observation"] + 1),
}


@pytest.mark.filterwarnings("ignore:.*not followed by their own")
@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_batch_that_was_changed_is_stored_as_its_full_twin(name, dtype):
    exact, full = twins(3, lanes=3, steps=6, dtype=dtype)
    ours, theirs = rings(13)
    for first in (0, 10):
        one, other = (OPERATIONS[name](marked(td.clone(False), first)) for td in (exact, full))
        assert ours.extend(one).tolist() == theirs.extend(full_next_obs(other)).tolist()
        check(ours)
        rows = np.arange(len(ours))
        same(ours.read(rows), theirs.read(rows))
        assert ours.exact or name in ("cloned", "masked", "stacked", "joined", "joined in time")


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_every_ndim_reads_what_full_reads(ndim):
    ours, theirs = rings(50, ndim)
    for seed in range(5):
        exact, full = (marked(td) for td in twins(seed, lanes=4, steps=5))
        for ring, td in ((ours, exact), (theirs, full)):
            ring.extend(td.reshape(2, 2, 5) if ndim == 3 else td)
        check(ours)
        rows = np.arange(len(ours))
        same(ours.read(rows), theirs.read(rows))
        assert ours.index.successors(rows).tolist() == theirs.index.successors(rows).tolist()
    assert ours.exact and not theirs.exact and ours.lanes == {1: 1, 2: 4, 3: 4}[ndim]
    assert ("next", "observation") not in ours.storage.fields


def test_a_batch_of_the_collector_costs_its_ends_and_one_row_an_env():
    exact, _ = twins(0, lanes=3, steps=40, ends=5)
    ring = Ring(LazyTensorStorage(1000))
    ring.extend(marked(exact))
    inner = len({(t, lane) for t, lane in _places(exact) if t < 39})
    assert ring.index.slots_in_use == inner + 3


def _places(td):
    ends = td["next", "observation"].ends.tolist()
    return [(e % td.shape[1], e // td.shape[1]) for e in ends]


def test_real_cartpole_in_many_small_batches_is_bit_equal_to_full():
    def play(mode):
        torch.manual_seed(0)
        env = SerialEnv(3, lambda: GymEnv(gym.make("CartPole-v1", max_episode_steps=15)))
        collector = Collector(env, None, frames_per_batch=21, total_frames=2100, next_obs=mode)
        collector.set_seed(3)
        yield from collector
        collector.shutdown()

    for ndim in (1, 2):
        ours, theirs = rings(700, ndim)
        for exact, full in zip(play("exact"), play("full"), strict=True):
            ours.extend(exact)
            theirs.extend(full)
        check(ours)
        rows = np.arange(len(ours))
        same(ours.read(rows), theirs.read(rows))
        assert ours.exact and ours.index.successors(rows).tolist() == theirs.index.successors(rows).tolist()
        drawn = [ring.index.draw(RandomStream(5), 50, 6)[0].tolist() for ring in (ours, theirs)]
        assert drawn[0] == drawn[1]


def test_n_steps_do_not_step_from_one_trajectory_into_a_row_that_looks_alike():
    ring = Ring(LazyTensorStorage(20), next_obs="exact")
    td = TensorDict({"observation": torch.zeros(6, 1), "next": {"observation": torch.zeros(6, 1)}}, [6])
    td["next", "done"] = torch.tensor([0, 0, 1, 0, 0, 0], dtype=torch.bool)[:, None]
    td["collector", "traj_ids"] = torch.tensor([4, 4, 4, 4, 5, 5])
    ring.extend(td)
    check(ring)
    path, steps = ring.index.walk(np.arange(6), 3)
    assert steps.tolist() == [3, 2, 1, 1, 2, 1]
    assert path.tolist() == [[0, 1, 2], [1, 2, 2], [2, 2, 2], [3, 3, 3], [4, 5, 5], [5, 5, 5]]
    assert ring.index.slots_in_use == 2  # the last row's, and that of 4, which may go on later


def test_shuffled_batches_are_told_once_with_the_count_and_the_way_out():
    _, full = twins(0, lanes=4, steps=50)
    ring = Ring(LazyTensorStorage(1000), next_obs="exact")
    mixed = full.reshape(-1)[torch.randperm(200, generator=torch.Generator().manual_seed(0))]
    with pytest.warns(UserWarning, match=r"199 of 199 rows are not followed .*reshape\(-1\)"):
        ring.extend(mixed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ring.extend(mixed)


def test_what_does_not_fit_changes_nothing():
    exact, full = twins(0)
    ring = Ring(LazyTensorStorage(40))
    ring.extend(marked(exact))
    before, version = ring.read(np.arange(len(ring))), ring.index.version
    for wrong, sentence in (
        (full.exclude(("next", "observation")), "missing next.observation"),
        (marked(full.clone()).set("more", torch.zeros(3, 5)), "new more"),
        (marked(full.clone()).set("observation", torch.zeros(3, 5, 4, dtype=torch.float64)), "expected float32"),
        (marked(full.clone()).set(("next", "camera", "pixels"), torch.zeros(3, 5, 2, 4)), "next.camera.pixels"),
    ):
        with pytest.raises(ArgumentError, match=sentence):
            ring.extend(marked(wrong))
    same(ring.read(np.arange(len(ring))), before)
    assert ring.index.version == version and ring.cursor == 15


def test_markers_that_are_missing_or_odd_are_named():
    _, full = twins(0)
    ring = Ring(LazyTensorStorage(40))
    ring.use_markers("episode_id", [("next", "done")])
    refused(MissingKeyError, "episode_id", lambda: ring.extend(full))
    ring = Ring(LazyTensorStorage(40))
    refused(ArgumentError, "trajectory", lambda: ring.extend(full.clone().set("episode", torch.zeros(3, 5))))
    with refused(ArgumentError, "episode int64[2]"):
        Ring(LazyTensorStorage(40)).extend(full.clone().set("episode", torch.zeros(3, 5, 2, dtype=torch.int64)))


def test_only_given_keys_are_read_and_in_that_order():
    exact, full = twins(0)
    ring = Ring(LazyTensorStorage(40))
    ring.extend(marked(exact))
    got = ring.read(np.array([4, 2]), [("next", "camera", "pixels"), "observation"])
    assert set(got.keys(True, True)) == {("next", "camera", "pixels"), "observation"}
    assert torch.equal(got["next", "camera", "pixels"], full.reshape(-1)["next", "camera", "pixels"][[4, 2]])
    refused(MissingKeyError, "colour", lambda: ring.read(np.array([0]), ["colour"]))
