"""n-step transitions against an oracle that walks one row at a time and knows nothing of tensors or rings."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from face import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from rlcli.collectors import Collector
from rlcli.data import LazyTensorStorage, RandomSampler, SliceSampler, TensorDictReplayBuffer, full_next_obs
from rlcli.envs import GymEnv, SerialEnv
from rlcli.envs.transforms import Compose, MultiStepTransform, NextObservationDelta, NextStateReconstructor
from rlcli.errors import ArgumentError, MissingKeyError
from rlcli.keys import DONE, REWARD, TERMINATED, TRAJ_IDS, TRUNCATED
from rlcli.transforms.multi_step import ORIGINAL_REWARD

NEXT_OBS, STEPS = ("next", "observation"), "steps_to_next_obs"
GAMMA = 0.9


def steps_of(length: int, seed: int) -> dict[int, dict]:
    """One lane of random episodes, row by row: unique observations, ends of both kinds."""
    random = np.random.default_rng(seed)
    rows, episode, number = {}, 0, 0.0
    for t in range(length):
        end = random.random() < 0.25
        terminated = end and random.random() < 0.5
        rows[t] = {
            "obs": number, "after": number + 1, "reward": random.normal(), "episode": episode, "done": end,
            "terminated": terminated, "truncated": end and not terminated,
        }  # fmt: skip
        number += 1 + end  # the reset observation is another number than the final one
        episode += end
    return rows


def batch_of(rows: dict[int, dict], ids: bool = True, lane: int = 0) -> TensorDict:
    column = {name: [row[name] for row in rows.values()] for name in next(iter(rows.values()))}
    offset = 1000.0 * lane
    obs = torch.tensor(column["obs"])[:, None].expand(-1, 2) + offset
    after = torch.tensor(column["after"])[:, None].expand(-1, 2) + offset
    flags = {name: torch.tensor(column[name])[:, None] for name in ("done", "terminated", "truncated")}
    batch = TensorDict(
        {
            "observation": obs.clone(),
            "next": {"observation": after.clone(), "reward": torch.tensor(column["reward"])[:, None], **flags},
        },
        batch_size=[len(rows)],
    )
    if ids:
        batch[TRAJ_IDS] = torch.tensor(column["episode"]) + 1000 * lane
    return batch


def oracle(rows: dict[int, dict], first: int, n: int, live: set[int]) -> dict:
    """From row `first`: walk while the episode goes on and the next row is there."""
    total, t, taken = 0.0, first, 0
    while True:
        total += GAMMA**taken * rows[t]["reward"]
        taken += 1
        if taken == n or rows[t]["done"] or t + 1 not in live:
            break
        t += 1
    return rows[t] | {"total": total, "taken": taken}


def agree(got: TensorDict, i: int, want: dict, offset: float = 0.0) -> None:
    assert got[STEPS][i].item() == want["taken"]
    assert got[REWARD][i].item() == pytest.approx(want["total"], rel=1e-6, abs=1e-6)
    assert torch.equal(got[NEXT_OBS][i], torch.full((2,), want["after"] + offset))
    for name in ("done", "terminated", "truncated"):
        assert got["next", name][i].item() == want[name]


# ---- in a buffer -------------------------------------------------------------------------------------------------
@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000), n=st.integers(1, 6), size=st.integers(5, 40), ids=st.booleans(),
    mode=st.sampled_from(["full", "exact"]), parts=st.lists(st.integers(1, 9), min_size=1, max_size=8),
)  # fmt: skip
def test_every_stored_row_gets_what_the_oracle_says(seed, n, size, ids, mode, parts):
    parts = [min(part, size) for part in parts]
    rows = steps_of(sum(parts), seed)
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(size), sampler=RandomSampler(seed=seed), batch_size=32,
        transform=MultiStepTransform(n, GAMMA), next_obs=mode,
    )  # fmt: skip
    written = 0
    for part in parts:
        rb.extend(batch_of({t: rows[t] for t in range(written, written + part)}, ids))
        written += part
        live = set(range(max(0, written - size), written))
        sample = rb.sample()
        for i, obs in enumerate(sample["observation"][:, 0].tolist()):
            first = next(t for t in live if rows[t]["obs"] == obs)
            agree(sample, i, oracle(rows, first, n, live))
            assert sample[ORIGINAL_REWARD][i].item() == pytest.approx(rows[first]["reward"], rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_flags_of_any_dtype_give_the_same_steps(dtype):
    def sampled(kind, *, buffer):
        batch = batch_of(steps_of(30, 3), ids=False)
        batch["is_init"] = (torch.arange(30) == 7)[:, None].to(kind)
        for name in ("done", "terminated", "truncated"):
            batch["next", name] = batch["next", name].to(kind)
        if not buffer:
            return MultiStepTransform(3, GAMMA)(batch)
        rb = TensorDictReplayBuffer(
            storage=LazyTensorStorage(30), sampler=SliceSampler(num_slices=9, slice_len=3, strict_length=False, seed=0),
            transform=MultiStepTransform(3, GAMMA),
        )  # fmt: skip
        rb.extend(batch)
        return rb.sample(27)

    for buffer in (True, False):
        got, want = sampled(dtype, buffer=buffer), sampled(torch.bool, buffer=buffer)
        assert got["next", "done"].dtype is dtype
        assert set(got.keys(True, True)) == set(want.keys(True, True))
        assert all(torch.equal(got[key].float(), want[key].float()) for key in want.keys(True, True))


def test_rows_that_pad_a_slice_end_nothing_and_are_followed_by_nothing():
    """Padded slices, transformed in the buffer or as a batch by itself: real rows as without padding."""
    batch = batch_of(steps_of(40, 5))
    batch["action"] = torch.arange(40.0)[:, None]

    def sampled(transform, **options):
        rb = TensorDictReplayBuffer(
            storage=LazyTensorStorage(40), transform=transform, batch_size=40,
            sampler=SliceSampler(num_slices=8, slice_len=5, strict_length=False, seed=2, **options),
        )  # fmt: skip
        rb.extend(batch)
        return rb.sample()

    for make in (lambda: MultiStepTransform(3, GAMMA), lambda: NextStateReconstructor(["action"], source="sample")):
        plain, padded = sampled(make()), sampled(make(), pad_output=True)
        mask = padded["collector", "mask"]
        assert not mask.all()
        for name in ("done", "terminated", "truncated"):
            assert not padded["next", name][~mask].any()
        inside, outside = padded[mask], make()(sampled(None, pad_output=True))[mask]
        for got, want in ((inside, plain), (outside, make()(sampled(None)))):
            for key in want.keys(True, True):
                assert torch.equal(got[key].nan_to_num(-7.0), want[key].nan_to_num(-7.0)), key


@pytest.mark.parametrize("mode", ["full", "exact"])
def test_lanes_are_walked_each_for_itself(mode):
    lanes = [steps_of(12, 1), steps_of(12, 2)]
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(24, ndim=2), sampler=RandomSampler(seed=0), batch_size=50,
        transform=MultiStepTransform(3, GAMMA), next_obs=mode,
    )  # fmt: skip
    rb.extend(torch.stack([batch_of(rows, lane=lane) for lane, rows in enumerate(lanes)]))
    sample = rb.sample()
    for i, obs in enumerate(sample["observation"][:, 0].tolist()):
        lane = int(obs >= 1000)
        first = next(t for t, row in lanes[lane].items() if row["obs"] == obs - 1000 * lane)
        agree(sample, i, oracle(lanes[lane], first, 3, set(range(12))), 1000.0 * lane)


def test_all_modes_of_one_collection_agree_and_compact_is_refused():
    def collected(mode):
        env = SerialEnv(2, lambda: GymEnv("CartPole-v1"))
        return next(iter(Collector(env, frames_per_batch=120, total_frames=120, next_obs=mode, seed=0)))

    def sampled(mode, *before):
        rb = TensorDictReplayBuffer(
            storage=LazyTensorStorage(120), sampler=RandomSampler(seed=3), batch_size=64,
            transform=Compose(*before, MultiStepTransform(3, GAMMA)),
        )  # fmt: skip
        rb.extend(collected(mode))
        return rb.sample()

    full, exact = sampled("full"), sampled("exact")
    keys = set(full.keys(True, True))
    assert keys == set(exact.keys(True, True)) and all(torch.equal(full[key], exact[key]) for key in keys)
    for delta in (sampled("delta", NextObservationDelta()), sampled("delta")):
        assert keys == set(delta.keys(True, True))
        assert torch.equal(delta[REWARD], full[REWARD]) and torch.equal(delta[STEPS], full[STEPS])
        assert torch.allclose(delta[NEXT_OBS], full[NEXT_OBS], atol=1e-3)
    for before in ((), (NextStateReconstructor(),)):
        with refused(ArgumentError, "memory.next_obs=exact"):
            sampled("compact", *before)


def test_slices_keep_the_flags_that_their_sampler_added():
    rows = steps_of(40, 5)
    for row in rows.values():  # one long episode
        row.update(done=False, terminated=False, truncated=False, episode=0)
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(40), sampler=SliceSampler(slice_len=5, seed=0), batch_size=20,
        transform=MultiStepTransform(3, GAMMA),
    )  # fmt: skip
    rb.extend(batch_of(rows))
    sample = rb.sample()
    at_ends = torch.arange(20) % 5 == 4
    assert torch.equal(sample[TRUNCATED].squeeze(-1), at_ends) and torch.equal(sample[DONE].squeeze(-1), at_ends)
    assert not sample[TERMINATED].any()


def test_a_lane_that_goes_on_elsewhere_in_a_flat_ring_is_followed():
    one, other = steps_of(8, 0), steps_of(8, 0)
    for rows, name in ((one, 1), (other, 2)):
        for row in rows.values():
            row.update(done=False, terminated=False, truncated=False, episode=name)
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(16),
        sampler=RandomSampler(seed=0),
        batch_size=8,
        transform=MultiStepTransform(3, GAMMA),
    )
    for half in (range(4), range(4, 8)):
        for lane, rows in enumerate((one, other)):
            rb.extend(batch_of({t: rows[t] for t in half}, lane=lane))
    got = rb[torch.arange(16)]
    for i, obs in enumerate(got["observation"][:, 0].tolist()):
        lane = int(obs >= 1000)
        rows = (one, other)[lane]
        first = next(t for t, row in rows.items() if row["obs"] == obs - 1000 * lane)
        agree(got, i, oracle(rows, first, 3, set(range(8))), 1000.0 * lane)


# ---- without a buffer --------------------------------------------------------------------------------------------
@given(seed=st.integers(0, 10_000), n=st.integers(1, 8), length=st.integers(1, 30), ids=st.booleans())
def test_a_batch_in_time_order_gets_what_the_oracle_says(seed, n, length, ids):
    lanes = [steps_of(length, seed), steps_of(length, seed + 1)]
    batch = torch.stack([batch_of(rows, ids, lane) for lane, rows in enumerate(lanes)])
    got = MultiStepTransform(n, GAMMA)(batch)
    for lane, rows in enumerate(lanes):
        for t in range(length):
            agree(got[lane], t, oracle(rows, t, n, set(range(length))), 1000.0 * lane)


def test_lazy_and_coded_batches_too():
    env = SerialEnv(2, lambda: GymEnv("CartPole-v1"))
    exact = next(iter(Collector(env, frames_per_batch=80, total_frames=80, next_obs="exact", seed=0)))
    full, delta = full_next_obs(exact), NextObservationDelta().compress(exact)
    want = MultiStepTransform(4, GAMMA)(full.clone())
    got = MultiStepTransform(4, GAMMA)(exact.copy())
    assert all(torch.equal(want[key], got[key]) for key in want.keys(True, True))
    got = MultiStepTransform(4, GAMMA)(delta)
    assert set(got.keys(True, True)) == set(want.keys(True, True))
    assert torch.allclose(got[NEXT_OBS], want[NEXT_OBS], atol=1e-3)
    refused(ArgumentError, "memory.next_obs=exact", lambda: MultiStepTransform(4, GAMMA)(full.exclude(NEXT_OBS)))


@pytest.mark.parametrize("marker", ["done", "ids", "is_init"])
def test_each_marker_alone_is_never_crossed(marker):
    rows = steps_of(60, 11)
    batch = batch_of(rows)
    batch[TRAJ_IDS] = batch[TRAJ_IDS] % 2  # used again
    batch["is_init"] = torch.tensor([t == 0 or rows[t - 1]["done"] for t in rows])[:, None]
    dropped = {"done": [TRAJ_IDS, "is_init"], "ids": [DONE, "is_init"], "is_init": [DONE]}[marker]
    if marker == "is_init":
        batch[TRAJ_IDS] = torch.zeros(60, dtype=torch.int64)
    got = MultiStepTransform(4, GAMMA)(batch.exclude(*dropped))
    assert got[STEPS].squeeze(-1).tolist() == [oracle(rows, t, 4, set(rows))["taken"] for t in rows]


def test_what_else_lies_under_next_does_not_stand_for_observations():
    batch = batch_of(steps_of(9, 0)).exclude(NEXT_OBS)
    batch["next", "score"] = torch.zeros(9, 1)
    refused(ArgumentError, "keep none", lambda: MultiStepTransform(3, GAMMA)(batch))
    batch["score"] = torch.zeros(9, 1)  # now it is one that every step observes
    assert MultiStepTransform(3, GAMMA)(batch)[STEPS].max() == 3


def test_bad_arguments_and_batches():
    for n in (0, 1.5, True):
        with refused(ArgumentError, "n_steps"):
            MultiStepTransform(n, GAMMA)
    refused(ArgumentError, "gamma number", lambda: MultiStepTransform(3, 1.1))
    batch = batch_of(steps_of(5, 0))
    refused(MissingKeyError, "next.reward", lambda: MultiStepTransform(3, GAMMA)(batch.exclude(REWARD)))
    refused(MissingKeyError, "trajectories end", lambda: MultiStepTransform(3, GAMMA)(batch.exclude(DONE, TRAJ_IDS)))


@pytest.mark.parametrize("mode", ["exact", "full"])
def test_the_next_observation_of_the_first_step_is_not_gathered(mode, monkeypatch):
    """It would be thrown away: the one n steps ahead is read once, and nothing else changes."""
    env = SerialEnv(3, lambda: GymEnv("CartPole-v1"))
    batch = next(iter(Collector(env, frames_per_batch=90, total_frames=90, next_obs=mode, seed=0)))
    samples, read = [], []
    for collate in (None, lambda rows: rows):  # with a function of the user's all keys are read
        rb = TensorDictReplayBuffer(
            storage=LazyTensorStorage(90), sampler=RandomSampler(seed=0), batch_size=40, collate_fn=collate,
            transform=MultiStepTransform(3, GAMMA),
        )  # fmt: skip
        rb.extend(batch)
        columns = rb.ring.columns
        monkeypatch.setattr(rb.ring, "columns", lambda rows, keys=None, f=columns: read.append(keys) or f(rows, keys))
        samples.append(rb.sample())
    assert NEXT_OBS not in read[0] and set(read[0]) >= {"observation", REWARD, DONE, TERMINATED, TRUNCATED}
    assert sum(keys is None or NEXT_OBS in keys for keys in read) == 3  # once; and twice where all keys were read
    assert set(samples[0].keys(True, True)) == set(samples[1].keys(True, True)) and (samples[0] == samples[1]).all()


@pytest.mark.parametrize("nested", [True, False])
def test_an_observation_called_delta_is_no_difference(nested):
    rows = steps_of(30, 0)
    batch = batch_of(rows)
    for td in (batch, batch["next"]):
        td["p"] = td["observation"] * 2
        td["delta"] = TensorDict({"p": td["p"] * 3}, [30]) if nested else td["p"] * 3
    found = MultiStepTransform(2, GAMMA)(batch.clone())["next"]
    plain = MultiStepTransform(2, GAMMA)(batch.exclude("delta", "p", ("next", "delta"), ("next", "p")))["next"]
    assert torch.equal(found["p"], plain["observation"] * 2)
    assert torch.equal(found["delta", "p"] if nested else found["delta"], plain["observation"] * 6)
    refused(ArgumentError, "next.delta", lambda: NextObservationDelta().compress(batch))
    assert torch.equal(NextObservationDelta()(batch.clone())["next", "p"], batch["next", "p"])


def test_cuts_under_keys_of_ones_own_stay():
    rows = steps_of(40, 5)
    for row in rows.values():  # one long episode
        row.update(done=False, terminated=False, truncated=False, episode=0)
    batch = batch_of(rows)
    for name in ("done", "terminated", "truncated"):
        batch["next", "agents", name] = batch["next", name].clone()
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(40), batch_size=20, transform=MultiStepTransform(3, GAMMA),
        sampler=SliceSampler(slice_len=5, seed=0, truncated_key=("next", "agents", "truncated")),
    )  # fmt: skip
    rb.extend(batch)
    sample = rb.sample()
    for name in ("done", "truncated"):
        assert sample["next", "agents", name].flatten().nonzero().flatten().tolist() == [4, 9, 14, 19]
