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
from rlcli.errors import ResourceError
from rlcli.kernels import codes as layout

FLAGS = ("done", "terminated", ("next", "done"), ("next", "terminated"), ("next", "truncated"), "is_init")
ODD = [torch.int16, torch.int32, torch.int64, torch.uint8, torch.float32, torch.float64, torch.float16, torch.bfloat16]
KINDS = {
    "memory": lambda folder, ndim, size: LazyTensorStorage(size, ndim=ndim),
    "compressed": lambda folder, ndim, size: CompressedStorage(size, ndim=ndim),
    "temporary": lambda folder, ndim, size: LazyMemmapStorage(size, ndim=ndim),
    "disk": lambda folder, ndim, size: LazyMemmapStorage(size, ndim=ndim, scratch_dir=folder / "rows"),
}


class Play:
    """Batches `[envs, T]`; `wild` ones hold what no code expects."""

    def __init__(self, rng, envs):
        self.rng, self.envs = rng, envs
        self.dtype = ODD[rng.integers(len(ODD))]
        self.n = int(rng.choice([2, 3, 9, 254, 255, 300]))
        self.ids, self.next_id = np.arange(envs), envs
        self.id_dtype = [torch.int64, torch.int32][rng.integers(2)]

    def batch(self, steps, wild):
        rng, shape = self.rng, (self.envs, steps)
        one_hot = torch.nn.functional.one_hot(torch.from_numpy(rng.integers(0, self.n, shape)), self.n)
        action, mask = one_hot.to(self.dtype), one_hot.bool()
        count = torch.from_numpy(rng.integers(-100, 100, (*shape, 2)))
        if wild and rng.random() < 0.7:
            at = tuple(rng.integers(0, size) for size in (*shape, self.n))
            odd = [0, 1, 2, -0.0, 100, float("nan")][rng.integers(6 if self.dtype.is_floating_point else 3)]
            action[at] = odd
        if wild and rng.random() < 0.7:
            reach = [2**7, 2**15, 2**31, 2**62][rng.integers(4)]
            count[rng.integers(self.envs), rng.integers(steps)] = int(
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
    relaid, first = 0, 2 * list(KINDS).index(kind) + (next_obs == "full")
    for seed in range(first, first + 8 * histories, 8):  # each storage has histories of its own
        rng = np.random.default_rng(seed)
        envs, ndim = int(rng.integers(1, 4)), int(rng.integers(1, 3))
        size = int(rng.integers(20, 60)) // envs * envs
        play = Play(rng, envs)
        ours = Ring(KINDS[kind](tmp_path / str(seed), ndim, size), next_obs=next_obs, codes=True)
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
        relaid += ours.contents.relaid
        assert ours.storage.nbytes < plain.storage.nbytes or kind in ("temporary", "disk")
    assert relaid > 0


def test_a_row_of_flags_ids_and_one_hot_actions_takes_what_it_needs():
    play = Play(np.random.default_rng(0), 3)
    play.n, play.dtype = 2, torch.int64
    ring = Ring(LazyTensorStorage(300), next_obs="exact", codes=True)
    ring.extend(play.batch(50, wild=False))
    kinds = {code.key: code.kind for code in ring.contents.codes}
    assert kinds["action"] == layout.ONE_HOT and kinds[("collector", "traj_ids")] == INDEX
    assert ring.storage.fields[RECORD].width == 1 + 1 + 2  # six flags and a mask of two; the action; two small numbers
    assert ring.storage.nbytes == 150 * (8 + 4)


def test_what_does_not_fit_changes_one_key_and_is_counted():
    play = Play(np.random.default_rng(1), 2)
    play.n, play.dtype = 4, torch.int64
    ring, written = Ring(LazyTensorStorage(40), codes=True), []
    for number in (5, 200, 40_000, 2**33, 7):
        batch = play.batch(3, wild=False)
        batch["count"][1, 1] = number
        written.append(batch)
        ring.extend(batch)
    assert ring.contents.relaid == 3 and "count" in ring.storage.fields and "action" not in ring.storage.fields
    assert torch.equal(ring.read(np.arange(30))["count"], torch.cat([b["count"].reshape(-1, 2) for b in written]))


def test_rows_that_save_too_little_stay_as_they_are():
    ring = Ring(LazyTensorStorage(40), codes=True)
    ring.extend(TensorDict({"observation": torch.zeros(4, 900), "done": torch.zeros(4, 1, dtype=torch.bool)}, [4]))
    assert not ring.contents.codes and set(ring.storage.fields) == {"observation", "done"}


def test_codes_go_into_a_checkpoint_and_onto_a_disk(tmp_path):
    play = Play(np.random.default_rng(2), 2)
    play.n, play.dtype = 5, torch.int64
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(30), batch_size=4, codes=True)
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_flag_that_is_neither_true_nor_false_is_stored_as_it_is(tmp_path, kind):
    flags = {key: torch.zeros(8, 1, dtype=torch.bool) for key in FLAGS}
    batch = TensorDict(flags, [8])
    odd = batch.clone()
    odd["done"].view(torch.uint8)[3] = 2
    ring = Ring(KINDS[kind](tmp_path, 1, 20), codes=True)
    ring.extend(batch)
    ring.extend(odd)
    assert ring.contents.relaid == 1
    assert ring.read(np.arange(16))["done"].view(torch.uint8)[11] == 2


def test_small_numbers_share_bytes_with_flags():
    """Six flags, actions of 2, 4 and 16 kinds: 6 + 1 + 2 + 4 bits."""
    play = Play(np.random.default_rng(4), 2)
    play.n, play.dtype = 2, torch.int64
    ring, written = Ring(LazyTensorStorage(40), codes=True), []
    for kinds in ((2, 4, 16), (2, 4, 16), (2, 5, 16), (2, 5, 17)):
        batch = play.batch(4, wild=False).exclude("action", "mask", "count")
        for name, most in zip("abc", kinds, strict=True):
            batch[name] = torch.from_numpy(play.rng.integers(0, most, (2, 4, 1)))
            batch[name][0, 0] = most - 1
        written.append(batch.reshape(-1))
        ring.extend(batch)
        wide = {2: 1, 4: 2, 5: 4, 16: 4, 17: 8}
        assert ring.storage.fields[RECORD].width == -(-(6 + sum(wide[most] for most in kinds)) // 8)
    assert ring.contents.relaid == 2
    assert (ring.read(np.arange(32)).select("a", "b", "c") == torch.cat(written).select("a", "b", "c")).all()


@pytest.mark.parametrize("kind", KINDS)
def test_ids_that_the_index_knew_are_stored_when_rows_are_told_apart_by_another_key(tmp_path, kind):
    play = Play(np.random.default_rng(3), 2)
    play.n, play.dtype = 5, torch.int64
    ring = Ring(KINDS[kind](tmp_path, 2, 30), next_obs="full", codes=True)
    plain = Ring(LazyTensorStorage(30, ndim=2), next_obs="full")
    for _ in range(6):
        batch = play.batch(4, wild=False)
        batch["block"] = batch["collector", "traj_ids"] // 3
        ring.extend(batch)
        plain.extend(batch)
    ring.use_markers("block")
    plain.use_markers("block")
    assert ("collector", "traj_ids") in ring.storage.fields
    _agree(ring, plain, play.rng)


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


def counted(first, rows=40):
    """A wide key that has no code, and three small ones of which `count` grows."""
    ends = torch.arange(rows)[:, None] % 7 == 6
    action = torch.eye(40, dtype=torch.int64)[torch.arange(rows) % 40]
    pixels = (torch.arange(rows * 1200) % 251).to(torch.uint8).view(rows, 1200)
    keys = {"pixels": pixels, "count": torch.arange(first, first + rows)[:, None], "action": action}
    return TensorDict({**keys, "next": {"done": ends}}, [rows])


@pytest.mark.parametrize("make", [LazyTensorStorage, CompressedStorage])
def test_a_value_that_outgrows_its_code_changes_the_packed_column_alone(make):
    ring = Ring(make(100), codes=True)
    for first in (0, 40, 1000):
        ring.extend(counted(first))
        held = ring.storage.frames["pixels"] if make is CompressedStorage else ring.storage.memory().addresses["pixels"]
        if first == 0:
            before = held
    assert ring.contents.relaid and held == before
    count = ring.read(np.arange(100))["count"].squeeze(-1).tolist()
    assert count == [*range(1020, 1040), *range(20, 80), *range(1000, 1020)]
    one = counted(2000)
    one["action"][3] = 5  # no code holds it, so it leaves the packed column
    ring.extend(one)
    assert "action" in ring.storage.fields
    assert torch.equal(ring.read(np.arange(20, 60))["action"], one["action"])


@pytest.mark.parametrize("make", [LazyTensorStorage, CompressedStorage])
def test_wider_codes_that_take_no_more_bytes_are_laid_out_anew_all_the_same(make):
    def small(most):
        ends = torch.arange(12)[:, None] % 5 == 4
        return TensorDict({"mode": torch.arange(12)[:, None] % (most + 1), "next": {"done": ends}}, [12])

    ring = Ring(make(100), codes=True)
    given = [small(1), small(3), small(9)]  # 1, 2 and 4 bits beside that of the flag: one byte each time
    for batch in given:
        ring.extend(batch)
        assert ring.contents.coded.stored[RECORD].width == 1
    assert ring.contents.relaid == 2
    assert (ring.read(np.arange(36)) == torch.cat(given)).all()


@pytest.mark.parametrize("make", [LazyTensorStorage, CompressedStorage, LazyMemmapStorage])
def test_ids_that_are_stored_from_now_on_leave_packed_keys_as_they_are(make):
    ring = Ring(make(100), codes=True)
    batch = counted(0)
    batch["episode"] = torch.arange(40) // 7
    ring.extend(batch)
    ring.use_markers(end_keys=[("next", "done")], traj_key="count")
    assert "episode" in ring.storage.fields and (ring.read(np.arange(40)) == batch).all()


@pytest.mark.parametrize("make", [LazyTensorStorage, CompressedStorage])
def test_codes_that_cannot_be_changed_for_want_of_memory_stay_as_they_are(monkeypatch, make):
    from rlcli.data.storages import tensor

    class NoMore:
        MAP_PRIVATE = MAP_ANONYMOUS = 0

        @staticmethod
        def mmap(*args, **options):
            raise OSError(12, "Cannot allocate memory")

    ring = Ring(make(100), codes=True)
    ring.extend(counted(0))
    before = ring.read(np.arange(40))
    with monkeypatch.context() as patch:
        patch.setattr(tensor, "mmap", NoMore)
        refused(ResourceError, "reserved", lambda: ring.extend(counted(1000)))
    assert len(ring) == 40 and (ring.read(np.arange(40)) == before).all()
    ring.extend(counted(1000))
    assert ring.read(np.arange(80))["count"].flatten().tolist() == [*range(40), *range(1000, 1040)]
