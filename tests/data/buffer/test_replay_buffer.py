"""The faces of a buffer: writing, reading, transforms, threads, checkpoints, and what it refuses."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import sys
import threading
import time
import warnings

import numpy as np
import pytest
import torch
from episodes import episodes, slices_of
from face import Disk, refused
from tensordict import TensorDict

from rlcli.data import (
    CompressedStorage,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from rlcli.errors import ArgumentError, MissingKeyError, ResourceError
from rlcli.transforms import (
    Compose,
    DoubleToFloat,
    MultiStepTransform,
    NextStateReconstructor,
    RewardScaling,
    Transform,
)


def buffer(size=100, *, kind=TensorDictReplayBuffer, storage=None, **options):
    return kind(storage=storage or LazyTensorStorage(size), **{"batch_size": 8, **options})


# ---- rows --------------------------------------------------------------------------------------------------------
def test_extend_says_where_rows_lie_and_reading_gives_them_back():
    rb, batch = buffer(12), episodes([4, 5])
    assert rb.extend(batch).tolist() == list(range(9)) and len(rb) == 9
    assert (rb[:] == batch).all() and (rb[3] == batch[3]).all() and (rb[-1] == batch[8]).all()
    assert rb.extend(batch[:5]).tolist() == [9, 10, 11, 0, 1] and len(rb) == 12
    assert (rb[torch.tensor([11, 0])] == batch[[2, 3]]).all() and (rb[[1, 2]] == batch[[4, 2]]).all()
    mask = torch.zeros(12, dtype=torch.bool)
    mask[[4, 9]] = True
    assert (rb[mask] == batch[[4, 0]]).all() and rb[2:4].shape == (2,) and rb[...].shape == (12,)


def test_a_batch_of_envs_lies_env_after_env_in_a_flat_storage_and_side_by_side_in_lanes():
    batch = TensorDict({"x": torch.arange(6).reshape(2, 3)}, [2, 3])
    flat, lanes = buffer(12), buffer(storage=LazyTensorStorage(12, ndim=2))
    flat.extend(batch)
    assert flat[:]["x"].tolist() == [0, 1, 2, 3, 4, 5]
    refused(ArgumentError, "buffer empty", lambda: lanes[:])
    rows = lanes.extend(batch)
    assert lanes[rows]["x"].tolist() == [0, 1, 2, 3, 4, 5] and rows.tolist() == [0, 2, 4, 1, 3, 5]
    assert lanes[:]["x"].tolist() == lanes[0:2]["x"].tolist() == lanes[...]["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert lanes[:, 0]["x"].tolist() == [0, 3] and lanes[1, -1]["x"].item() == 5 and lanes[3]["x"].item() == 4
    assert lanes[torch.tensor([1]), torch.tensor([2])]["x"].tolist() == [5]
    lanes[:, :2] = lanes[:, 1:]
    assert lanes[:]["x"].tolist() == [[1, 2, 2], [4, 5, 5]]
    refused(ArgumentError, "index bounds", lambda: lanes[2, 0])
    refused(ArgumentError, "other dims", lambda: lanes.extend(batch[:1]))


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_a_batch_size_may_hold_the_numbers_of_numpy(storage):
    rb = buffer(storage=storage(12, ndim=2))
    rb.extend(TensorDict({"x": torch.arange(6).reshape(2, 3)}, tuple(np.array([2, 3]))))
    assert len(rb.sample(np.int64(5))) == 5
    other = buffer(storage=storage(12, ndim=2))
    other.load_state_dict(rb.state_dict())
    assert other[:]["x"].tolist() == [[0, 1, 2], [3, 4, 5]] and type(rb.ring.lane_shape[0]) is int


def test_single_steps_are_added():
    rb, batch = buffer(), episodes([5])
    assert [rb.add(step) for step in batch.unbind(0)] == [0, 1, 2, 3, 4] and (rb[:] == batch).all()
    lanes = buffer(storage=LazyTensorStorage(20, ndim=2))
    assert lanes.add(episodes([4])).tolist() == [0, 1, 2, 3]
    assert rb.extend(list(batch.unbind(0))).tolist() == [5, 6, 7, 8, 9]


def test_rows_are_overwritten_in_place():
    rb, batch = buffer(), episodes([5, 4])
    rb.extend(batch)
    rb[2] = batch[7]
    rb[[0, 4]] = batch[[8, 8]]
    assert (rb[:] == batch[[8, 1, 7, 3, 8, 5, 6, 7, 8]]).all()
    with pytest.raises(ArgumentError, match="got 3 for 2"):
        rb[:2] = batch[:3]


def test_an_empty_buffer_begins_again_with_the_same_fields_or_with_none():
    rb = buffer()
    rb.extend(episodes([5]))
    rb.empty()
    assert len(rb) == 0
    refused(ArgumentError, "buffer empty", lambda: rb.sample())
    refused(ArgumentError, "other keys", lambda: rb.extend(TensorDict({"x": torch.zeros(3)}, [3])))
    rb.empty(fields=True)
    rb.extend(TensorDict({"x": torch.zeros(3)}, [3]))
    assert len(rb) == 3


def test_parts_may_be_given_as_what_makes_them():
    rb = ReplayBuffer(storage=lambda: LazyTensorStorage(9), sampler=SamplerWithoutReplacement, batch_size=2)
    assert rb.storage.max_size == 9 and isinstance(rb.sampler, SamplerWithoutReplacement)


def test_stacks_of_frames_are_stored_one_frame_a_row_and_read_whole():
    frames = torch.randint(0, 256, (40, 6, 6), dtype=torch.uint8)
    batch = episodes([20, 17])
    place = batch["observation"][:, 1].long()
    numbers = torch.arange(37) + (torch.arange(37) >= 20)
    at = torch.stack([torch.where(place >= k, numbers - k, numbers - place) for k in (2, 1, 0)], 1)
    batch["pixels"] = frames[at]
    rb = buffer(60, frame_stack={"pixels": 3})
    rb.extend(batch)
    assert rb.storage.fields["pixels"].shape == (6, 6) and (rb[:] == batch).all()
    assert torch.equal((sample := rb.sample())["pixels"], batch["pixels"][sample["index"]])


# ---- objects -----------------------------------------------------------------------------------------------------
def test_a_list_storage_holds_anything_and_stacks_what_stacks():
    rb = ReplayBuffer(storage=ListStorage(4), batch_size=50)
    rb.extend(["a", {"b": 1}])
    rb.add(("c",))
    assert rb[:] == ["a", {"b": 1}, ("c",)] and len(rb) == 3 and rb[0] == "a"
    rb.extend([5, 6])
    assert rb[:] == [6, {"b": 1}, ("c",), 5] and set(map(str, rb.sample())) == {"6", "{'b': 1}", "('c',)", "5"}
    rb[1] = "new"
    assert rb[1] == "new"
    joined = ReplayBuffer(storage=ListStorage(4), collate_fn=", ".join, batch_size=2)
    joined.extend(["x", "x"])
    assert joined.sample() == "x, x"
    for items in ([torch.ones(2)] * 3, [torch.ones(2), torch.ones(3)], list(episodes([3]).unbind(0))):  # alike or not
        given = []
        kind = TensorDictReplayBuffer if isinstance(items[0], TensorDict) else ReplayBuffer
        noted = lambda found, given=given: given.append(found) or found  # noqa: E731
        listed = kind(storage=ListStorage(9), collate_fn=noted, batch_size=4)
        listed.extend(items)
        sample = listed.sample()
        assert listed.sample() is given[-1] and all(type(found) is list for found in given) and len(sample) == 4
        assert type(sample[0]) is type(items[0]) and all("index" in item for item in sample if kind is not ReplayBuffer)
        assert listed[0] is given[-1][0] and all("index" not in item for item in items if kind is not ReplayBuffer)
    tds = TensorDictReplayBuffer(storage=ListStorage(9), sampler=PrioritizedSampler(9, 1.0, 1.0), batch_size=20)
    tds.extend(episodes([5]))
    sample = tds.sample()
    assert (tds[sample["index"]] == sample.exclude("index", "priority_weight")).all()


def test_objects_have_no_slices_and_no_dumps(tmp_path):
    with refused(ArgumentError, "trajectories"):
        ReplayBuffer(storage=ListStorage(4), sampler=SliceSampler(slice_len=2))
    rb = ReplayBuffer(storage=ListStorage(4))
    rb.extend([1])
    for save in (rb.state_dict, lambda: rb.dumps(tmp_path)):
        with refused(ArgumentError, "place file"):
            save()
    with pytest.warns(UserWarning, match="the storage takes 4"):
        rows = rb.extend(list(range(7)))
    assert [rb[row] for row in rows.tolist()][3:] == [3, 4, 5, 6] and len(rb) == 4


# ---- transforms --------------------------------------------------------------------------------------------------
class Halved(Transform):
    """Stores rewards halved and gives them back whole."""

    def forward(self, td):
        return td.set(("next", "reward"), td["next", "reward"] * 2)

    def inv(self, td):
        return td.set(("next", "reward"), td["next", "reward"] / 2)


def test_a_callable_changes_samples_and_a_transform_has_two_sides():
    batch, seen = episodes([9]), []
    rb = buffer(transform=lambda td: td.set("twice", td["observation"] * 2))
    rb.append_transform(Halved()).append_transform(lambda td: seen.append(td.shape) or td)
    before = batch.clone()
    rb.extend(batch)
    assert (batch == before).all()  # the caller's batch stays as it is
    sample = rb.sample()
    assert seen == [(8,)] and torch.equal(sample["twice"], sample["observation"] * 2)
    assert torch.equal(rb.storage.column(("next", "reward"))[:9], batch["next", "reward"] / 2)
    assert torch.equal(rb[:]["next", "reward"], batch["next", "reward"])


def test_sides_run_in_opposite_orders_and_change_places_when_inverted():
    told = []

    class Told(Transform):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def forward(self, td):
            told.append(f"read {self.name}")
            return td

        def inv(self, td):
            told.append(f"write {self.name}")
            return td

    rb = buffer(transform=Compose(Told("a"), Told("b")))
    rb.append_transform(Told("c"), invert=True)
    rb.extend(episodes([3]))
    assert told == ["read c", "write b", "write a"]
    told.clear()
    rb.sample()
    assert told == ["read a", "read b", "write c"]
    refused(ArgumentError, "inverse", lambda: rb.append_transform(lambda td: td, invert=True))
    refused(ArgumentError, "int", lambda: rb.append_transform(3))


def test_a_transform_that_reads_the_buffer_reads_it_while_nothing_is_written():
    """Its rows are not overwritten between the draw and its own read, however slow it is."""

    class Again(Transform):
        def bind_buffer(self, ring):
            self.ring = ring

        def sampled(self, td, rows):
            time.sleep(0.002)
            return td.set("again", self.ring.read(rows, ["action"])["action"])

    rb = buffer(20, transform=Again(), sampler=RandomSampler(seed=0))
    rb.extend(episodes([20]))
    stop = threading.Event()

    def write():
        number = 0
        while not stop.is_set():
            number += 20
            batch = episodes([20])
            batch["action"] += number
            rb.extend(batch)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(50):
            sample = rb.sample()
            assert torch.equal(sample["again"], sample["action"])
    finally:
        stop.set()
        writer.join()


class Reading(Transform):
    """A user's: it reads the buffer's rows where samples pass."""

    def bind_buffer(self, ring):
        self.ring = ring

    def forward(self, td):
        return td


@pytest.mark.parametrize(
    "make", [lambda: MultiStepTransform(2, 0.9), lambda: NextStateReconstructor(), lambda: Compose(Reading())]
)
@pytest.mark.parametrize("end", ["close", "del", "neither"])
def test_a_transform_that_reads_the_rows_of_a_buffer_belongs_to_one_buffer(make, end):
    transform = make()
    rb = buffer(30, transform=transform)
    if end == "close":
        rb.close()
    elif end == "del":
        del rb
    else:
        refused(ArgumentError, "belongs", lambda: buffer(30, transform=transform))
        return
    other = buffer(30, transform=transform)
    other.extend(episodes([9]))
    assert len(other.sample()) == 8


@pytest.mark.parametrize(
    ("before", "reader", "key"),
    [
        (RewardScaling(0.0, 0.1), MultiStepTransform(3, 0.9), "next.reward"),
        (DoubleToFloat([("next", "observation")]), MultiStepTransform(3, 0.9), "next.observation"),
        (DoubleToFloat(["observation"]), NextStateReconstructor(), "observation"),
    ],
)
def test_what_reads_stored_values_comes_before_what_changes_them(before, reader, key):
    order = rf"changes {key} .*Put {type(reader).__name__} first: Compose\({type(reader).__name__}\(...\)"
    with pytest.raises(ArgumentError, match=order):
        buffer(30, transform=Compose(before, reader))
    rb = buffer(30, transform=Compose(reader, before))
    with pytest.raises(ArgumentError, match=order):
        rb.insert_transform(0, before)
    assert len(rb._transforms) == 2


def test_a_subclass_may_look_at_what_the_transform_it_is_of_reads_anew():
    class Looking(MultiStepTransform):
        def sampled(self, td, rows):
            td["was"] = td["next", "observation"].clone()
            return super().sampled(td, rows)

    rb = buffer(30, transform=Looking(3, 0.9), sampler=SliceSampler(slice_len=4))
    rb.extend(episodes([9]))
    assert "was" in rb.sample()


@pytest.mark.parametrize(
    "sampler", [RandomSampler, lambda: PrioritizedSampler(30, 1.0, 1.0), SamplerWithoutReplacement]
)
def test_what_reads_the_row_below_in_a_sample_is_refused_where_rows_are_in_no_order(sampler):
    below = NextStateReconstructor(source="sample")
    refused(ArgumentError, "draws order", lambda: buffer(30, sampler=sampler(), transform=below))
    rb = buffer(30, sampler=SliceSampler(slice_len=4), transform=NextStateReconstructor(source="sample"))
    rb.extend(episodes([9]))
    refused(ArgumentError, "order", lambda: rb.set_sampler(sampler()))
    assert len(rb.sample()) == 8


# ---- threads -----------------------------------------------------------------------------------------------------
def test_prefetched_samples_are_those_of_the_same_seed_in_the_same_order():
    def draws(**options):
        rb = buffer(sampler=RandomSampler(seed=3), **options)
        rb.extend(episodes([50]))
        return [rb.sample()["index"].tolist() for _ in range(10)]

    assert draws() == draws(prefetch=1) == draws(prefetch=4)


def test_an_error_of_the_prefetching_thread_reaches_the_caller_and_the_next_call_starts_anew():
    rb = buffer(prefetch=2)
    refused(ArgumentError, "buffer empty", lambda: rb.sample())
    rb.extend(episodes([9]))
    assert rb.sample().shape == (8,)
    rb.append_transform(lambda td: td["nothing"])
    with pytest.raises(KeyError):
        rb.sample()


def test_prefetched_samples_are_made_by_a_thread_ahead_of_the_caller():
    made = []
    rb = buffer(prefetch=3, transform=lambda td: made.append(threading.current_thread().name) or td)
    rb.extend(episodes([9]))
    rb.sample()
    deadline = time.monotonic() + 20
    while len(made) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(made) == 4 and all(name.startswith("rlcli-prefetch") for name in made)
    assert rb.sample(5).shape == (5,)  # another size is not made ahead


@pytest.mark.parametrize("prefetch", [None, 2])
def test_an_iteration_is_one_epoch_whatever_was_drawn_before(prefetch):
    rb = buffer(sampler=SamplerWithoutReplacement(), prefetch=prefetch)
    rb.extend(episodes([20]))
    rb.sample()
    for _ in range(2):
        rows = [batch["index"].tolist() for batch in rb]
        assert [len(part) for part in rows] == [8, 8, 4] and sorted(rows[0] + rows[1] + rows[2]) == list(range(20))
    endless = iter(buffer_of_random := buffer())
    buffer_of_random.extend(episodes([3]))
    assert [next(endless).shape for _ in range(20)] == [(8,)] * 20


def test_writers_and_readers_in_many_threads_see_whole_batches():
    """Every slice is one of a single episode; every row is a row that was written as it is."""
    rb = buffer(300, sampler=SliceSampler(slice_len=5, seed=0), batch_size=40)
    rb.extend(episodes([10] * 3))
    errors, stop = [], threading.Event()

    def write(first):
        number = first
        while not stop.is_set():
            rb.extend(episodes([7, 11, 5], first=number))
            number += 3

    def read():
        try:
            for _ in range(300):
                sample = rb.sample()
                slices_of(sample, [5] * 8)
                assert torch.equal(sample["next", "reward"].squeeze(1), sample["observation"][:, 1])
        except BaseException as error:
            errors.append(error)

    writers = [threading.Thread(target=write, args=(1000 * k,)) for k in (1, 2)]
    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in writers + readers:
        thread.start()
    for thread in readers:
        thread.join()
    stop.set()
    for thread in writers:
        thread.join()
    assert not errors, errors[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_samples_reach_a_gpu_through_pinned_memory():
    rb = buffer(device="cuda", pin_memory=True, prefetch=2, sampler=SliceSampler(slice_len=4))
    rb.extend(episodes([50]))
    sample = rb.sample()
    assert sample.device.type == "cuda" and sample["observation"].is_cuda
    torch.cuda.synchronize()
    assert torch.equal(sample["observation"].cpu(), rb[sample["index"]]["observation"].cpu())
    lying = buffer(storage=LazyTensorStorage(100, device="cuda"), sampler=SliceSampler(slice_len=4, seed=0))
    here = buffer(sampler=SliceSampler(slice_len=4, seed=0))
    for rb in (lying, here):
        rb.extend(episodes([5, 20, 3]))
    assert (lying.sample().cpu() == here.sample()).all()


# ---- priorities --------------------------------------------------------------------------------------------------
def test_prioritized_buffers_are_buffers_with_a_prioritized_sampler():
    rb = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(20), batch_size=200)
    rb.extend(episodes([10]))
    sample = rb.sample()
    sample["td_error"] = (sample["index"] == 4).float() * 1e9
    rb.update_tensordict_priority(sample)
    assert (rb.sample()["index"] == 4).all()
    plain = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(20), batch_size=200)
    plain.extend(episodes([10]))
    sample, info = plain.sample(return_info=True)
    assert set(info) == {"index", "priority_weight"} and "index" not in sample
    plain.update_priority(info["index"], torch.where(info["index"] == 7, 1e9, 0.0))
    assert set(plain.sample(return_info=True)[1]["index"].tolist()) == {7}
    refused(ArgumentError, "storage", lambda: PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=100))


def test_the_priorities_of_padding_are_nobodys():
    sampler = PrioritizedSliceSampler(30, 1.0, 1.0, eps=0.0, slice_len=4, strict_length=False, pad_output=True, seed=0)
    rb = buffer(30, sampler=sampler)
    rb.extend(episodes([2, 3, 9]))
    for _ in range(5):
        sample = rb.sample(400)
        mask = sample["collector", "mask"]
        assert not mask.all()
        sample["td_error"] = torch.where(mask, sample["index"] + 1.0, 0.0)
        rb.update_tensordict_priority(sample)
        priorities, seen = sampler._tree.priorities, sample["index"][mask]
        assert torch.equal(torch.from_numpy(priorities[seen.numpy()]), seen + 1.0)


def test_rows_that_are_written_over_get_the_priorities_that_come_with_them():
    rb = buffer(30, sampler=PrioritizedSampler(30, 1.0, 1.0, eps=0.0))
    batch = episodes([5]).set("td_error", torch.ones(5))
    rb.extend(batch)
    rb[1:3] = batch[:2].set("td_error", torch.tensor([4.0, 7.0]))
    rb[4] = batch[0].set("td_error", torch.tensor(9.0))
    assert rb.sampler._tree.priorities[:5].tolist() == [1, 4, 7, 1, 9]
    with refused(ArgumentError, "td_error"):
        rb[0] = batch[0].set("td_error", torch.tensor(float("nan")))
    assert rb.sampler._tree.priorities[0] == 1 and (rb[:]["td_error"] == torch.tensor([1.0, 4, 7, 1, 9])).all()


def test_a_transform_may_leave_rows_out_of_what_is_written_with_priorities():
    class Even(Transform):
        def forward(self, td):
            return td

        def inv(self, td):
            return td[::2]

    rb = buffer(30, sampler=PrioritizedSampler(30, 1.0, 1.0, eps=0.0), transform=Even())
    rb.extend(episodes([5]).set("td_error", torch.arange(1.0, 6)))
    assert len(rb) == 3 and rb.sampler._tree.priorities[:3].tolist() == [1, 3, 5]


def test_priorities_mean_nothing_to_other_samplers():
    rb = buffer()
    rb.extend(episodes([10]))
    sample = rb.sample()
    sample["td_error"] = torch.ones(8)
    rb.update_tensordict_priority(sample)
    refused(MissingKeyError, "index", lambda: rb.update_tensordict_priority(sample.exclude("index")))


# ---- names that ported code expects ------------------------------------------------------------------------------
def test_a_buffer_without_a_storage_is_one_of_objects():
    rb = ReplayBuffer(batch_size=3)
    rb.extend(["a", "b"])
    assert isinstance(rb.storage, ListStorage) and rb.storage.max_size == 1000 and set(rb.sample()) <= {"a", "b"}
    weighed = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, batch_size=3)
    weighed.extend(episodes([5]))
    assert weighed.sample()["priority_weight"].shape == (3,)
    assert len(PrioritizedReplayBuffer(alpha=0.7, beta=0.5)) == 0


def test_a_generator_seeds_the_sampler():
    def drawn(seed):
        rb = buffer(generator=torch.Generator().manual_seed(seed))
        rb.extend(episodes([50]))
        return rb.sample(30)["index"].tolist()

    assert drawn(1) == drawn(1) != drawn(2)


def test_samples_come_one_by_one_and_an_epoch_ends_with_none():
    rb = buffer(sampler=SamplerWithoutReplacement(), batch_size=4)
    rb.extend(episodes([6]))
    for _ in range(2):
        first, second = rb.next(), rb.next()
        assert sorted([*first["index"].tolist(), *second["index"].tolist()]) == list(range(6)) and rb.next() is None


@pytest.mark.parametrize("prefetch", [None, 2])
def test_another_sampler_meets_what_is_stored(prefetch):
    with buffer(40, sampler=RandomSampler(), prefetch=prefetch) as rb:
        for first in range(3):
            rb.extend(episodes([15], first=first))
        rb.sample()
        rb.set_sampler(PrioritizedSampler(40, 1.0, 1.0, eps=0.0, seed=0))
        drawn = torch.cat([rb.sample()["index"] for _ in range(100)])
        assert len(drawn.unique()) == 40
        rb.update_priority(torch.arange(40), torch.arange(40) == 7)
        rb.set_seed(0)  # what was made ahead is gone
        assert rb.sample()["index"].unique().tolist() == [7]
        rb.set_sampler(lambda: SliceSampler(num_slices=3, slice_len=5))
        slices_of(rb.sample(), [5] * 3)
        rb.set_sampler(SamplerWithoutReplacement())
        assert sorted(row for batch in rb for row in batch["index"].tolist()) == list(range(40))


@pytest.mark.parametrize(
    "other",
    [
        lambda: SliceSampler(slice_len=41, end_key=("next", "terminated")),
        lambda: PrioritizedSliceSampler(39, 1.0, 1.0, slice_len=5, end_key=("next", "terminated")),
        lambda: SliceSampler(slice_len=5, traj_key="none of these"),
    ],
)
def test_a_sampler_that_is_refused_leaves_trajectories_as_they_are_told_apart(other):
    with buffer(40, sampler=SliceSampler(num_slices=3, slice_len=5)) as rb:
        rb.extend(episodes([15, 15]))
        markers, asked = rb.ring.markers, rb.ring.asked
        with pytest.raises((ArgumentError, MissingKeyError)):
            rb.set_sampler(other)
        assert rb.ring.markers == markers and rb.ring.asked == asked


def test_a_transform_is_put_where_it_is_wanted():
    rb = buffer()
    rb.extend(episodes([5]))
    rb.append_transform(lambda td: td.set("said", td["said"] + "c"))
    rb.insert_transform(0, lambda td: td.set("said", "a"))
    rb.insert_transform(-1, lambda td: td.set("said", td["said"] + "b"))
    assert rb.sample()["said"] == "abc"


def test_dumps_have_the_other_names(tmp_path):
    rb, other = buffer(), buffer()
    rb.extend(episodes([5]))
    rb.save(tmp_path)
    rb.dump(tmp_path)
    other.load(tmp_path)
    assert (other[:] == rb[:]).all()


# ---- checkpoints -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("prefetch", [None, 3])
@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("written", [1, 3, 9])
def test_a_state_goes_on_bit_for_bit_whatever_was_made_ahead(prefetch, ndim, written):
    def made(seed):
        sampler = SliceSampler(slice_len=4, seed=seed)
        return buffer(storage=LazyTensorStorage(60, ndim=ndim), sampler=sampler, prefetch=prefetch)

    def batch(k):
        return episodes([10, 6], first=2 * k).reshape((2, 8) if ndim == 2 else (16,))

    rb, other = made(0), made(1)
    for k in range(written):
        rb.extend(batch(k))
    rb.sample()
    other.extend(batch(77))
    other.load_state_dict(rb.state_dict())
    for k in range(4):
        for _ in range(3):
            assert (rb.sample() == other.sample()).all()
        for one in (rb, other) if prefetch is None else ():  # a thread's draws and writes come in any order
            one.extend(batch(100 + k))
    assert (rb[:] == other[:]).all()


@pytest.mark.parametrize("theirs", [None, 1, 4])
@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement])
def test_what_one_buffer_made_ahead_is_drawn_by_another_that_makes_more_or_less(sampler, theirs):
    rb, other = (buffer(sampler=sampler(seed=i), prefetch=p) for i, p in enumerate((3, theirs)))
    rb.extend(episodes([10, 6]))
    rb.sample()
    other.load_state_dict(rb.state_dict())
    third = buffer(sampler=sampler(seed=2))
    third.load_state_dict(other.state_dict())
    for _ in range(9):
        sample = rb.sample()
        assert (sample == other.sample()).all() and (sample == third.sample()).all()
    for one in (rb, other, third):
        one.close()


@pytest.mark.parametrize("theirs", [None, 2])
@pytest.mark.parametrize("loads", ["the buffer", "the handle"])
def test_handles_of_one_buffer_share_its_sampler(theirs, loads):
    rb, other = (buffer(sampler=SamplerWithoutReplacement(shuffle=False), prefetch=p) for p in (3, theirs))
    rb.extend(episodes([40]))
    rb.sample()
    handles = [other, copy.copy(other)]
    handles[loads == "the handle"].load_state_dict(rb.state_dict())
    found = [handles[turn % 2].sample()["action"] for turn in range(4)]
    assert torch.equal(torch.cat(found), other[8:]["action"])
    handles[1].set_sampler(SamplerWithoutReplacement(shuffle=False))
    for turn, one in enumerate(handles):
        assert torch.equal(one.sample()["action"], other[8 * turn : 8 * turn + 8]["action"])
    for one in (rb, other):
        one.close()


@pytest.mark.parametrize("copied", [pickle.dumps, copy.deepcopy])
@pytest.mark.parametrize("kind", ["buffer", "ensemble"])
def test_a_copy_of_the_object_is_refused_in_a_sentence_that_says_what_to_do(kind, copied):
    rb = buffer(prefetch=1)
    rb.extend(episodes([5]))
    with refused(ArgumentError, "load_state_dict(rb.state_dict())") as caught:
        copied(rb if kind == "buffer" else ReplayBufferEnsemble(rb, batch_size=4))
    assert ("dumps" in str(caught.value)) == (kind == "buffer")
    rb.sample()
    handle = copy.copy(rb)
    assert handle.ring is rb.ring and len(handle.sample()) == 8


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_dumps_and_loads_bring_back_rows_priorities_and_random_stream(tmp_path, storage):
    def made():
        return TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.4, storage=storage(40), batch_size=16)

    rb, other = made(), made()
    for k in range(4):
        rb.extend(episodes([6, 7], first=2 * k))
    rb.update_priority(torch.arange(40), torch.rand(40))
    rb.dumps(tmp_path / "dump")
    other.loads(tmp_path / "dump")
    assert (rb[:] == other[:]).all() and all((rb.sample() == other.sample()).all() for _ in range(3))


class Counting(Transform):
    """Has a state: how many samples passed."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passed", torch.zeros((), dtype=torch.int64))

    def forward(self, td):
        self.passed += 1
        return td


def by_priority(size=30):
    return PrioritizedSampler(size, 0.7, 0.4, seed=0)


REFUSED = {  # what the saved one and this one are made of, and what is said
    "another sampler": (
        {},
        {"sampler": by_priority},
        "this state is of another sampler (PrioritizedSampler): it lacks",
    ),
    "priorities lost": ({"sampler": by_priority}, {}, "it holds base, beta, given, largest, priorities"),
    "no epochs": ({}, {"sampler": lambda: SamplerWithoutReplacement(seed=0)}, "it lacks left, ran_out"),
    "other priorities": ({"sampler": lambda: by_priority(40)}, {"sampler": by_priority}, "expected 30, got 40"),
    "more transforms": ({}, {"transform": lambda: Compose(Counting(), Counting())}, "expected 2, got 1"),
    "another transform": ({}, {"transform": lambda: Halved()}, "other transforms (Halved)"),
    "trajectories": ({}, {"sampler": lambda: SliceSampler(slice_len=2, traj_key="episode", seed=0)}, "episode is not"),
    "another size": ({"storage": lambda: LazyTensorStorage(29)}, {}, "29"),
}


@pytest.mark.parametrize("way", ["loads", "load_state_dict"])
@pytest.mark.parametrize("case", REFUSED)
def test_a_load_that_is_refused_changes_nothing(case, way, tmp_path):
    usual = {
        "storage": lambda: LazyTensorStorage(30), "sampler": lambda: RandomSampler(seed=3), "transform": Counting,
    }  # fmt: skip

    def made(options):
        return TensorDictReplayBuffer(**{name: make() for name, make in (usual | options).items()}, batch_size=8)

    theirs, mine, text = REFUSED[case]
    saved, ours, twin = made(theirs), made(mine), made(mine)
    saved.extend(episodes([4, 5]))
    for _ in range(3):
        saved.sample()
    for rb in (ours, twin):
        rb.extend(episodes([3, 3], first=7).set("episode", torch.arange(6) // 3))
        rb.sample()
    saved.dumps(tmp_path)
    with pytest.raises((ArgumentError, MissingKeyError)) as caught:
        ours.loads(tmp_path) if way == "loads" else ours.load_state_dict(saved.state_dict())
    assert text in str(caught.value)
    assert ours.state_dict()["rest"]["transforms"] == twin.state_dict()["rest"]["transforms"]
    assert (ours[:] == twin[:]).all() and all((ours.sample() == twin.sample()).all() for _ in range(3))


def in_rows(part, name, value):
    def changed(state):
        rows = state["rows"][part]
        rows[name] = value(rows.get(name))

    return changed


def without(part, name):
    return lambda state: state["rows"][part].pop(name)


WRONG = {
    "a column missing": without("columns", "observation"),
    "a column more": in_rows("columns", "more", lambda _: torch.zeros(17)),
    "another shape": in_rows("columns", "observation", lambda x: x[:, :1]),
    "another dtype": in_rows("columns", "observation", lambda x: x.double()),
    "fewer rows": in_rows("columns", "action", lambda x: x[:5]),
    "no rows": lambda state: state["rows"].pop("columns"),
    "runs": in_rows("ring", "index", lambda index: index | {"runs": index["runs"] + 99}),
    "lanes": in_rows("ring", "index", lambda index: index | {"lanes": index["lanes"][:, :0]}),
    "slots": in_rows("ring", "slots", lambda slots: slots[:0]),
    "flags of a trajectory": in_rows("ring", "markers", lambda of: of | {"end_keys": [["observation"]]}),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("whole", [True, False])
def test_a_state_that_does_not_fit_together_changes_nothing(case, whole, tmp_path):
    def made(scratch, **options):
        storage = LazyMemmapStorage(40, scratch_dir=scratch, commit_seconds=0)
        return buffer(storage=storage, sampler=SliceSampler(slice_len=2, seed=1), next_obs="exact", **options)

    saved, mine = made(tmp_path / "saved", prefetch=2), made(tmp_path / "mine")
    saved.extend(episodes([8, 9]))
    mine.extend(episodes([5, 4], first=3))
    saved.sample()
    state, before = saved.state_dict(), mine.state_dict()
    saved.close()
    WRONG[case](state)
    with pytest.raises((ArgumentError, ValueError)):
        mine.load_state_dict(state) if whole else mine.need_fit(state)
    assert (mine[:] == episodes([5, 4], first=3)).all()
    now, then = (of["rest"]["sampler"]["random"]["state"] for of in (mine.state_dict(), before))
    assert torch.equal(now, then)
    mine.close()
    again = LazyMemmapStorage(40, scratch_dir=tmp_path / "mine", resume=True)
    assert len(buffer(storage=again)) == 9


def test_rows_that_cannot_be_written_when_loaded_leave_an_empty_buffer(tmp_path, monkeypatch):
    saved, rb = (buffer(30, sampler=PrioritizedSampler(30, 1.0, 1.0)) for _ in range(2))
    saved.extend(episodes([9]))
    saved.dumps(tmp_path)
    rb.extend(episodes([5]))

    def full(*_):
        raise MemoryError

    for load in (lambda: rb.loads(tmp_path), lambda: rb.load_state_dict(saved.state_dict())):
        with monkeypatch.context() as patched:
            patched.setattr(LazyTensorStorage, "write", full)
            with pytest.raises(MemoryError):
                load()
        assert len(rb) == 0
        rb.extend(episodes([2]))
        assert set(rb.sample(200)["index"].tolist()) == {0, 1}


# ---- sentences ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda rb: ReplayBuffer(frame_stack=4), "a list of objects has no rows"),
        (lambda rb: rb.insert_transform(1, lambda td: td), "there is no such place (index): got 1, there are 0"),
        (lambda rb: rb.set_sampler(SliceSampler(slice_len=31)), "longer than what the storage holds"),
        (lambda rb: rb.set_sampler(None), "a buffer needs a sampler"),
        (lambda rb: rb.update_priority([0.5], 1.0), "rows are named by their numbers (index): got float32"),
        (lambda rb: rb.update_priority(torch.ones(9, dtype=torch.bool), 1.0), "got bool"),
        (lambda rb: rb.load_state_dict({"a": 1}), "this is no state of a buffer: it holds a"),
        (lambda rb: rb.need_fit({}), "this is no state of a buffer: it holds nothing"),
        (lambda rb: ReplayBuffer(storage=rb.storage), "a storage belongs to one buffer"),
        (lambda rb: buffer(frame_stack=0), "frame_stack must be at least 2: got 0"),
        (lambda rb: buffer(frame_stack="4"), "got '4'"),
        (lambda rb: buffer(frame_stack={"pixels": 4.5}), "got 4.5"),
        (lambda rb: buffer(0.5), "max_size must be a whole number: got 0.5"),
        (lambda rb: buffer(-1), "max_size must be at least 1: got -1"),
        (lambda rb: ReplayBuffer(storage=3), "got int"),
        (lambda rb: buffer(batch_size=0), "at least 1"),
        (lambda rb: buffer(batch_size=None).sample(), "batch_size=..."),
        (lambda rb: rb.sample(2.5), "got 2.5"),
        (lambda rb: rb.extend(torch.zeros(3)), "got Tensor"),
        (lambda rb: rb.extend(episodes([3])[0]), "Use add(step)"),
        (lambda rb: rb.extend(episodes([3]).exclude("action")), "missing action"),
        (lambda rb: rb.extend(episodes([3]).set("new", torch.zeros(3))), "new new"),
        (lambda rb: rb.extend(episodes([3]).double()), "float64"),
        (lambda rb: rb.extend(episodes([3]).set("observation", torch.zeros(3, 5))), "[5]"),
        (lambda rb: rb[30], "row 30, in a buffer that holds 9"),
        (lambda rb: rb[-10], "holds 9"),
        (lambda rb: rb["observation"], "a number, a slice"),
        (lambda rb: rb[0.5], "a number, a slice"),
        (lambda rb: rb[True], "a number, a slice"),
        (lambda rb: rb[torch.zeros(8, dtype=torch.bool)], "a number, a slice"),
    ],
)
def test_what_is_refused_is_said_and_changes_nothing(act, text):
    rb = buffer(30)
    rb.extend(episodes([9]))
    with pytest.raises(ArgumentError) as caught:
        act(rb)
    assert text in str(caught.value)
    assert len(rb) == 9 and (rb[:] == episodes([9])).all()


@pytest.mark.parametrize(
    "disturb", ["another size", "dumps", "a transform that fails", "a transform", "a state that fails"]
)
def test_what_was_made_ahead_and_not_handed_out_is_drawn_again(tmp_path, monkeypatch, disturb):
    fail = []
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(12), sampler=SamplerWithoutReplacement(shuffle=False), prefetch=2, batch_size=4,
        transform=lambda td: td if not fail else fail.pop(),
    )  # fmt: skip
    rb.extend(episodes([12]))
    drawn, sizes = rb.sample()["index"].tolist(), [4, 4]
    if disturb == "another size":
        sizes = [2, 6]
    elif disturb == "dumps":
        rb.dumps(tmp_path)
    elif disturb == "a transform":
        rb.append_transform(lambda td: td)
    elif disturb == "a state that fails":
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(rb.ring, "state_dict", no_memory)
            rb.state_dict()
    else:
        with pytest.raises(ArgumentError):
            rb.sample(-1)
    for size in sizes:
        drawn += rb.sample(size)["index"].tolist()
    rb.close()
    assert drawn == list(range(12))


def no_memory():
    raise MemoryError


def test_samples_made_ahead_need_not_be_columns_for_a_state():
    def made(**options):
        return buffer(12, sampler=SamplerWithoutReplacement(shuffle=False), batch_size=4, **options)

    with made(collate_fn=lambda td: td["action"].tolist(), prefetch=2) as rb, made() as other:
        rb.extend(episodes([12]))
        assert rb.sample() == [0, 1, 2, 3]
        other.load_state_dict(rb.state_dict())
        assert rb.sample() == other.sample()["action"].tolist() == [4, 5, 6, 7]


def test_a_state_of_an_earlier_version_is_read_without_the_samples_made_ahead_in_it():
    rb, other = buffer(12), buffer(12)
    rb.extend(episodes([9]))
    with pytest.warns(UserWarning, match="1 samples .* are left out") as warned:
        other.load_state_dict({**rb.state_dict(), "ahead": [{"columns": {}}], "ahead_size": 8})
    assert warned[0].filename == __file__
    assert (rb.sample() == other.sample()).all()


def test_a_state_of_rows_without_columns_is_refused():
    rb, other = buffer(30), buffer(30)
    rb.extend(episodes([9]))
    state = rb.state_dict()
    with refused(ArgumentError, "missing"):
        other.load_state_dict({**state, "rows": {**state["rows"], "columns": {}}})
    assert len(other) == 0


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage, CompressedStorage, ListStorage])
@pytest.mark.parametrize("end", ["close", "del", "del with a thread", "refused"])
def test_a_storage_whose_buffer_is_gone_may_be_taken_again(kind, end):
    storage = kind(np.int64(20))
    if end == "refused":
        refused(ArgumentError, "batch_size", lambda: ReplayBuffer(storage=storage, batch_size=0))
    else:
        rb = ReplayBuffer(storage=storage, batch_size=2, prefetch=2 if end == "del with a thread" else None)
        refused(ArgumentError, "belongs", lambda: ReplayBuffer(storage=storage))
        rb.close() if end == "close" else rb.set_sampler(SamplerWithoutReplacement())
        if end != "close":
            del rb
    other = ReplayBuffer(storage=storage)
    other.extend(episodes([5]))
    assert len(other) == 5 and type(storage.max_size) is int


def test_a_disk_that_takes_no_files_away_leaves_an_empty_sampler(tmp_path):
    class Stubborn(Disk):
        on = False

        def at(self, call, path):
            if self.on and call == "remove":
                raise PermissionError(1, "Operation not permitted")

    disk = Stubborn()
    storage = LazyMemmapStorage(40, scratch_dir=tmp_path / "rows", commit_seconds=0, disk=disk)
    rb = TensorDictReplayBuffer(storage=storage, sampler=SamplerWithoutReplacement(), batch_size=4)
    rb.extend(episodes([9]))
    rb.sample()
    disk.on = True
    with pytest.raises(ResourceError):
        rb.empty()
    assert len(rb) == 0 and len(rb.sampler._left) == 0


def test_a_refused_transform_is_not_put_on_and_tells_nothing_apart():
    with buffer(40) as rb:
        rb.extend(episodes([9, 9]))
        before = rb.ring.markers, rb.ring.asked
        lives = NextStateReconstructor(["observation"], source="storage", done_key=("next", "terminated"))
        unknown = NextStateReconstructor(["observation"], source="storage", traj_key="nope")
        for refused in (unknown, Compose(lives, unknown)):
            with pytest.raises(MissingKeyError):
                rb.append_transform(refused)
            assert (rb.ring.markers, rb.ring.asked) == before and len(rb.sample()) == 8


class Late(SliceSampler):
    def extended(self, ring, count):
        raise ArgumentError("too late")


def test_a_sampler_that_is_refused_after_it_met_the_ring_leaves_the_index():
    rbs = [buffer(40, sampler=SliceSampler(slice_len=4, seed=0)) for _ in range(2)]
    batch = episodes([15, 15]).set("part", torch.arange(30) // 4)
    for rb in rbs:
        rb.extend(batch)
    refused(ArgumentError, "too late", lambda: rbs[0].set_sampler(Late(slice_len=4, traj_key="part")))
    for _ in range(2):
        assert all((rbs[0].sample() == rbs[1].sample()).all() for _ in range(5))
        for rb in rbs:
            rb.extend(batch)
    assert rbs[0].ring.asked == rbs[1].ring.asked


def test_a_transform_that_fails_uses_no_draw_up():
    fail = [ValueError("mine")]

    def once(sample):
        if fail:
            raise fail.pop()
        return sample

    rb = buffer(sampler=SamplerWithoutReplacement(shuffle=False), batch_size=4, transform=once)
    rb.extend(episodes([12]))
    refused(ValueError, "mine", lambda: rb.sample())
    assert rb.sample()["index"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("options", [{}, {"next_obs": "exact"}, {"codes": True}])
@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage, CompressedStorage])
def test_of_a_batch_with_more_rows_than_fit_the_last_are_kept(make, ndim, options):
    rb = TensorDictReplayBuffer(
        storage=make(20, ndim=ndim), sampler=PrioritizedSampler(20, 1.0, 1.0), batch_size=64, **options
    )
    rb.extend(episodes([7]).reshape(*[1] * (ndim - 1), 7))
    batch = episodes([9, 12, 16, 11], first=1).set("td_error", torch.arange(48.0) + 1)
    with pytest.warns(UserWarning, match="48 rows and the storage takes 20"):
        rows = rb.extend(batch.exclude("td_error").reshape(*[1] * (ndim - 1), 48))
    assert len(rb) == 20 and sorted(rows[28:].tolist()) == list(range(20))
    kept = rb[rows[28:]]
    for key in ("observation", ("next", "observation"), ("next", "done"), ("collector", "traj_ids")):
        assert torch.equal(kept[key], batch[key][28:]), key
    follow = rb.ring.index.successors(rows[28:].numpy())
    ends = [8, 19]  # of those kept: the end of the third episode, and of the batch
    assert follow.tolist() == [-1 if i in ends else rows[28 + i + 1] for i in range(20)]
    assert set(rb.sample()["index"].tolist()) <= set(range(20))


@pytest.mark.parametrize("stored", [0, 7])
@pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_a_batch_that_does_not_fit_is_told_of_once_and_before_it_is_written(make, stored):
    rb = ReplayBuffer(storage=make(20), batch_size=4)
    if stored:
        rb.extend(episodes([stored]))
    before = [row["observation"] for row in rb[:]] if stored else []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refused(UserWarning, "48 20", lambda: rb.extend(episodes([48], first=1)))
    assert len(rb) == stored and all(torch.equal(rb[i]["observation"], x) for i, x in enumerate(before))
    with pytest.warns(UserWarning, match="48 rows and the storage takes 20") as told:
        rb.extend(episodes([48], first=1))
    assert len(told) == 1 and told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rb.extend(episodes([30], first=2))
    assert len(rb) == 20


ENDS = ("next", "terminated")


def rebuilt(**keys):
    return NextStateReconstructor(["observation"], source="storage", fill_value=-1.0, **keys)


@pytest.mark.parametrize(
    ("sampler", "transform"),
    [
        ({"end_key": ("next", "done")}, {"done_key": ENDS}),
        ({"traj_key": "part"}, {"traj_key": "episode"}),
        ({"end_keys": [("next", "done"), ("next", "truncated")]}, {"done_key": ENDS}),
        ({"end_key": ENDS}, {"done_key": ("next", "done")}),
        ({"traj_key": "part"}, {"traj_key": ("collector", "traj_ids")}),
    ],
)
def test_a_sampler_and_a_transform_that_tell_trajectories_apart_by_other_keys_are_refused(sampler, transform):
    def drawn(**keys):
        return SliceSampler(slice_len=2, **keys)

    refused(ArgumentError, "same keys", lambda: buffer(sampler=drawn(**sampler), transform=rebuilt(**transform)))
    with refused(ArgumentError, "done_key traj_key"):
        buffer(transform=Compose(rebuilt(**transform), rebuilt(**({"done_key": "part"} if "done_key" in transform
                                                                  else {"traj_key": "part"}))))  # fmt: skip
    rb = buffer(sampler=drawn(), transform=rebuilt(**transform))
    asked = rb.ring.asked
    refused(ArgumentError, "same keys", lambda: rb.set_sampler(drawn(**sampler)))
    assert rb.ring.asked == asked
    rb = buffer(sampler=drawn(**sampler))
    asked = rb.ring.asked
    refused(ArgumentError, "same keys", lambda: rb.append_transform(rebuilt(**transform)))
    assert rb.ring.asked == asked and not len(rb._transforms)
    rb.set_sampler(drawn())  # nobody names others any more
    rb.append_transform(rebuilt(**transform))


def test_a_sampler_that_names_no_key_follows_the_transforms_whichever_comes_first():
    batch = episodes([6, 6]).exclude(("collector", "traj_ids")).set("part", torch.arange(12) // 4)
    first = buffer(sampler=SliceSampler(slice_len=2, seed=0), transform=rebuilt(traj_key="part"))
    later = buffer(transform=rebuilt(traj_key="part"))
    later.set_sampler(SliceSampler(slice_len=2, seed=0))
    for rb in (first, later):
        rb.extend(batch)
        assert rb.ring.markers.traj_key == "part"
        later.set_sampler(SliceSampler(slice_len=2, seed=0))
        assert rb.ring.markers.traj_key == "part" and rb.ring.markers.end_keys == (("next", "done"),)
    both = buffer(sampler=SliceSampler(slice_len=2, traj_key="part"), transform=rebuilt(done_key=ENDS))
    both.extend(batch)
    assert both.ring.markers.traj_key == "part" and both.ring.markers.end_keys == (ENDS,)


def test_handles_of_one_buffer_share_the_batch_size_that_a_sampler_brings_and_a_running_iteration():
    rb = ReplayBuffer(storage=LazyTensorStorage(40), batch_size=9)
    rb.extend(episodes([10, 10]))
    other = copy.copy(rb)
    assert len(rb.next()) == 9
    other.set_sampler(SliceSampler(num_slices=4, slice_len=5))
    assert len(other.sample()) == len(rb.sample()) == rb.batch_size == 20
    other.set_sampler(SamplerWithoutReplacement(seed=0))
    rb.batch_size = 5
    assert len(other.next()) == 5
    assert [len(sample) for sample in iter(rb.next, None)] == [5] * 3


@pytest.mark.parametrize("side", ["saved", "loaded"])
def test_a_sample_that_is_changed_in_place_changes_no_state(side):
    def made():
        rb = TensorDictReplayBuffer(
            storage=LazyTensorStorage(40), batch_size=4, prefetch=2, sampler=RandomSampler(seed=1)
        )
        rb.extend(episodes([10, 10]))
        return rb

    rb = made()
    rb.sample()
    state = rb.state_dict()
    reader = rb
    if side == "loaded":
        reader = made()
        reader.load_state_dict(state)
    sample, info = reader.sample(return_info=True)
    expected = sample.clone()
    sample.apply_(torch.Tensor.zero_)
    info["index"].fill_(-1)
    again = made()
    again.load_state_dict(state)
    sample, info = again.sample(return_info=True)
    assert (sample == expected).all() and torch.equal(info["index"], expected["index"])


def test_samples_states_seeds_and_samplers_may_come_from_many_threads():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(40), batch_size=4, prefetch=3)
    rb.extend(episodes([10, 10]))
    calls = [
        rb.sample,
        copy.copy(rb).sample,
        rb.state_dict,
        lambda: rb.set_seed(0),
        lambda: rb.set_sampler(RandomSampler()),
    ]
    errors, end = [], time.monotonic() + 1.0

    def work(call):
        try:
            while time.monotonic() < end:
                call()
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    finally:
        sys.setswitchinterval(interval)
    assert not errors and not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("members", [0, 2])
def test_a_forked_child_samples_though_a_thread_made_samples_ahead(prefetch, members):
    if members:
        rb = ReplayBufferEnsemble(*(buffer(20) for _ in range(members)), batch_size=8, prefetch=prefetch)
        for member in rb.buffers:
            member.extend(episodes([9]))
    else:
        rb = buffer(20, prefetch=prefetch)
        rb.extend(episodes([9]))
    rb.sample()

    def work():
        for _ in range(3):
            rb.sample()

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert len(rb.sample()) and rb.close() is None


def test_a_batch_without_envs_is_refused():
    rb = buffer(storage=LazyTensorStorage(10, ndim=2))
    with pytest.raises(ArgumentError, match=r"at least one env: got \[0, 5\]"):
        rb.extend(TensorDict({"x": torch.zeros(0, 5)}, [0, 5]))
    rb.extend(TensorDict({"x": torch.zeros(2, 5)}, [2, 5]))
    assert len(rb) == 10
