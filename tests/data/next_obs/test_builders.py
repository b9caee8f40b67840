"""full, exact and a ten-line loop agree about every next observation, wherever episodes and batches end."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from batches import arrays, same, twins
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from rlcli.data import LazyTensorStorage, ReplayBuffer
from rlcli.data.next_obs import (
    Rows,
    build_exact,
    build_full,
    concat,
    full_next_obs,
    move,
    pack,
    unpack,
)

NEXT = ("next", "observation")


def by_hand(now, after, places, last, key):
    lanes, steps = now[key].shape[:2]
    out = np.empty_like(now[key])
    for lane in range(lanes):
        for t in range(steps):
            if (t, lane) in places:
                out[lane, t] = last[key][places.index((t, lane))]
            else:
                out[lane, t] = now[key][lane, t + 1] if t + 1 < steps else after[key][lane]
    return torch.from_numpy(out)


@given(
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(0, 24),
    st.integers(0, 10**6),
    st.sampled_from([np.float32, np.uint8]),
)
def test_builders_agree_with_a_plain_loop(lanes, steps, ends, seed, dtype):
    rng = np.random.default_rng(seed)
    now, after, places, last = arrays(rng, lanes, steps, ends, dtype, shapes=((), (2, 3)))
    shuffled = rng.permutation(len(places)).tolist()
    places = [places[i] for i in shuffled]
    exact, full = build_exact(now, after, places, last), build_full(now, after, places, last)
    for key in now:
        expected = by_hand(now, after, places, last, key)
        same(full[key], expected)
        same(exact[key], expected)
        same(torch.cat([exact[key].obs, exact[key].extra])[exact[key].index.long()], expected)
        inner = sum(t < steps - 1 for t, _ in places)
        assert len(exact[key].extra) == inner + lanes  # one row for every end, one where each lane's batch ends


def test_next_observations_do_not_change_when_the_loop_goes_on():
    now, after, places, last = arrays(np.random.default_rng(0), ends=0)
    exact = build_exact(now, after, places, last)["observation"]
    expected = exact.full()
    after["observation"][:] = -1
    same(exact, expected)


def test_bytes_bit_for_bit_nan_and_signed_zero():
    now, after, places, last = arrays(np.random.default_rng(0))
    now["observation"][0, 1], now["observation"][1, 2], last["observation"][0] = np.nan, -0.0, -np.inf
    exact, full = (build(now, after, places, last)["observation"] for build in (build_exact, build_full))
    same(exact.full().view(torch.int32), full.view(torch.int32))


@pytest.mark.parametrize("seed", range(5))
def test_packed_batches_come_back_equal_and_lazy(seed):
    exact, full = twins(seed)
    packed = pack(exact)
    assert not any(isinstance(x, Rows) for x in packed.batch.values(True, True))
    back = unpack(packed)
    same(back, full)
    assert isinstance(back.get(NEXT), Rows) and back.get(NEXT).obs.data_ptr() == back.get("observation").data_ptr()
    assert back.names == exact.names


@pytest.mark.parametrize(
    "change",
    [
        lambda td: td.reshape(-1)[torch.arange(td.numel()).flip(0)],
        lambda td: td.transpose(0, 1),
        lambda td: td[:, 1:3],
        lambda td: td.clone().set("observation", td.get("observation") + 1),
        lambda td: td.copy().set("observation", td.get("observation") + 1),
        lambda td: td.exclude("observation"),
        lambda td: td[1:],
        lambda td: td.select(NEXT),
    ],
)
def test_a_batch_whose_rows_moved_packs_as_plain_values(change):
    exact, full = (change(td) for td in twins())
    same(unpack(pack(exact)), full)


def test_batches_concatenate_in_time_and_hold_each_observation_once():
    exact, full = zip(*(twins(seed, steps=steps) for seed, steps in ((0, 5), (1, 1), (2, 4))), strict=True)
    joined, expected = concat(exact), torch.cat(full, 1)
    same(joined, expected)
    assert isinstance(joined.get(NEXT), Rows) and joined.names == exact[0].names
    same(concat([exact[0], full[1]]), torch.cat(full[:2], 1))
    same(full_next_obs(joined), expected)


def test_single_env_batches_concatenate():
    exact, full = zip(*(twins(seed, batched=False, steps=4, ends=2) for seed in range(3)), strict=True)
    same(concat(exact), torch.cat(full, 0))


def test_moving_a_batch_moves_each_observation_once():
    exact, full = twins(lanes=4, steps=50)
    moved = move(exact, "meta")
    rows = moved.get(NEXT)
    assert isinstance(rows, Rows) and rows.device.type == "meta" and rows.extra.device.type == "meta"
    same(move(exact, "cpu"), full)
    assert not isinstance(move(full, "cpu").get(NEXT), Rows)


@pytest.mark.parametrize("bad", [9, -1])
@pytest.mark.parametrize("pixels", [False, True])
def test_an_index_that_leads_outside_is_refused_and_nothing_is_stored(bad, pixels):
    rb = ReplayBuffer(storage=LazyTensorStorage(50))
    obs, extra, index = torch.arange(8.0)[:, None], torch.full((1, 1), 99.0), torch.arange(1, 9, dtype=torch.int32)
    good, wrong = Rows(obs, extra, index), Rows(obs, extra, index.clone().index_fill_(0, torch.tensor(7), bad))
    done = torch.zeros(8, 1, dtype=torch.bool)
    for rows in (wrong, good, wrong):
        stored = len(rb)
        batch = TensorDict({"observation": obs, "next": {"observation": rows, "done": done}}, [8])
        if pixels:
            batch["pixels"], batch["next", "pixels"] = obs, rows
        if rows is good:
            rb.extend(batch)
            assert rb[7]["next", "observation"] == 99
            continue
        with pytest.raises(IndexError):
            rb.extend(batch)
        assert len(rb) == stored


def test_a_plain_batch_passes_through_packing():
    td = TensorDict({"observation": torch.zeros(3, 2)}, [3])
    assert unpack(pack(td)) is td
