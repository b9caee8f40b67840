"""Arguments that no buffer, storage or sampler can use: each is refused by a sentence, and nothing has changed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from face import refused
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
    SegmentWriter,
    TensorDictReplayBuffer,
)
from rlcli.data.index.trajectory_index import RandomStream
from rlcli.errors import ArgumentError


def rows(count, first=0):
    return TensorDict({"count": torch.arange(first, first + count)}, [count])


def buffer(**options):
    rb = TensorDictReplayBuffer(**{"storage": LazyTensorStorage(20), "batch_size": 4, **options})
    rb.extend(rows(10))
    return rb


def objects(**options):
    return ReplayBuffer(storage=ListStorage(4), **options)


def prioritized(*settings):
    return buffer(sampler=PrioritizedSampler(20, *(settings or (1.0, 0.5)), seed=0))


def put(place, value):
    buffer()[place] = value


REFUSED = {
    "a dict into a row": (lambda: put(0, {"count": 1}), "takes TensorDicts"),
    "nothing into a row": (lambda: put(0, None), "takes TensorDicts"),
    "a row beyond all numbers": (lambda: buffer()[2**70], "rows are named by a number"),
    "an object that is no batch": (lambda: objects().extend(5), "a sequence of them"),
    "a sample that is a list": (
        lambda: prioritized().update_tensordict_priority([{"td_error": 1.0}]), "a sample that holds priorities",
    ),
    "all rows of an empty storage": (
        lambda: TensorDictReplayBuffer(storage=LazyTensorStorage(9))[:], "the buffer is empty",
    ),
    "dims that are no whole number": (lambda: LazyTensorStorage(9, ndim=2.0), "1, 2 or 3 batch dims"),
    "an unknown device": (lambda: LazyTensorStorage(9, device="nodevice"), "no such device"),
    "seconds in words": (lambda: LazyMemmapStorage(9, commit_seconds="a"), "a number from 0 on"),
    "no seconds": (lambda: LazyMemmapStorage(9, commit_seconds=None), "a number from 0 on"),
    "a chain in words": (lambda: CompressedStorage(9, longest="a"), "longest must be a whole number"),
    "no width": (lambda: CompressedStorage(9, widest=None), "widest must be a whole number"),
    "no alpha": (lambda: PrioritizedSampler(9, None, 0.5), "a number from 0 on"),
    "an endless beta": (lambda: PrioritizedSampler(9, 1.0, math.inf), "a number from 0 on"),
    "chances in words": (lambda: ReplayBufferEnsemble(buffer(), p="ab"), "a chance for every buffer"),
    "no priority a row": (lambda: prioritized().update_priority([0], torch.zeros(1, 0)), "every row needs a priority"),
    "an endless priority": (lambda: prioritized(0.0, 0.5).update_priority([0], math.inf), "finite numbers"),
    "a complex priority": (lambda: prioritized().update_priority([0], torch.ones(1) * 1j), "real numbers"),
    "integers below nothing": (lambda: RandomStream(0).integers(0, 3), "a bound from 1 on"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_by_a_sentence(case):
    call, text = REFUSED[case]
    with pytest.raises(ArgumentError, match=text):
        call()


@pytest.mark.parametrize(
    "value",
    [torch.eye(4).to_sparse(), torch.empty(4, device="meta"), torch.nested.nested_tensor([torch.ones(2)] * 4)],
    ids=["sparse", "meta", "ragged"],
)
def test_a_segment_takes_rows_of_bytes_alone(tmp_path, value):
    batch = rows(4)
    batch._tensordict["odd"] = value
    with SegmentWriter(tmp_path / "s") as writer:
        refused(ArgumentError, "odd tensor", lambda: writer.append(batch))
        writer.append(rows(4))
        assert writer.count == 1


def test_a_list_of_steps_overwrites_rows_as_it_extends():
    rb = buffer()
    rb[0:2] = [rows(1, 50)[0], rows(1, 60)[0]]
    assert rb[:]["count"].tolist()[:3] == [50, 60, 2]


def test_priorities_of_an_ensemble_are_taken_over_all_or_none():
    members = [prioritized(), prioritized()]
    rb = ReplayBufferEnsemble(*members, batch_size=4, sample_from_all=True)
    sample = rb.sample()
    sample["td_error"] = torch.stack([torch.full((2,), 9.0), torch.full((2,), math.nan)])
    before = [member.sampler.state_dict()["priorities"].tolist() for member in members]
    refused(ArgumentError, "finite", lambda: rb.update_tensordict_priority(sample))
    assert before == [member.sampler.state_dict()["priorities"].tolist() for member in members]


def test_weights_of_slices_do_not_hang_on_rows_that_no_slice_begins_at():
    done = (torch.arange(10) == 9)[:, None]
    batch = TensorDict({"count": torch.arange(10), "next": {"done": done, "terminated": done}}, [10])
    sampler = PrioritizedSliceSampler(20, 1.0, 0.5, slice_len=5, seed=0)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, batch_size=50)
    rb.extend(batch)
    rb.update_priority(range(10), [*[1.0] * 9, 1e-6])
    assert (rb.sample()["priority_weight"] == 1).all()
    rb.update_priority([0], 4.0)
    sample = rb.sample()
    first = np.repeat(sample["index"].numpy()[::5], 5)
    expected = torch.from_numpy(np.where(first == 0, 0.5, 1.0))
    assert torch.allclose(sample["priority_weight"].double(), expected) and (first == 0).any()
