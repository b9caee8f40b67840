"""Slices of a buffer whose rows keep few recurrent states: unrolled from the last one kept, they are the dense ones."""

import math
from functools import cache

import numpy as np
import pytest
import torch
from face import Recurrence, refused

from rlcli.collectors import Collector
from rlcli.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from rlcli.data.next_obs.sparse import Sparse, SparseColumns
from rlcli.envs import GymEnv, SerialEnv
from rlcli.errors import ArgumentError
from rlcli.modules import build_actor_critic, set_recurrent_mode
from rlcli.objectives.sequences import warmed_up
from rlcli.report.ledger import stored_entries
from rlcli.typed import Misfit

BURN_IN, STRIDE, LENGTH = ("collector", "burn_in"), 5, 6
CELLS = {"gru": ["recurrent_state"], "lstm": ["recurrent_state_h", "recurrent_state_c"]}
SAMPLERS = {
    "slices": lambda: SliceSampler(slice_len=LENGTH, strict_length=False, seed=0),
    "strict": lambda: SliceSampler(slice_len=LENGTH, seed=0),
    "without replacement": lambda: SliceSamplerWithoutReplacement(slice_len=LENGTH, strict_length=False, seed=0),
    "by priority": lambda: PrioritizedSliceSampler(1000, 0.6, 0.4, slice_len=LENGTH, strict_length=False, seed=0),
}


def cartpole():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


@cache
def collected(kind, lanes, steps, batches):
    """The policy, and batches that keep its state in every row and in few, each next to the other."""
    env = cartpole()
    policy = build_actor_critic(
        env.observation_spec, env.action_spec, hidden=[8], recurrence=Recurrence(kind, 7, 2, {}), generator=0
    ).actor
    found = []
    for stride in (1, STRIDE):
        env = SerialEnv(lanes, cartpole) if lanes > 1 else cartpole()
        with Collector(
            env, policy, frames_per_batch=lanes * steps, seed=0, next_obs="exact", recurrent_state_stride=stride
        ) as collector:
            found.append([collector.rollout() for _ in range(batches)])
    return policy, list(zip(*found, strict=True))


def dense_states(pairs, kind):
    """By observation: no two rows have the same."""
    rows = [full.reshape(-1).select("observation", *CELLS[kind]) for full, _ in pairs]
    return {tuple(row["observation"].tolist()): [row[key] for key in CELLS[kind]] for part in rows for row in part}


def check(buffer, policy, dense, kind, samples=8):
    """Every slice of these samples begins with the state that the dense batches have there."""
    unrolled = 0
    for _ in range(samples):
        sample = buffer.sample()
        burn = sample[BURN_IN]
        assert not burn.all() and int(burn.sum()) <= (STRIDE - 1) * int(sample["is_init"].sum())
        rest = warmed_up(sample, burn, policy)
        unrolled += int(burn.sum())
        for i in rest["is_init"].reshape(-1).nonzero().squeeze(1).tolist():
            for key, state in zip(CELLS[kind], dense[tuple(rest["observation"][i].tolist())], strict=True):
                torch.testing.assert_close(rest[key][i], state, atol=1e-6, rtol=0)
    return unrolled


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(("lanes", "ndim"), [(1, 1), (3, 1), (3, 2)])
@pytest.mark.parametrize("size", [600, 90])  # all of them fit, and most are written over
@pytest.mark.every(3)
def test_a_slice_begins_with_the_state_that_was_there(size, lanes, ndim, sampler, kind):
    policy, pairs = collected(kind, lanes, 23, 6)
    prioritized = sampler == "by priority"
    made = TensorDictReplayBuffer if prioritized else ReplayBuffer
    buffer = made(storage=LazyTensorStorage(size, ndim=ndim), sampler=SAMPLERS[sampler](), batch_size=10 * LENGTH)
    dense, unrolled = dense_states(pairs, kind), 0
    for _, few in pairs:
        buffer.extend(few)
        unrolled += check(buffer, policy, dense, kind, samples=2)
    assert unrolled


def test_slices_of_a_cloned_batch_are_refused_where_they_begin_without_a_state():
    policy, ((_, few), *_) = collected("gru", 3, 23, 6)
    buffer = ReplayBuffer(storage=LazyTensorStorage(600), sampler=SAMPLERS["slices"](), batch_size=10 * LENGTH)
    buffer.extend(few.clone())
    with set_recurrent_mode(True), refused(ArgumentError, "stored clone"):
        policy(buffer.sample())
    refused(ArgumentError, "NaN", lambda: buffer.extend(few))


@pytest.mark.parametrize("storage", ["tensor", "memmap"])
def test_the_same_after_a_dump_and_in_a_buffer_that_is_written_on(storage, tmp_path):
    policy, pairs = collected("gru", 3, 23, 6)
    dense = dense_states(pairs, "gru")

    def make(name):
        rows = (
            LazyTensorStorage(150, ndim=2)
            if storage == "tensor"
            else LazyMemmapStorage(150, ndim=2, scratch_dir=tmp_path / name)
        )
        return ReplayBuffer(storage=rows, sampler=SAMPLERS["slices"](), batch_size=10 * LENGTH)

    buffer = make("a")
    for i, (_, few) in enumerate(pairs):
        buffer.extend(few)
        again = make(f"b{i}")
        if i % 2:
            buffer.dumps(tmp_path / f"dump{i}")
            again.loads(tmp_path / f"dump{i}")
        else:
            again.load_state_dict(buffer.state_dict())
        buffer.close()
        buffer = again
        assert check(buffer, policy, dense, "gru", samples=4)
    buffer.close()


def test_rows_before_the_first_state_that_is_left_are_never_a_start():
    _, pairs = collected("gru", 1, 23, 6)
    buffer = ReplayBuffer(storage=LazyTensorStorage(31), sampler=SAMPLERS["slices"](), batch_size=200 * LENGTH)
    for _, few in pairs:
        buffer.extend(few)
    states = buffer[:]["recurrent_state"].full().flatten(1).isnan().any(1)
    live = torch.from_numpy(buffer.ring.space.live_rows(buffer.ring.cursor))
    lost = set(live[: int((~states[live]).nonzero()[0])].tolist())
    found = {int(i) for _ in range(20) for i in buffer.sample(return_info=True)[1]["index"]}
    assert lost and not lost & found and found


@pytest.mark.parametrize("size", [90, 400])
@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_has_every_row_of_a_known_state_once(drop_last, size):
    _, pairs = collected("gru", 3, 23, 6)
    sampler = SliceSamplerWithoutReplacement(slice_len=LENGTH, strict_length=False, seed=0, drop_last=drop_last)
    buffer = ReplayBuffer(storage=LazyTensorStorage(size), sampler=sampler, batch_size=10 * LENGTH)
    for _, few in pairs:
        buffer.extend(few)
    live = buffer.ring.space.live_rows(buffer.ring.cursor)
    known = live[buffer.ring.contents.steps_from_state(live) >= 0].tolist()
    assert len(known) < len(live)
    for _ in range(4):
        drawn, over = [], False
        while not over:
            sample, info = buffer.sample(return_info=True)
            drawn += torch.as_tensor(info["index"])[~sample[BURN_IN]].tolist()
            over = buffer.sampler.ran_out
        assert len(set(drawn)) == len(drawn) and set(drawn) <= set(known)
        assert drop_last or len(drawn) == len(known)


def test_a_row_written_over_is_not_gone_on_from():
    policy, pairs = collected("gru", 1, 23, 3)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), sampler=SAMPLERS["slices"](), batch_size=20 * LENGTH)
    for _, few in pairs:
        buffer.extend(few)
    dense = dense_states(pairs, "gru")
    at = int((~buffer[:]["recurrent_state"].full().flatten(1).isnan().any(1)).nonzero()[3])
    buffer[[at]] = buffer[:][[at + 1]]  # keeps no state
    check(buffer, policy, dense, "gru")


def test_rows_of_another_trajectory_that_lie_between_are_not_counted():
    policy, pairs = collected("gru", 3, 23, 6)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), sampler=SAMPLERS["slices"](), batch_size=20 * LENGTH)
    few = pairs[0][1]
    for piece in (few[0, :7], few[1, 2:5], few[0, 7:20]):  # one trajectory, and rows between that keep no state
        buffer.extend(piece)
    assert check(buffer, policy, dense_states(pairs, "gru"), "gru")


@pytest.mark.parametrize("lanes", [1, 3, 64])
def test_the_last_row_of_its_lane_that_keeps_a_state_is_found(lanes):
    random = np.random.default_rng(lanes)
    kept = np.flatnonzero(random.random(lanes * 50) < 0.2)
    columns = SparseColumns()
    columns.put({"h": Sparse(torch.from_numpy(kept), torch.ones(len(kept), 1), math.nan)}, np.arange(lanes * 50), 0)
    numbers, base = np.arange(lanes * 10, lanes * 50), lanes * 10
    found = columns.held_before("h", numbers, lanes, base)
    for number, steps in zip(numbers.tolist(), found.tolist(), strict=True):
        mine = [other for other in kept.tolist() if base <= other <= number and other % lanes == number % lanes]
        assert steps == ((number - mine[-1]) // lanes if mine else -1)


def other_states(few, state):
    return few.exclude("recurrent_state").set("recurrent_state", state)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda few: other_states(few, torch.zeros(*few.shape, 2, 9)), "float32[2"),
        (lambda few: other_states(few, few["recurrent_state"].full().double()), "float64"),
        (lambda few: few.exclude("recurrent_state"), "recurrent_state"),
    ],
    ids=["shape", "dtype", "none"],
)
def test_states_that_do_not_fit_are_refused_before_a_row_is_written(changed, said):
    _, pairs = collected("gru", 3, 23, 6)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), sampler=SAMPLERS["slices"](), batch_size=20 * LENGTH)
    few = pairs[0][1]
    buffer.extend(few)
    before = buffer[:]["recurrent_state"].full()
    refused(ArgumentError, said, lambda: buffer.extend(changed(few)))
    with refused(ArgumentError, said):
        buffer[[0, 1]] = changed(few)[0, :2]
    assert len(buffer) == few.numel()
    torch.testing.assert_close(buffer[:]["recurrent_state"].full(), before, rtol=0, atol=0, equal_nan=True)


def test_rows_that_all_keep_a_state_follow_those_of_which_few_do_and_not_the_other_way_round():
    _, pairs = collected("gru", 3, 23, 6)
    full, few = pairs[0][0].exclude(("next", "recurrent_state")), pairs[0][1]
    buffer = ReplayBuffer(storage=LazyTensorStorage(200), sampler=SAMPLERS["slices"](), batch_size=20 * LENGTH)
    for _ in range(2):
        buffer.extend(few)
        buffer.extend(full)
        assert torch.equal(buffer[69:138]["recurrent_state"].full(), full["recurrent_state"].flatten(0, 1))
        buffer.empty()
    buffer.extend(full)
    assert not buffer[:]["recurrent_state"].full().isnan().any()
    buffer.empty(fields=True)
    buffer.extend(full)
    refused(ArgumentError, "recurrent_state", lambda: buffer.extend(few))
    assert len(buffer) == full.numel()


@pytest.mark.parametrize(
    "column",
    [
        lambda key, at, rows: [key, at, 5],
        lambda key, at, rows: [key, at, rows.tolist()],
        lambda key, at, rows: [key, at, rows[0, 0, 0]],
        lambda key, at, rows: [key, at.flip(0), rows],
        lambda key, at, rows: [["observation"], at, rows],
    ],
    ids=["a number", "no tensor", "no rows", "descending", "of another column"],
)
def test_a_saved_state_that_nobody_wrote_is_refused(column):
    _, pairs = collected("gru", 3, 23, 6)
    buffers = [ReplayBuffer(storage=LazyTensorStorage(100), batch_size=8) for _ in range(2)]
    buffers[0].extend(pairs[0][1])
    state = buffers[0].ring.state_dict()
    with pytest.raises(Misfit):
        buffers[1].ring.take_over(buffers[1].ring.read_state({**state, "sparse": [column(*state["sparse"][0])]}))
    buffers[1].ring.take_over(buffers[1].ring.read_state(state))


def test_the_ledger_says_what_few_rows_save():
    _, pairs = collected("gru", 3, 23, 6)
    buffers = [ReplayBuffer(storage=LazyTensorStorage(500), batch_size=8) for _ in range(2)]
    for pair in pairs:
        for buffer, batch in zip(buffers, pair, strict=True):
            buffer.extend(batch)
    whole, few = ({entry.key: entry for entry in stored_entries(buffer)}["recurrent_state"] for buffer in buffers)
    assert (whole.saved, few.note) == (0, "few rows") and few.bytes + few.saved == 2 * 7 * 4 * len(buffers[1])
    assert few.bytes < whole.bytes / 2
    assert sum(entry.bytes for entry in stored_entries(buffers[1])) == buffers[1].ring.nbytes


def test_a_state_of_zeros_takes_no_memory_and_a_write_does_not_copy_what_is_there():
    columns, rows = SparseColumns(), torch.cat([torch.zeros(1, 9), torch.ones(3, 9)])
    for first in range(0, 4000, 40):
        columns.put({"h": Sparse(torch.arange(0, 40, 10), rows, math.nan)}, np.arange(first, first + 40), first - 400)
        memory = columns.of_keys()["h"]
    assert memory[1] <= (33 * 9 * 4 + 44 * 16) * 2  # of 44 live ones, 33 have a row
    held = columns.read("h", np.arange(3600, 4000), torch.device("cpu")).full()
    assert torch.equal(held[::10], rows.repeat(10, 1)) and int(held.isnan().all(1).sum()) == 360
