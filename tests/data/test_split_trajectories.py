"""`split_trajectories`, padded and nested, against trajectories cut by hand."""

from __future__ import annotations

import pytest
import torch
from face import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from rlcli.collectors import Collector
from rlcli.data import split_trajectories
from rlcli.envs import GymEnv, SerialEnv
from rlcli.errors import ArgumentError, MissingKeyError
from rlcli.keys import DONE, TRAJ_IDS

pytestmark = [
    pytest.mark.filterwarnings("ignore:split_trajectories pads"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]
LAYOUTS = [torch.jagged, torch.strided]


def lanes_of(ids: list[list[int]], ends: list[list[bool]] | None = None) -> TensorDict:
    """Rows `[lanes, T]` that tell where they were: value = 100 * lane + t, in several dtypes and shapes."""
    shape = len(ids), len(ids[0])
    value = 100 * torch.arange(shape[0])[:, None] + torch.arange(shape[1])
    done = torch.tensor(ends if ends is not None else [[False] * shape[1]] * shape[0])
    return TensorDict(
        {
            "x": value[..., None, None].expand(*shape, 2, 3).to(torch.float32).clone(),
            "pixels": value.to(torch.uint8)[..., None].clone(),
            "half": value.to(torch.float16),
            "next": {"done": done[..., None], "reward": value[..., None].to(torch.float32)},
            "collector": {"traj_ids": torch.tensor(ids)},
        },
        batch_size=shape,
        names=[None, "time"],
    )


def by_hand(batch: TensorDict) -> list[TensorDict]:
    """One trajectory after the other, row by row."""
    found = []
    for lane in batch:
        rows = [0]
        for t in range(1, len(lane)):
            ids = lane.get(TRAJ_IDS, None)
            new = (ids is not None and ids[t] != ids[t - 1]) or lane[DONE][t - 1].item()
            if new:
                found.append(lane[rows])
                rows = []
            rows.append(t)
        found.append(lane[rows])
    return found


@settings(max_examples=60)
@given(
    st.integers(1, 3).flatmap(
        lambda lanes: st.integers(1, 9).flatmap(
            lambda steps: st.tuples(
                st.lists(st.lists(st.integers(0, 2), min_size=steps, max_size=steps), min_size=lanes, max_size=lanes),
                st.lists(st.lists(st.booleans(), min_size=steps, max_size=steps), min_size=lanes, max_size=lanes),
            )
        )
    )
)
def test_every_layout_holds_what_was_cut_by_hand(drawn):
    batch = lanes_of(*drawn)  # ids are used again, in the same lane and in others
    want = by_hand(batch)
    padded = split_trajectories(batch)
    assert padded["mask"].sum(-1).tolist() == [len(rows) for rows in want]
    for i, rows in enumerate(want):
        assert (padded[i, : len(rows)].exclude("mask") == rows).all()
        assert not padded[i, len(rows) :].exclude("mask").apply(lambda x: x.bool()).any()
    for layout in LAYOUTS:
        nested = split_trajectories(batch, as_nested=layout)
        assert len(nested) == len(want)
        for key in batch.keys(True, True):
            assert nested[key].is_nested and nested[key].layout is layout
            for got, rows in zip(nested[key].unbind(), want, strict=True):
                assert torch.equal(got, rows[key])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_done_flags_of_any_dtype_cut(dtype):
    batch = lanes_of([[0, 0, 0, 1]], [[False, True, False, False]])
    batch[DONE] = batch[DONE].to(dtype)
    assert split_trajectories(batch)["mask"].sum(-1).tolist() == [2, 1, 1]


@pytest.mark.parametrize("layout", [True, *LAYOUTS])
def test_a_nested_batch_padded_is_the_padded_batch(layout):
    batch = lanes_of([[0, 0, 0, 1], [1, 1, 2, 2]], [[False, True, False, False], [False] * 4])
    padded = split_trajectories(batch)
    back = split_trajectories(batch, as_nested=layout).to_padded_tensor(mask_key="mask")
    assert back.batch_size == padded.batch_size and set(back.keys(True, True)) == set(padded.keys(True, True))
    for key in padded.keys(True, True):
        assert torch.equal(back[key], padded[key]) and back[key].dtype == padded[key].dtype


def test_jagged_values_lie_end_to_end_and_share_their_offsets():
    batch = lanes_of([[0, 0, 1, 1, 1]])
    nested = split_trajectories(batch, as_nested=True)
    assert nested["x"].values().data_ptr() == batch["x"].data_ptr()  # no padding, and no copy
    assert nested["x"].offsets().tolist() == [0, 2, 5]
    assert nested["x"].shape[1] == nested["next", "done"].shape[1]  # the same ragged dim: they can be added
    assert nested["next", "reward"].offsets().data_ptr() == nested["x"].offsets().data_ptr()
    assert [len(part) for part in nested["x"].unbind()] == [2, 3]
    assert torch.equal(nested[1]["half"], batch["half"][0, 2:])


def test_lazy_next_observations_are_gathered():
    env = SerialEnv(2, lambda: GymEnv("CartPole-v1"))
    collector = Collector(env, frames_per_batch=100, total_frames=100, next_obs="exact", seed=0)
    batch = next(iter(collector))
    nested = split_trajectories(batch, as_nested=True)["next", "observation"]
    assert torch.equal(nested.values(), batch["next", "observation"].full().reshape(100, 4))


def test_ids_or_done_flags_alone_are_enough():
    batch = lanes_of([[0, 0, 1, 1]], [[False, True, False, False]])
    for part in (batch.exclude(TRAJ_IDS), batch.exclude(DONE)):
        assert split_trajectories(part)["mask"].tolist() == [[True, True], [True, True]]
    renamed = batch.exclude(DONE, TRAJ_IDS)
    refused(MissingKeyError, "trajectory flags", lambda: split_trajectories(renamed))
    renamed["mine"] = torch.tensor([[5, 6, 6, 6]])
    assert split_trajectories(renamed, trajectory_key="mine")["mask"].sum(-1).tolist() == [1, 3]
    renamed["over"] = torch.tensor([[False, False, True, False]])
    assert split_trajectories(renamed, done_key="over")["mask"].sum(-1).tolist() == [3, 1]


def test_one_dim_of_time_is_enough_and_bad_calls_say_so():
    batch = lanes_of([[0, 0, 1]])
    assert split_trajectories(batch[0], as_nested=True)["x"].offsets().tolist() == [0, 2, 3]
    refused(ArgumentError, "as_nested", lambda: split_trajectories(batch, as_nested=torch.sparse_coo))
    for empty in (batch[0, 0], batch[:0]):
        with refused(ArgumentError, "trajectories split"):
            split_trajectories(empty)


def test_only_padding_is_discouraged():
    with pytest.warns(UserWarning, match="prefer the flat layout"):
        split_trajectories(lanes_of([[0, 0]]))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.complex64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,)])
def test_padding_is_zero_in_every_dtype(dtype, shape):
    column = torch.ones(2, 4, *shape).to(dtype)
    ids = torch.tensor([[0, 0, 0, 1], [2, 2, 3, 3]])
    batch = TensorDict({"x": column, "collector": {"traj_ids": ids}}, [2, 4])
    with pytest.warns(UserWarning, match="pads"):
        out = split_trajectories(batch)
    mask = out["mask"]
    assert out["x"].dtype is dtype and out["x"].shape == (4, 3, *shape)
    found = out["x"].to(torch.complex128).reshape(4, 3, -1)
    assert (found[mask] == 1).all() and (found[~mask] == 0).all()


@pytest.mark.parametrize(("key", "value", "options", "said"), [
    ("text", "hello", {"as_nested": True}, "text NonTensorData"),
    ("small", torch.ones(2, 4, dtype=torch.uint16), {"as_nested": torch.strided}, "uint16 small as_nested=True"),
    (("next", "done"), torch.zeros(2, 4, 3, 1).bool(), {}, "next done done_key"),
    (("collector", "traj_ids"), torch.zeros(2, 4, 3), {"as_nested": True}, "traj_ids [3]"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:split_trajectories pads")
def test_what_cannot_be_split_is_named(key, value, options, said):
    batch = TensorDict({"x": torch.ones(2, 4), "collector": {"traj_ids": torch.zeros(2, 4)}}, [2, 4])
    batch[key] = value
    refused(ArgumentError, said, lambda: split_trajectories(batch, **options))
