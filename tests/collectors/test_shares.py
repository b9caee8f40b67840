"""Workers that take different numbers of steps for one batch: cut short by others, or with shares of their own."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from face import refused
from tensordict.nn import TensorDictModule
from torch import nn

from rlcli.collectors import Collector, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from rlcli.data import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble
from rlcli.errors import ArgumentError
from rlcli.keys import COLLECTOR_MASK
from rlcli.learning.loops import Hooks
from rlcli.objectives.value import GAE
from rlcli.report.tally import EpisodeStats
from tests.collectors.counting import counting, pair, steps_seen

IDS = ("collector", "traj_ids")
NEXT = ("next", "observation")


@pytest.fixture
def files(tmp_path):
    return [tmp_path / "0", tmp_path / "1"]


def makers(files, make=pair, lengths=(5, 4), delay=0.02):
    """The second worker is a straggler."""
    return [partial(make, files[0], lengths[0]), partial(make, files[1], lengths[1], delay)]


def rows_of(batches, lane):
    """The real rows of a lane of batches ``[N, T]``, end to end."""
    kept = [batch[lane][batch[COLLECTOR_MASK][lane]] for batch in batches]
    found = {}
    for key in ("observation", NEXT, IDS, ("next", "done"), ("next", "truncated")):
        if key == NEXT and NEXT not in kept[0].keys(True):
            found[key] = found["observation"] + torch.cat([rows["next", "delta", "observation"] for rows in kept])
        else:
            found[key] = torch.cat([torch.as_tensor(rows[key]) for rows in kept])
    return found


# ---- stragglers ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["full", "exact", "delta"])
def test_what_stragglers_took_is_marked_and_goes_on_where_it_was_cut(files, mode):
    options = {"frames_per_batch": 80, "total_frames": 240, "cat_results": 0, "next_obs": mode, "seed": 1}
    with MultiSyncCollector(makers(files), None, preemptive_threshold=0.5, **options) as c:
        batches = list(c)
        assert c.frames == steps_seen(*files) and 240 <= c.frames < 240 + 4
    assert sum(int(batch[COLLECTOR_MASK].sum()) for batch in batches) == c.frames
    assert len(batches) > 3 and not batches[0][COLLECTOR_MASK].all()  # somebody was cut short
    seen = set()
    for lane in range(4):
        rows = rows_of(batches, lane)
        obs, after, ids, done = (rows[key] for key in ("observation", NEXT, IDS, ("next", "done")))
        length = (5, 6, 4, 5)[lane]
        assert torch.equal(obs[:, 1], torch.arange(len(obs)) % length)
        assert torch.equal(after, obs + torch.tensor([0.0, 1.0]))  # the real successor, at the cut too
        assert torch.equal(done[:, 0], obs[:, 1] == length - 1) and not rows["next", "truncated"].any()
        assert torch.equal(ids[1:] != ids[:-1], done[:-1, 0])  # an episode keeps its id over the cut
        assert not seen & set(ids.tolist())
        seen |= set(ids.tolist())
    for batch in batches:
        hidden = ~batch[COLLECTOR_MASK]
        assert (batch[IDS][hidden] == -1).all() and not batch["next", "done"][hidden].any()
        assert not batch["next", "reward"][hidden].any()
        if mode != "delta":
            assert not torch.as_tensor(batch[NEXT])[hidden].any()


@pytest.mark.parametrize("mode", ["full", "exact"])
def test_advantages_at_the_cut_are_those_of_the_workers_rows_alone(files, mode):
    torch.manual_seed(0)
    value = TensorDictModule(nn.Linear(2, 1), ["observation"], ["state_value"])
    gae = GAE(gamma=0.9, lmbda=0.8, value_network=value)
    options = {"frames_per_batch": 80, "cat_results": 0, "next_obs": mode, "seed": 1}
    with MultiSyncCollector(makers(files, lengths=(7, 0)), None, preemptive_threshold=0.5, **options) as c:
        batch = c.next()
        mask = batch[COLLECTOR_MASK]
        assert not mask.all()
        whole = gae(batch.clone())
        for lanes in (slice(0, 2), slice(2, 4)):
            alone = gae(batch[lanes, : int(mask[lanes][0].sum())].exclude(COLLECTOR_MASK))
            for key in ("advantage", "value_target"):
                assert torch.allclose(whole[key][lanes][mask[lanes]], alone[key].flatten(0, 1))


@pytest.mark.parametrize(
    ("make", "how", "shape"),
    [(counting, "stack", (2, 40)), (counting, -1, None), (pair, "stack", (2, 2, 20)), (pair, -1, None)],
)
def test_end_to_end_only_rows_are_left_and_side_by_side_they_are_marked(files, make, how, shape):
    options = {"frames_per_batch": 80, "cat_results": how, "preemptive_threshold": 0.5}
    with MultiSyncCollector(makers(files, make, (9, 0)), None, **options) as c:
        batch = c.next()
        if shape is not None:
            assert batch.shape == shape and int(batch[COLLECTOR_MASK].sum()) == c.frames < 80
        else:
            assert batch.numel() == c.frames < 80 and (batch[IDS] >= 0).all()
            assert COLLECTOR_MASK not in batch.keys(True)
        assert batch.names[-1] == "time" and c.frames == steps_seen(*files)


def test_rows_go_to_buffers_without_what_stragglers_did_not_take(files):
    members = [ReplayBuffer(storage=LazyTensorStorage(500, ndim=2)) for _ in range(2)]
    options = {"frames_per_batch": 80, "total_frames": 200, "preemptive_threshold": 0.5, "next_obs": "exact"}
    buffers = ReplayBufferEnsemble(*members, batch_size=8), ReplayBuffer(storage=LazyTensorStorage(500))
    for rb in buffers:
        for file in files:
            file.unlink(missing_ok=True)
        with MultiSyncCollector(makers(files), None, replay_buffer=rb, **options) as c:
            assert set(c) == {None}
            assert len(rb) == c.frames == steps_seen(*files)
    for member, length in zip(members, (5, 4), strict=True):
        assert member[:]["observation"][..., 1].max() == length  # the longer of the worker's two envs' last row
    assert len(members[1]) < len(members[0])


def test_whole_trajectories_are_whole_though_batches_are_cut(files):
    options = {"frames_per_batch": 40, "total_frames": 240, "preemptive_threshold": 0.5}
    with MultiSyncCollector(makers(files), None, trajs_per_batch=1, traj_format="cat", **options) as c:
        lengths = [len(piece) for piece in c if piece["observation"][0, 1] == 0 and piece["next", "done"][-1]]
        assert set(lengths) <= {4, 5, 6} and sum(lengths) + c.trajectories.leftover_frames == c.frames


def test_episodes_are_reported_as_long_as_they_were(files):
    loop, hooks, stats = SimpleNamespace(report_every=10**9, total_frames=10**9), Hooks(), EpisodeStats()
    with MultiSyncCollector(makers(files), None, frames_per_batch=80, preemptive_threshold=0.5, cat_results=0) as c:
        loop.collector = c
        for _ in range(4):
            delivered = c.deliver()
            assert delivered.frames == int(delivered.raw[COLLECTOR_MASK].sum())
            loop.frames = c.frames
            hooks.after_batch(loop, delivered, delivered.raw)
        lengths = [torch.tensor(stats.update(*rows.values())[1]) for rows in hooks.unreported]
    assert set(torch.cat(lengths).tolist()) == {4, 5, 6} and len(lengths) == 8


def test_nobody_is_preempted_where_all_are_waited_for(files):
    options = {"frames_per_batch": 40, "total_frames": 80, "cat_results": 0, "seed": 3}
    for threshold in (None, 1.0):
        with MultiSyncCollector(makers(files, delay=0.005), None, preemptive_threshold=threshold, **options) as c:
            assert [batch.shape for batch in c] == [(4, 10)] * 2 and len(c) == 2


@pytest.mark.parametrize(
    ("kind", "options", "sentence"),
    [
        (MultiSyncCollector, {"preemptive_threshold": 1.5}, "preemptive_threshold"),
        (MultiSyncCollector, {"preemptive_threshold": True}, "preemptive_threshold"),
        (MultiAsyncCollector, {"preemptive_threshold": 0.5}, "preemptive_threshold"),
        (MultiSyncCollector, {"frames_per_batch": [20]}, "frames_per_batch"),
        (MultiSyncCollector, {"frames_per_batch": [20, 0]}, "frames_per_batch"),
        (MultiSyncCollector, {"storing_device": ["cpu", "meta"]}, "storing_device"),
        (MultiSyncCollector, {"device": ["cpu"] * 3}, "device"),
    ],
)
def test_shares_that_cannot_be_are_sentences(kind, options, sentence, files):
    refused(ArgumentError, sentence, lambda: kind(makers(files), None, **options))


def test_a_storage_with_time_as_a_dimension_is_refused_where_lanes_get_different_numbers_of_rows(files):
    rb = ReplayBuffer(storage=LazyTensorStorage(500, ndim=2))
    with refused(ArgumentError, "ndim=2"):
        MultiSyncCollector(makers(files), None, preemptive_threshold=0.5, replay_buffer=rb)
    with refused(ArgumentError, "ndim=2"):
        MultiSyncCollector(makers(files), None, frames_per_batch=[20, 10], replay_buffer=rb)
    with MultiSyncCollector(makers(files), None, frames_per_batch=20, cat_results=0, replay_buffer=rb) as c:
        c.next()
        c.frames_per_batch = [16, 8]
        refused(ArgumentError, "ndim=2", lambda: c.next())


# ---- shares of their own ---------------------------------------------------------------------------------------------
def test_each_worker_takes_its_own_frames_and_all_of_them_are_exact(files):
    options = {"frames_per_batch": [40, 10], "total_frames": 130, "seed": 3, "cat_results": 0}
    with MultiSyncCollector([partial(pair, file, 6) for file in files], None, **options) as c:
        assert c.frames_in_batch == 50 and len(c) == 3
        batches = list(c)
        assert c.frames == 130 == steps_seen(*files)
    assert [batch.shape for batch in batches] == [(4, 20), (4, 20), (4, 10)]
    assert [batch[COLLECTOR_MASK].sum(-1).tolist() for batch in batches] == [[20, 20, 5, 5]] * 2 + [[10, 10, 5, 5]]
    for lanes, first in ((slice(0, 2), 0), (slice(2, 4), 2)):
        with Collector(
            partial(pair, files[0], 6), None, frames_per_batch=2, seed=3, first_lane=first, all_lanes=4
        ) as one:
            for batch in batches:
                for t in range(int(batch[COLLECTOR_MASK][lanes.start].sum())):
                    row = one.next()
                    for key in ("observation", "action", NEXT, ("next", "done")):
                        assert torch.equal(torch.as_tensor(batch[key])[lanes, t], row[key][:, 0])


def test_the_last_batch_cuts_the_longest_shares_first_to_the_step(files):
    for total, expected in ((2, [1, 1]), (19, [10, 10]), (41, [31, 10]), (50, [40, 10])):
        options = {"frames_per_batch": [40, 10], "total_frames": total, "cat_results": "stack"}
        with MultiSyncCollector([partial(counting, file) for file in files], None, **options) as c:
            batch = c.next()
            assert batch[COLLECTOR_MASK].sum(-1).tolist() == expected
            assert 0 <= c.frames - total < 2 and not c.steps_left()


def test_asynchronous_workers_give_batches_of_their_own_sizes(files):
    options = {"frames_per_batch": [30, 10], "total_frames": 200}
    with MultiAsyncCollector([partial(counting, file) for file in files], None, **options) as c:
        sizes = {(d.lanes.start, len(d.raw)) for d in iter(lambda: c.deliver() if c.steps_left() else None, None)}
        assert c.frames == 200 and {(0, 30), (1, 10)} <= sizes
        refused(TypeError, "different sizes", lambda: len(c))


def test_shares_may_change_between_batches(files):
    with MultiSyncCollector([partial(counting, file) for file in files], None, frames_per_batch=20) as c:
        assert c.next().shape == (2, 10)
        c.frames_per_batch = [6, 3]
        assert c.next()[COLLECTOR_MASK].sum(-1).tolist() == [6, 3]
        with refused(ArgumentError, "entries"):
            c.frames_per_batch = [1, 2, 3]
        c.frames_per_batch = 8
        assert c.next().shape == (2, 4)


def test_batches_that_end_with_episodes_are_as_long_as_each_workers_rows(files):
    with MultiSyncCollector(
        [partial(counting, files[0], 5), partial(counting, files[1], 3)],
        None,
        frames_per_batch=20,
        reset_when_done=False,
    ) as c:
        assert [c.next()[COLLECTOR_MASK].sum(-1).tolist() for _ in range(2)] == [[5, 3], [5, 3]]
        assert c.frames == 16 == steps_seen(*files)


@pytest.mark.parametrize("name", ["device", "devices", "policy_device", "env_device", "storing_device"])
def test_devices_may_be_lists_of_one_for_each_worker(name, files):
    options = {"frames_per_batch": 8, name: ["cpu", "cpu"]}
    for sync in (True, False):
        with MultiCollector([partial(counting, file) for file in files], None, sync=sync, **options) as c:
            assert c.next().numel() == 8
