"""`NextStateReconstructor` against the next observations of the same steps, collected in full."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from face import refusals, refused
from tensordict import TensorDict

from rlcli.data import LazyTensorStorage, RandomSampler, ReplayBuffer, SliceSampler, TensorDictReplayBuffer
from rlcli.envs.transforms import NextStateReconstructor
from rlcli.errors import ArgumentError, MissingKeyError

NEXT_OBS = ("next", "observation")


def episodes(lengths: list[int], *, first: int = 0, ends: bool = True, dtype=torch.float32) -> TensorDict:
    """Trajectories end to end; the observation of row i is [i, i], its truth is `true`, [i + 1, i + 1]."""
    count = sum(lengths)
    done = torch.zeros(count, 1, dtype=torch.bool)
    if ends:
        done[np.cumsum(lengths) - 1] = True
    rows = torch.arange(count)
    return TensorDict(
        {
            "observation": (rows[:, None] + 1000 * first).expand(count, 2).to(dtype).clone(),
            "next": {
                "reward": torch.ones(count, 1),
                "done": done,
                "terminated": done.clone(),
                "truncated": torch.zeros_like(done),
            },
            "collector": {
                "traj_ids": torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)) + first
            },
        },
        batch_size=[count],
    )


def buffer(size: int, *, sampler=None, batch_size=16, **options) -> TensorDictReplayBuffer:
    rows = options.get("source") != "sample"
    usual = RandomSampler(seed=0) if rows else SliceSampler(slice_len=2, seed=0)
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(size), sampler=sampler or usual, batch_size=batch_size,
        transform=NextStateReconstructor(**options),
    )  # fmt: skip


# ---- from the storage --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "sampler",
    [
        lambda: RandomSampler(seed=1),
        lambda: SliceSampler(slice_len=4, seed=1),
        lambda: SliceSampler(num_slices=4, seed=1),
    ],
)
def test_every_row_gets_its_successor_unless_nobody_kept_it(sampler):
    rb = buffer(50, sampler=sampler())
    rb.extend(episodes([9, 4, 20, 17]))
    last = {8, 12, 32, 49}
    for _ in range(20):
        sample = rb.sample()
        here, after = sample["observation"][:, 0], sample[NEXT_OBS]
        for row, x in zip(here.tolist(), after, strict=True):
            if int(row) in last:
                assert x.isnan().all()
            else:
                assert torch.equal(x, torch.full((2,), row + 1))


def test_the_newest_row_gets_its_successor_once_it_is_written():
    rb = buffer(50)
    rb.extend(episodes([10], ends=False))
    assert rb[9][NEXT_OBS].isnan().all()
    later = episodes([5], ends=False)
    later["observation"] += 10
    rb.extend(later)
    assert torch.equal(rb[9][NEXT_OBS], torch.tensor([10.0, 10.0]))


def test_a_full_ring_is_read_around_its_end_and_never_across_its_cursor():
    rb = buffer(12)
    truth = {}
    for part in range(5):  # one trajectory of 35 steps, written in sevens
        batch = episodes([7], ends=False)
        batch["observation"] += 7 * part
        rb.extend(batch)
    got = rb[torch.arange(12)]
    for here, after in zip(got["observation"][:, 0].tolist(), got[NEXT_OBS][:, 0].tolist(), strict=True):
        truth[here] = after
    assert sorted(truth) == list(range(23, 35))
    assert all(after == here + 1 for here, after in truth.items() if here != 34) and np.isnan(truth[34])


def test_integers_need_a_fill_value_and_take_it_where_nobody_kept_the_successor():
    for source in ("storage", "sample"):
        rb = buffer(30, source=source)
        rb.extend(episodes([10, 5], dtype=torch.uint8))
        with refused(ArgumentError, "uint8 fill_value=0"):
            rb.sample()
    rb = buffer(30, fill_value=7)
    rb.extend(episodes([10, 5], dtype=torch.uint8))
    got = rb[torch.arange(15)][NEXT_OBS][:, 0]
    want = torch.arange(1, 16).to(torch.uint8)
    want[[9, 14]] = 7
    assert got.dtype is torch.uint8 and torch.equal(got, want)


def test_uint8_takes_no_fill_value_that_it_cannot_hold():
    rb = buffer(30, fill_value=-1)
    rb.extend(episodes([10, 5], dtype=torch.uint8))
    refused(ArgumentError, "255", lambda: rb.sample())


def test_a_true_next_value_is_left_alone():
    batch = episodes([4, 4])
    batch[NEXT_OBS] = batch["observation"] + 0.5
    for source in ("storage", "sample"):
        rb = buffer(8, source=source)
        rb.extend(batch)
        assert torch.equal(rb[torch.arange(8)][NEXT_OBS], batch[NEXT_OBS])


def test_several_lanes():
    lanes = [episodes([6, 6]), episodes([4, 8], first=10)]
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(24, ndim=2), sampler=RandomSampler(seed=0), batch_size=24,
        transform=NextStateReconstructor(),
    )  # fmt: skip
    rb.extend(torch.stack(lanes))
    got = rb[torch.arange(24)]
    ends = got["next", "done"].squeeze(-1)
    assert torch.equal(got[NEXT_OBS].isnan().all(-1), ends)
    assert torch.equal(got[NEXT_OBS][~ends], got["observation"][~ends] + 1)


def test_nested_keys_and_missing_ones():
    batch = episodes([5])
    batch["agents", "pos"] = batch["observation"] * 2
    rb = buffer(5, keys=["observation", ("agents", "pos")])
    rb.extend(batch)
    assert torch.equal(rb[torch.arange(4)]["next", "agents", "pos"], batch["agents", "pos"][1:])
    rb = buffer(5, keys=["pixels"])
    rb.extend(batch)
    refused(MissingKeyError, "pixels", lambda: rb.sample())


def test_another_trajectory_key_is_used_in_the_storage_too():
    batch = episodes([12], ends=False)
    batch["mine"] = torch.arange(12) // 4
    rb = ReplayBuffer(storage=LazyTensorStorage(12), transform=NextStateReconstructor(traj_key="mine"), batch_size=4)
    rb.extend(batch)
    assert rb[torch.arange(12)][NEXT_OBS].isnan().all(-1).nonzero().squeeze(-1).tolist() == [3, 7, 11]


test_without_a_buffer_the_storage_cannot_be_asked = refusals(
    (ArgumentError, "source='sample'", lambda: NextStateReconstructor()(episodes([3]))),
    (ArgumentError, "source", lambda: NextStateReconstructor(source="disk")),
    (ArgumentError, "keys", lambda: NextStateReconstructor([])),
)  # fmt: skip


# ---- from the sample ---------------------------------------------------------------------------------------------
def test_in_a_sample_the_row_below_counts_if_it_goes_on():
    batch = episodes([3, 4])
    got = NextStateReconstructor(source="sample")(batch.copy())[NEXT_OBS][:, 0]
    want = torch.tensor([1, 2, torch.nan, 4, 5, 6, torch.nan])
    assert torch.equal(got.nan_to_num(-1), want.nan_to_num(-1))


def test_two_slices_of_one_trajectory_side_by_side_are_not_joined():
    rb = buffer(20, sampler=SliceSampler(slice_len=5, seed=0), batch_size=40, source="sample")
    rb.extend(episodes([20], ends=False))
    sample = rb.sample()
    assert sample[NEXT_OBS].isnan().all(-1).nonzero().squeeze(-1).tolist() == list(range(4, 40, 5))


@pytest.mark.parametrize("marker", ["step_count", "is_init", "done", "ids"])
def test_each_marker_alone_cuts(marker):
    batch = episodes([6], ends=False)
    options = {"traj_key": None, "done_key": None}
    if marker == "step_count":
        batch["step_count"] = torch.tensor([0, 1, 2, 7, 8, 9])[:, None]
        options["step_count_key"] = "step_count"
    elif marker == "is_init":
        batch["is_init"] = (torch.arange(6) == 3)[:, None]
    elif marker == "done":
        batch["next", "done"][2] = True
        del options["done_key"]
    else:
        batch["collector", "traj_ids"][3:] = 5
        del options["traj_key"]
    got = NextStateReconstructor(source="sample", **options)(batch)[NEXT_OBS]
    assert got.isnan().all(-1).nonzero().squeeze(-1).tolist() == [2, 5]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_flags_of_any_dtype_cut(dtype):
    batch = episodes([3, 4])
    batch["is_init"] = (torch.arange(7) == 1)[:, None]
    want = NextStateReconstructor(source="sample")(batch.copy())[NEXT_OBS]
    batch["is_init"], batch["next", "done"] = batch["is_init"].to(dtype), batch["next", "done"].to(dtype)
    got = NextStateReconstructor(source="sample")(batch)[NEXT_OBS]
    assert got.isnan().any() and torch.equal(got.nan_to_num(-1), want.nan_to_num(-1))


def test_batches_with_lanes_end_with_each_lane():
    batch = torch.stack([episodes([6], ends=False), episodes([6], ends=False)])
    got = NextStateReconstructor(source="sample")(batch)[NEXT_OBS]
    assert got.isnan().all(-1).nonzero().tolist() == [[0, 5], [1, 5]]


def test_a_missing_marker_is_an_error_unless_it_may_be():
    batch = episodes([3]).exclude("collector")
    refused(MissingKeyError, "collector.traj_ids", lambda: NextStateReconstructor(source="sample")(batch.copy()))
    NextStateReconstructor(source="sample", strict=False)(batch.copy())
