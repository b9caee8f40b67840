"""What a shared buffer offers like any other, and what it refuses in a sentence."""

from __future__ import annotations

import os
import signal
import tempfile
import time

import numpy as np
import pytest
import torch
from face import refused
from shared_worlds import batch, buffer, check_rows, check_slices, forked, write_on
from tensordict import TensorDict

from rlcli.data import (
    CompressedStorage,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from rlcli.data.files.tensors import map_file
from rlcli.errors import ArgumentError, ResourceError
from rlcli.transforms import NextObservationDelta, Transform

SAMPLERS = {
    "without": lambda: SamplerWithoutReplacement(),
    "priorities": lambda: PrioritizedSampler(100, 0.7, 0.5),
    "slice priorities": lambda: PrioritizedSliceSampler(100, 0.7, 0.5, slice_len=4),
    "slices without": lambda: SliceSamplerWithoutReplacement(slice_len=4),
}


def shared(storage=None, **options):
    storage = LazyTensorStorage(100) if storage is None else storage
    return TensorDictReplayBuffer(**{"storage": storage, "batch_size": 12, "shared": True, **options})


@pytest.mark.parametrize("kind", SAMPLERS)
def test_every_sampler_draws_what_was_published_since(kind):
    rng = np.random.default_rng(0)
    with shared(sampler=SAMPLERS[kind]()) as rb, rb.writer() as writer:
        start = 0
        for _ in range(25):
            for _ in range(int(rng.integers(0, 9))):  # now and then more than the ring holds
                length = int(rng.integers(1, 30))
                writer.extend(batch(0, 0, start, 1, length)[0])
                start += length
            if start:
                sample = rb.sample()
                head = check_rows(sample)
                assert start - 100 <= head[:, 2].min() and head[:, 2].max() < start
                if "slice" in kind:
                    check_slices(sample)
                if "priorities" in kind:
                    rb.update_priority(sample["index"], torch.rand(len(sample)))


def test_a_batch_without_rows_writes_none():
    with shared(sampler=PrioritizedSampler(100, 1.0, 1.0)) as rb:
        rows = batch(0, 0, 0, 1, 30)[0]
        rb.extend(rows)
        rb.update_priority(range(30), torch.arange(30.0))
        assert rb.extend(rows[:0]).tolist() == [] and len(rb) == 30
        assert rb.sampler.state_dict()["priorities"][:30].tolist() == pytest.approx([*range(30)], abs=1e-6)


def test_the_owner_may_write_itself_and_knows_where_its_rows_lie():
    with shared(sampler=PrioritizedSampler(100, 1.0, 1.0)) as rb:
        first = batch(0, 0, 0, 1, 30)[0]
        first["td_error"] = torch.arange(30.0)
        assert rb.extend(first).tolist() == list(range(30))
        later = batch(0, 0, 30, 1, 90)[0]
        later["td_error"] = torch.zeros(90)
        assert rb.extend(later).tolist() == [n % 100 for n in range(30, 120)]
        assert rb.sample()["index"].min() >= 20  # those with a priority that are still there
        refused(ArgumentError, "finite numbers", lambda: rb.extend(first.set("td_error", -torch.ones(30))))
        step = batch(0, 0, 120, 1, 1)[0, 0]
        step["td_error"] = torch.tensor(0.0)
        assert rb.add(step) == 20
        assert rb[20]["observation"][3] == 120


def test_an_emptied_buffer_goes_on_with_what_is_published_next():
    with shared() as rb, rb.writer() as writer:
        writer.extend(batch(0, 0, 0, 1, 33)[0])
        assert len(rb) == 33
        rb.empty()
        assert len(rb) == 0
        writer.extend(batch(0, 0, 33, 1, 20)[0])
        assert check_rows(rb[:])[:, 2].tolist() == list(range(33, 53))
        assert rb.sample().shape == (12,)


def test_a_dump_of_a_shared_buffer_is_read_by_a_plain_one(tmp_path):
    with shared() as rb, rb.writer() as writer:
        for start in range(0, 130, 13):
            writer.extend(batch(0, 0, start, 1, 13)[0])
        rb.dumps(tmp_path)
        state = rb.state_dict()
        plain, other = (TensorDictReplayBuffer(storage=LazyTensorStorage(100)) for _ in range(2))
        plain.loads(tmp_path)
        other.load_state_dict(state)
        for loaded in (plain, other):
            assert torch.equal(loaded[:]["observation"], rb[:]["observation"])
            check_rows(loaded[:])


def test_rows_that_were_drawn_stay_while_a_transform_looks_at_the_buffer():
    class Peek(Transform):
        def sampled(self, sample, rows):
            assert len(rb) == 100
            assert torch.equal(rb.ring.columns(rows)["observation"], sample["observation"])
            return sample

    def write_over(columns):  # between the draw and the transform: everything that was drawn is overwritten
        for rows in later:
            writer.extend(rows)
        later.clear()
        return columns

    later = [batch(0, 0, 100, 1, 100)[0]]
    with shared(collate_fn=write_over) as rb, rb.writer() as writer:
        rb.append_transform(Peek())
        writer.extend(batch(0, 0, 0, 1, 100)[0])
        assert rb.sample()["observation"][:, 3].max() < 100
        assert rb.sample()["observation"][:, 3].min() >= 100


@pytest.mark.filterwarnings("ignore:.*not followed by their own")
def test_shuffled_rows_of_one_write_keep_their_next_observations():
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    whole = batch(0, 0, 0, 3, 20, lazy=False).reshape(-1)
    with shared(next_obs="exact") as rb, rb.writer() as writer:
        for part in (whole[order[:40]], torch.cat((whole[10:20], whole[50:60], whole[25:30]))):
            writer.extend(part)
        writer.extend(torch.cat((whole[0:3], whole[20:23], whole[3:6], whole[23:26])))  # two lives, in turns
        check_rows(rb[:])


def test_a_stopped_writer_makes_nobody_wait():
    with buffer() as rb:
        pid = forked(write_on, rb.writer(), 0, 0)
        deadline = time.monotonic() + 60
        while len(rb) < 100 and time.monotonic() < deadline:
            time.sleep(0.001)
        for _ in range(10):
            os.kill(pid, signal.SIGSTOP)
            check_slices(rb.sample().exclude("index"))
            check_rows(rb[:], 0)
            os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_write_that_fails_publishes_nothing_and_the_next_one_counts(monkeypatch):
    from rlcli.data.shared.row_log import RowLog

    with shared() as rb, rb.writer() as writer:
        writer.extend(batch(0, 0, 0, 1, 7)[0])
        kept = RowLog._part
        monkeypatch.setattr(RowLog, "_part", lambda *_: (_ for _ in ()).throw(ResourceError("the disk is full")))
        refused(ResourceError, "full", lambda: writer.extend(batch(0, 0, 7, 1, 9)[0]))
        monkeypatch.setattr(RowLog, "_part", kept)
        assert len(rb) == 7
        assert writer.extend(batch(0, 0, 7, 1, 9)[0]) == 16
        assert check_rows(rb[:])[:, 2].tolist() == list(range(16))


def test_a_batch_that_does_not_fit_is_refused_and_cuts_nothing():
    with shared() as rb, rb.writer() as writer:
        writer.extend(batch(0, 0, 0, 1, 3)[0])
        refused(ArgumentError, "other keys", lambda: writer.extend(batch(0, 0, 3, 1, 2, ids=False)[0]))
        writer.extend(batch(0, 0, 3, 1, 2)[0])
        assert len(rb) == 5 and rb.ring.index.trajectories()["length"].tolist() == [5]


def test_a_batch_that_the_owner_cannot_follow_is_told_each_time_and_leaves_no_half_of_it():
    sampler = SliceSampler(slice_len=2, traj_key="name")
    with shared(sampler=sampler) as rb, rb.writer() as writer:
        writer.extend(batch(0, 0, 0, 1, 6)[0].set("name", torch.zeros(6, 2)))  # two values a row
        for _ in range(2):
            with refused(ArgumentError, "value row"):
                rb.sample()
        rb.ring.asked = (None, ())
        assert len(rb) == 6
        check_rows(rb[:])


def test_a_batch_as_long_as_the_ring_fits_and_no_longer_one():
    with shared(LazyTensorStorage(100, ndim=2)) as rb, rb.writer() as writer:
        refused(ArgumentError, "larger", lambda: writer.extend(batch(0, 0, 0, 3, 34)))
        for start in (0, 33):
            writer.extend(batch(0, 0, start, 3, 33))
            assert len(rb) == 99
            check_rows(rb[:].reshape(-1))


def test_rows_that_could_not_lie_in_shared_memory_are_refused_before_the_first(monkeypatch):
    import shutil

    class Usage:
        free = 1000

    with shared() as rb:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage)
        refused(ResourceError, "LazyMemmapStorage", lambda: rb.writer().extend(batch(0, 0, 0, 1, 3)[0]))
        assert len(rb) == 0


def test_a_file_whose_name_goes_while_it_is_mapped_is_not_made_anew(tmp_path, monkeypatch):
    path, from_file = tmp_path / "rows", torch.from_file
    path.write_bytes(b"1234")

    def later(*args, **options):
        path.unlink()
        return from_file(*args, **options)

    monkeypatch.setattr(torch, "from_file", later)
    assert bytes(map_file(path, 4).tolist()) == b"1234" and not path.exists()
    with pytest.raises(FileNotFoundError):
        map_file(path, 4)
    assert not path.exists()


def prioritized_writer():
    rb = shared(sampler=PrioritizedSampler(100, 1.0, 1.0))
    rb.writer().extend(batch(0, 0, 0, 1, 3)[0].set("td_error", torch.ones(3)))


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda: shared(ListStorage(10)), "keeps objects"),
        (lambda: ReplayBuffer(storage=LazyTensorStorage(10)).writer(), "Make it with shared=True"),
        (lambda: ReplayBufferEnsemble.per_worker(2, lambda: shared(shared=False)).writer(0), "shared=True"),
        (lambda: shared().sample(), "the buffer is empty"),
        (lambda: shared().writer().extend(batch(0, 0, 0, 1, 101)[0]), "max_size=101"),
        (lambda: shared().writer().extend([1, 2]), "takes TensorDicts"),
        (lambda: prioritized_writer(), "only the buffer's owner can"),
    ],
)
def test_what_one_process_alone_can_do_is_refused_in_a_sentence(act, text):
    with pytest.raises(ArgumentError) as caught:
        act()
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "made",
    [
        lambda: {"next_obs": "exact"},
        lambda: {"transform": NextObservationDelta()},
        lambda: {"codes": True},
        lambda: {"storage": CompressedStorage(100)},
        lambda: {"storage": LazyMemmapStorage(100, scratch_dir=tempfile.mkdtemp(), commit_seconds=0)},
    ],
)
def test_rows_are_kept_as_a_buffer_of_one_process_keeps_them(made):
    one, other = batch(7, 0, 0, 1, 1)[0, 0], batch(0, 0, 130, 1, 20)[0]
    with shared(**made()) as rb, rb.writer() as writer, shared(**made(), **{"shared": False}) as plain:
        for start in range(0, 130, 13):
            rows = batch(0, 0, start, 1, 13)[0]
            writer.extend(rows), plain.extend(rows)
        for each in (rb, plain):
            each[30] = one
        assert (rb[:] == plain[:]).all() and rb.ring.exact == plain.ring.exact
        with shared(**made()) as loaded:
            loaded.load_state_dict(rb.state_dict())
            for each in (loaded, plain):
                each.extend(other)
            assert (loaded[:] == plain[:]).all()
        rb.empty(fields=True), plain.empty(fields=True)
        writer.extend(other), plain.extend(other)
        assert (rb[:] == plain[:]).all()
    if rb.storage.kept:
        storage = LazyMemmapStorage(100, scratch_dir=rb.storage.where, resume=True)
        assert (TensorDictReplayBuffer(storage=storage)[:] == other).all()


@pytest.mark.parametrize("next_obs", ["exact", "full"])
def test_observations_without_numbers_need_no_place(next_obs):
    nothing = torch.zeros(10, 0)
    done = (torch.arange(10) % 4 == 3)[:, None]
    batch = {"observation": nothing, "action": torch.arange(10), "next": {"observation": nothing, "done": done}}
    rb = ReplayBuffer(storage=LazyTensorStorage(15), shared=True, next_obs=next_obs)
    for _ in range(3):
        rb.extend(TensorDict(batch, [10]))
    assert rb[:]["next", "observation"].shape == (15, 0) and rb[:]["action"].sum() == 45 + 35
    rb.close()
