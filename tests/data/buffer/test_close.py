"""A buffer that is closed gives back what it held, and says so whatever is asked of it."""

import copy
import gc
import threading

import numpy as np
import pytest
import torch
from episodes import episodes
from face import Ring, refused
from tensordict import TensorDict

from rlcli.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictPrioritizedReplayBuffer,
)
from rlcli.errors import ArgumentError, ResourceError

CALLS = {
    "extend": lambda rb, td: rb.extend(td),
    "add": lambda rb, td: rb.add(td[0]),
    "write over": lambda rb, td: rb.__setitem__(0, td[0]),
    "empty": lambda rb, td: rb.empty(),
    "sample": lambda rb, td: rb.sample(),
    "iterate": lambda rb, td: next(iter(rb)),
    "read": lambda rb, td: rb[0],
    "len": lambda rb, td: len(rb),
    "priority": lambda rb, td: rb.update_priority([0], 1.0),
    "transform": lambda rb, td: rb.append_transform(lambda sample: sample),
    "seed": lambda rb, td: rb.set_seed(0),
    "state": lambda rb, td: rb.state_dict(),
    "load state": lambda rb, td: rb.load_state_dict({}),
    "dump": lambda rb, td: rb.dumps("nowhere"),
    "load": lambda rb, td: rb.loads("nowhere"),
    "enter": lambda rb, td: len(rb.__enter__()),
}


@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
def test_every_call_after_it_is_a_sentence(kind, prefetch):
    td = episodes([5, 5])
    rb = TensorDictPrioritizedReplayBuffer(storage=kind(20), alpha=0.6, beta=0.4, batch_size=4, prefetch=prefetch)
    rb.extend(td)
    rb.sample()
    rb.close()
    for name, call in CALLS.items():
        with refused(ArgumentError, "closed"):
            call(rb, td)
            pytest.fail(name)
    assert repr(rb) == "TensorDictPrioritizedReplayBuffer(closed)" and rb.storage.nbytes == 0
    rb.close()


def test_the_thread_ends():
    before = set(threading.enumerate())
    with ReplayBuffer(storage=LazyTensorStorage(20), batch_size=4, prefetch=3) as rb:
        rb.extend(episodes([5, 5]))
        rb.sample()
        (made,) = set(threading.enumerate()) - before
    assert not made.is_alive()


def test_rows_on_disk_are_committed_and_come_back(tmp_path):
    td = episodes([5, 5])
    with ReplayBuffer(storage=LazyMemmapStorage(20, scratch_dir=tmp_path, commit_seconds=1e9)) as rb:
        rb.extend(td)
        held = rb[:]
    with ReplayBuffer(storage=LazyMemmapStorage(20, scratch_dir=tmp_path, resume=True)) as rb:
        assert len(rb) == 10 and torch.equal(rb[:]["observation"], held["observation"])


@pytest.mark.parametrize("name", ["commit", "close"])
def test_what_the_storage_alone_commits_comes_back_as_well(tmp_path, name):
    rb = ReplayBuffer(storage=LazyMemmapStorage(20, scratch_dir=tmp_path, commit_seconds=1e9))
    for seed in range(3):
        rb.extend(episodes([5, 5], first=seed))
        held = rb[:]
        getattr(rb.storage, name)()
        if name == "close":
            with refused(ArgumentError, "closed"):
                rb.extend(episodes([5, 5]))
            with refused(ArgumentError, "closed"):
                rb[:]
        else:
            rb.storage._journal.abandon()  # as a killed process leaves it
        rb = ReplayBuffer(storage=LazyMemmapStorage(20, scratch_dir=tmp_path, resume=True, commit_seconds=1e9))
        assert torch.equal(rb[:]["observation"], held["observation"])


def test_a_storage_without_its_state_is_not_committed(tmp_path):
    storage = LazyMemmapStorage(20, scratch_dir=tmp_path, commit_seconds=0.0)
    ring = Ring(storage)
    ring.extend(episodes([5, 5]))
    for call in (storage.commit, storage.close):
        with pytest.raises(AssertionError):
            call()
    storage.close(ring.content)
    assert len(ReplayBuffer(storage=LazyMemmapStorage(20, scratch_dir=tmp_path, resume=True))) == 10


def test_a_disk_that_refuses_leaves_it_open(tmp_path, monkeypatch):
    rb = ReplayBuffer(storage=LazyMemmapStorage(20, scratch_dir=tmp_path, commit_seconds=1e9), batch_size=4)
    rb.extend(episodes([5, 5]))

    def refuse(*_):
        raise ResourceError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(rb.storage.disk, "sync_file", refuse)
        refused(ResourceError, "disk full", lambda: rb.close())
    assert len(rb) == 10 and len(rb.sample()) == 4
    rb.close()


def test_objects_and_ensembles():
    with ReplayBuffer(storage=ListStorage(9)) as rb:
        rb.extend([1, 2])
    refused(ArgumentError, "closed", lambda: rb.extend([3]))
    members = [ReplayBuffer(storage=LazyTensorStorage(9)) for _ in range(2)]
    with ReplayBufferEnsemble(*members, batch_size=4, sample_from_all=True, prefetch=1) as rb:
        for worker in range(2):
            rb.extend(episodes([4]), buffer=worker)
        assert rb.sample().numel() == 4
    for call in (rb.sample, lambda: rb.extend(episodes([4]), buffer=0), lambda: len(rb), lambda: rb[0][0]):
        with refused(ArgumentError, "closed"):
            call()


@pytest.mark.parametrize("prefetch", [None, 2])
def test_every_handle_of_it_is_closed(prefetch):
    rb = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=4, prefetch=prefetch)
    rb.extend(episodes([5, 5]))
    ensemble = ReplayBufferEnsemble(rb, batch_size=4, prefetch=prefetch)
    handles = [copy.copy(rb), copy.copy(ensemble)]
    ensemble.sample()
    rb.sample()
    ensemble.close()
    for handle in (rb, ensemble, *handles):
        with refused(ArgumentError, "closed"):
            handle.sample()
        handle.close()


def test_a_call_that_waits_while_it_is_closed_is_told():
    rb, told = ReplayBuffer(storage=LazyTensorStorage(9), batch_size=2), []
    rb.extend(episodes([4]))

    def ask():
        try:
            rb[np.array([0])]
        except ArgumentError as error:
            told.append(str(error))

    with rb._lock:
        thread = threading.Thread(target=ask)
        thread.start()
        rb._lock.closed = True
    thread.join()
    assert "the buffer is closed" in told[0]


@pytest.mark.parametrize("load", ["loads", "load_state_dict"])
def test_rows_loaded_onto_a_disk_are_there_after_an_end_without_close(tmp_path, load):
    rows = torch.arange(4000)
    saved = ReplayBuffer(storage=LazyTensorStorage(4000))
    saved.extend(TensorDict({"obs": rows}, [4000]))
    rb = ReplayBuffer(storage=LazyMemmapStorage(4000, scratch_dir=tmp_path / "rows"))
    if load == "loads":
        saved.dumps(tmp_path / "dump")
        rb.loads(tmp_path / "dump")
    else:
        rb.load_state_dict(saved.state_dict())
    del rb
    gc.collect()
    back = ReplayBuffer(storage=LazyMemmapStorage(4000, scratch_dir=tmp_path / "rows", resume=True))
    assert torch.equal(back[:]["obs"], rows)


def test_rows_of_a_ring_that_went_round_are_loaded_onto_a_disk_under_their_own_numbers(tmp_path):
    saved = ReplayBuffer(storage=LazyTensorStorage(30))
    for first in range(0, 72, 12):
        saved.extend(TensorDict({"obs": torch.arange(first, first + 12)}, [12]))
    saved.dumps(tmp_path / "dump")
    with ReplayBuffer(storage=LazyMemmapStorage(30, scratch_dir=tmp_path / "rows")) as rb:
        rb.loads(tmp_path / "dump")
    with ReplayBuffer(storage=LazyMemmapStorage(30, scratch_dir=tmp_path / "rows", resume=True)) as back:
        assert torch.equal(back[:]["obs"], saved[:]["obs"])
