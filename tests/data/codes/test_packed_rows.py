"""Packed keys are read as they were written, bit for bit, whatever is written, wherever the ring goes round."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from face import Ring, refused
from tensordict import TensorDict

from rlcli.data import CompressedStorage, LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer
from rlcli.data.codes import INDEX, RECORD
from rlcli.data.files import dumps
from rlcli.errors import ArgumentError, DamagedDataError
from rlcli.kernels import codes as layout

FLAGS = ("done", "terminated", ("next", "done"), ("next", "terminated"), ("next", "truncated"), "is_init")
ODD = [torch.int16, torch.int32, torch.int64, torch.uint8, torch.float32, torch.float64, torch.float16, torch.bfloat16]
COUNT = 100
KINDS = {
    "memory": lambda folder, ndim, size: LazyTensorStorage(size, ndim=ndim),
    "compressed": lambda folder, ndim, size: CompressedStorage(size, ndim=ndim),
    "temporary": lambda folder, ndim, size: LazyMemmapStorage(size, ndim=ndim),
    "disk": lambda folder, ndim, size: LazyMemmapStorage(size, ndim=ndim, scratch_dir=folder / "rows"),
}


class Play:
    """Batches `[envs, T]`; `wild` ones hold anything in `loose`, which has no code."""

    def __init__(self, rng, envs):
        self.rng, self.envs = rng, envs
        self.dtype = ODD[rng.integers(len(ODD))]
        self.n = int(rng.choice([2, 3, 9, 254, 255, 300]))
        self.ids, self.next_id = np.arange(envs), envs
        self.id_dtype = [torch.int64, torch.int32][rng.integers(2)]

    @property
    def codes(self):
        return {"action": self.n, "count": COUNT}

    def batch(self, steps, wild):
        rng, shape = self.rng, (self.envs, steps)
        one_hot = torch.nn.functional.one_hot(torch.from_numpy(rng.integers(0, self.n, shape)), self.n)
        action, mask = one_hot.to(self.dtype), one_hot.bool()
        count, loose = (torch.from_numpy(rng.integers(0, COUNT, (*shape, 2))) for _ in range(2))
        if wild and rng.random() < 0.7:
            reach = [2**7, 2**15, 2**31, 2**62][rng.integers(4)]
            loose[rng.integers(self.envs), rng.integers(steps)] = int(
                rng.choice([-reach, reach, -reach - 1, reach - 1])
            )
        done = rng.random((*shape, 1)) < 0.2
        ids = np.empty(shape, np.int64)
        for t in range(steps):
            ids[:, t] = self.ids
            for env in np.flatnonzero(done[:, t, 0]):
                self.ids[env], self.next_id = self.next_id, self.next_id + 1
        flat = {key: torch.from_numpy(rng.random((*shape, 1)) < 0.3) for key in FLAGS}
        flat[("next", "done")] = torch.from_numpy(done)
        flat |= {
            "observation": torch.from_numpy(rng.standard_normal((*shape, 2)).astype(np.float32)),
            ("next", "observation"): torch.from_numpy(rng.standard_normal((*shape, 2)).astype(np.float32)),
            "action": action,
            "mask": mask,
            "count": count,
            "loose": loose,
            ("collector", "traj_ids"): torch.from_numpy(ids).to(self.id_dtype),
        }
        return TensorDict(flat, shape)


def _bits(column):
    return column.dtype, tuple(column.shape), column.contiguous().numpy(force=True).tobytes() if (
        column.dtype is not torch.bfloat16) else column.contiguous().view(torch.int16).numpy().tobytes()  # fmt: skip


def _live(ring):
    return np.arange(ring.base * ring.lanes, ring.cursor * ring.lanes) % (ring.steps * ring.lanes)


def _agree(ours, plain, rng):
    rows = rng.permutation(_live(ours))
    np.testing.assert_array_equal(np.sort(_live(plain)), np.sort(rows))
    keys = list(plain.fields)
    some = [keys[i] for i in rng.permutation(len(keys))[: rng.integers(1, len(keys) + 1)]]
    for asked in (None, some):
        got, wanted = ours.columns(rows, asked), plain.columns(rows, asked)
        assert list(got) == list(wanted)
        for key in wanted:
            assert _bits(got[key]) == _bits(wanted[key]), key
    np.testing.assert_array_equal(ours.index.ids(rows), plain.index.ids(rows))


@pytest.mark.parametrize("histories", [6, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("next_obs", ["exact", "full"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.every(2)
def test_reads_equal_writes_bit_for_bit(tmp_path, kind, next_obs, histories):
    first = 2 * list(KINDS).index(kind) + (next_obs == "full")
    for seed in range(first, first + 8 * histories, 8):  # each storage has histories of its own
        rng = np.random.default_rng(seed)
        envs, ndim = int(rng.integers(1, 4)), int(rng.integers(1, 3))
        size = int(rng.integers(20, 60)) // envs * envs
        play = Play(rng, envs)
        ours = Ring(KINDS[kind](tmp_path / str(seed), ndim, size), next_obs=next_obs, codes=play.codes)
        plain = Ring(LazyTensorStorage(size, ndim=ndim), next_obs=next_obs, codes=False)
        for write in range(14):
            batch = play.batch(int(rng.integers(1, 9)), wild=write > 3)
            np.testing.assert_array_equal(ours.extend(batch), plain.extend(batch))
            if rng.random() < 0.3:
                rows = rng.choice(_live(ours), min(3, len(ours)), replace=False)
                other = play.batch(len(rows), wild=True)[0]
                ours.overwrite(rows, other)
                plain.overwrite(rows, other)
            _agree(ours, plain, rng)
            if rng.random() < 0.2:
                again = Ring(KINDS["memory"](tmp_path, ndim, size), next_obs=next_obs, codes=bool(rng.integers(2)))
                dumps.dump(ours, tmp_path / f"dump{seed}")
                dumps.load(again, tmp_path / f"dump{seed}", cut=False)
                _agree(again, plain, rng)
                if kind == "memory":
                    ours = again
        assert ours.contents.codes and RECORD in ours.storage.fields
        assert ours.storage.nbytes < plain.storage.nbytes or kind in ("temporary", "disk")


def test_a_row_of_flags_ids_and_one_hot_actions_takes_what_it_needs():
    play = Play(np.random.default_rng(0), 3)
    play.n, play.dtype = 2, torch.int64
    ring = Ring(LazyTensorStorage(300), next_obs="exact", codes=play.codes)
    ring.extend(play.batch(50, wild=False))
    kinds = {code.key: code.kind for code in ring.contents.codes}
    assert kinds["action"] == layout.ONE_HOT and kinds[("collector", "traj_ids")] == INDEX
    assert ring.storage.fields[RECORD].width == 1 + 1 + 2  # six flags and a mask of two; the action; two small numbers
    assert ring.storage.nbytes == 150 * (8 + 16 + 4)


def test_rows_that_save_too_little_stay_as_they_are():
    ring = Ring(LazyTensorStorage(40), codes=True)
    ring.extend(TensorDict({"observation": torch.zeros(4, 900), "done": torch.zeros(4, 1, dtype=torch.bool)}, [4]))
    assert not ring.contents.codes and set(ring.storage.fields) == {"observation", "done"}


def test_codes_go_into_a_checkpoint_and_onto_a_disk(tmp_path):
    play = Play(np.random.default_rng(2), 2)
    play.n, play.dtype = 5, torch.int64
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(30), batch_size=4, codes=play.codes)
    for _ in range(9):
        rb.extend(play.batch(4, wild=False))
    for storage in (LazyTensorStorage(30), LazyMemmapStorage(30, scratch_dir=tmp_path / "rows")):
        other = TensorDictReplayBuffer(storage=storage, batch_size=4)
        other.load_state_dict(rb.state_dict())
        assert (other[:] == rb[:]).all() and other.ring.contents.codes
    other.storage.close(other.ring.content)
    back = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(30, scratch_dir=tmp_path / "rows", resume=True), batch_size=4
    )
    assert (back[:] == rb[:]).all()
    batch = play.batch(4, wild=False)
    rb.extend(batch)
    back.extend(batch)
    assert (back[:] == rb[:]).all()


def packed_on_a_device():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), codes=True)
    batch = TensorDict({"flag": torch.zeros(20, 64, dtype=torch.bool)}, [20])
    rb.extend(batch)
    coded = rb.ring.contents.coded
    assert coded is not None and not coded.plain
    refused(NotImplementedError, "meta", lambda: coded.pack({"flag": batch["flag"].to("meta")}))


def test_a_batch_on_a_device_is_packed_from_a_copy_in_memory(child):
    """`meta` stands for a device: its tensors have no address that may be read, and refuse to be copied."""
    child(packed_on_a_device)


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_that_does_not_fit_is_refused_and_nothing_is_written(tmp_path, kind):
    play = Play(np.random.default_rng(1), 2)
    play.n, play.dtype = 4, torch.int64
    ring = Ring(KINDS[kind](tmp_path, 1, 40), codes=play.codes)
    for key, value in (("count", 128), ("action", 2)):
        batch = play.batch(3, wild=False)
        ring.extend(batch)
        before, odd = ring.read(_live(ring)), batch.clone()
        odd[key][1, 1] = value
        refused(ArgumentError, f"{key} codes=False", lambda odd=odd: ring.extend(odd))
        refused(ArgumentError, f"{key} codes=False", lambda odd=odd: ring.overwrite(np.arange(3), odd[1]))
        assert (ring.read(_live(ring)) == before).all()


@pytest.mark.parametrize(
    ("count", "wide"), [(2, 1), (4, 2), (5, 4), (16, 4), (17, 8), (128, 8), (129, 16), (40000, 32)]
)
def test_numbers_take_the_bits_that_their_values_need(count, wide):
    ring = Ring(LazyTensorStorage(40), codes={"a": count, ("next", "b"): count})
    ends = torch.arange(12)[:, None] % 5 == 4
    batch = TensorDict(
        {"a": torch.arange(12)[:, None] % count, "next": {"b": torch.full((12, 1), count - 1), "done": ends}}, [12]
    )
    ring.extend(batch)
    assert ring.storage.fields[RECORD].width == -(-(2 * wide + 1) // 8)
    assert (ring.read(np.arange(12)) == batch).all()


def test_ids_that_the_index_knows_can_not_be_exchanged_for_others():
    play = Play(np.random.default_rng(3), 2)
    play.n, play.dtype = 5, torch.int64
    ring = Ring(LazyTensorStorage(30, ndim=2), next_obs="full", codes=True)
    batch = play.batch(4, wild=False)
    batch["block"] = batch["collector", "traj_ids"] // 3
    ring.extend(batch)
    refused(ArgumentError, "traj_ids index block", lambda: ring.use_markers("block"))
    ring.use_markers(end_keys=["done"])
    assert (ring.read(_live(ring))["block"] == batch["block"].T.reshape(-1)).all()


def test_rows_that_another_version_packed_smaller_are_refused_by_name():
    ring = Ring(LazyTensorStorage(30), codes={"observation": 9}, next_obs="exact")
    one_hot = torch.eye(9, dtype=torch.int64)
    done = torch.zeros(4, 1, dtype=torch.bool)
    ring.extend(TensorDict({"observation": one_hot[:4], "next": {"observation": one_hot[4:8], "done": done}}, [4]))
    state = ring.state_dict()
    assert len(state["slots"]) == 4
    state["slots"] = state["slots"][:, :4]  # an index each, as they once were
    other = Ring(LazyTensorStorage(30))
    refused(DamagedDataError, "packed version of rlcli 4 bytes 72", lambda: other.read_state(state))
