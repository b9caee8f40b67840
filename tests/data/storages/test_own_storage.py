"""A storage of a user's own is one class with six methods; a buffer does over it whatever it does over plain memory."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
import torch
from episodes import episodes
from face import Ring, refused
from rows_of import live, same, steps
from tensordict import TensorDict

from rlcli.data import (
    CompressedStorage,
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SliceSampler,
    Storage,
    open_buffer,
)
from rlcli.errors import ArgumentError, ResourceError


class ZippedStorage(Storage):
    """Every row by itself, in gzip."""

    def declare(self, fields, capacity):
        self.fields, self.capacity = dict(fields), capacity
        self.rows = {key: {} for key in fields}

    def write(self, number, columns):
        count = len(next(iter(columns.values())))
        self.scatter(np.arange(number, number + count) % self.capacity, columns)

    def scatter(self, rows, columns):
        for key, column in columns.items():
            zipped = [gzip.compress(row.contiguous().view(-1).view(torch.uint8).numpy().tobytes()) for row in column]
            self.rows[key].update(zip(rows.tolist(), zipped, strict=True))

    def gather(self, rows, keys=None):
        out = {key: self.fields[key].empty(len(rows)) for key in (self.fields if keys is None else keys)}
        for key, column in out.items():
            for i, row in enumerate(rows.tolist()):
                column[i].view(-1).view(torch.uint8)[:] = torch.frombuffer(
                    bytearray(gzip.decompress(self.rows[key][row])), dtype=torch.uint8
                )
        return out

    def clear(self):
        self.fields, self.rows, self.capacity = {}, {}, self.max_size

    @property
    def nbytes(self):
        return sum(len(row) for rows in self.rows.values() for row in rows.values())


def filled(storage, **options):
    ring = Ring(storage, **options)
    for seed in range(6):  # goes round
        ring.extend(steps(seed))
    return ring


class BackwardsStorage(ZippedStorage):
    """Gives its columns in an order of its own."""

    def gather(self, rows, keys=None):
        return dict(reversed(super().gather(rows, keys).items()))


OPTIONS = {
    "full": {"next_obs": "full"},
    "exact": {"next_obs": "exact"},
    "stacks": {"next_obs": "exact", "frame_stack": {"pixels": 40}},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_ring_reads_what_it_reads_from_plain_memory(name):
    own, plain = (filled(make(40, ndim=2), **OPTIONS[name]) for make in (ZippedStorage, LazyTensorStorage))
    assert same(live(own), live(plain))
    for ring in (own, plain):
        ring.overwrite(np.array([3, 7, 3]), steps(9, 1, 3).reshape(-1))
    assert same(live(own), live(plain))


@pytest.mark.parametrize("kind", [ZippedStorage, BackwardsStorage])
@pytest.mark.parametrize("sampler", [None, SliceSampler(slice_len=4, seed=1), PrioritizedSampler(40, 0.7, 0.9, seed=1)])
def test_a_buffer_samples_saves_and_loads_over_it(tmp_path, sampler, kind):
    def buffer(storage):
        from copy import deepcopy

        return ReplayBuffer(storage=storage(40, ndim=2), sampler=deepcopy(sampler), batch_size=8, next_obs="exact")

    own, plain = buffer(kind), buffer(LazyTensorStorage)
    for rb in (own, plain):
        rb.sampler.set_seed(3)
        for seed in range(6):
            rb.extend(steps(seed))
    for _ in range(5):
        a, b = own.sample(), plain.sample()
        assert all(torch.equal(a[key], b[key]) for key in b.keys(True, True))
    own.dumps(tmp_path)
    again = buffer(kind)
    again.loads(tmp_path)
    assert same(live(again.ring), live(own.ring))
    opened = open_buffer(tmp_path)
    assert same(live(opened.ring), live(own.ring))
    copied = buffer(kind)
    copied.load_state_dict(own.state_dict())
    assert same(live(copied.ring), live(own.ring))
    own.close()
    assert own.storage.nbytes == 0


class Doubled(LazyTensorStorage):
    """One of ours, of which one method is another."""

    def gather(self, rows, keys=None):
        found = super().gather(rows, keys)
        return found | {key: 2 * column for key, column in found.items() if key == ("next", "reward")}


def test_a_method_that_a_user_overrides_is_the_one_that_is_called():
    ring, plain = filled(Doubled(40, ndim=2)), filled(LazyTensorStorage(40, ndim=2))
    rows = np.arange(len(ring))
    reward = ("next", "reward")
    assert torch.equal(ring.columns(rows)[reward], 2 * plain.columns(rows)[reward])


class Inverted(CompressedStorage):
    def gather(self, rows, keys=None):
        found = super().gather(rows, keys)
        return found | {key: 255 - column for key, column in found.items() if key == "pixels"}


def test_stacks_are_put_together_from_what_an_overridden_gather_gives():
    options = OPTIONS["stacks"]
    ring, plain = filled(Inverted(40, ndim=2, widest=16), **options), filled(LazyTensorStorage(40, ndim=2), **options)
    found = ring.columns(np.arange(20), ["pixels"])["pixels"]
    stored = plain.columns(np.arange(20), ["pixels"])["pixels"]
    newest = slice(-1, None)  # older frames of a stack may lie beside the rows, where no storage is asked
    assert torch.equal(found[:, newest], 255 - stored[:, newest])


class Full(ZippedStorage):
    """Has no room for a batch of one seed."""

    def write(self, number, columns):
        if bool((columns["next", "reward"] == 3).any()):
            raise ResourceError("there is no room")
        super().write(number, columns)


def test_a_write_that_it_refuses_leaves_the_ring_as_it_was():
    own, plain = (Ring(make(40, ndim=2), next_obs="exact") for make in (Full, LazyTensorStorage))
    for seed in range(6):
        if seed == 3:
            with pytest.raises(ResourceError):
                own.extend(steps(seed))
        else:
            own.extend(steps(seed))
            plain.extend(steps(seed))
    assert same(live(own), live(plain))


class TableStorage(LazyTensorStorage):
    """Reads columns as parts of one table, so that their rows lie apart."""

    def gather(self, rows, keys=None):
        found = super().gather(rows, keys)
        return {key: torch.stack([column, torch.zeros_like(column)], 1)[:, 0] for key, column in found.items()}


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("next_obs", ["full", "exact"])
def test_columns_whose_rows_lie_apart_are_marked_and_followed_alike(next_obs, codes):
    samples = []
    for kind in (LazyTensorStorage, TableStorage):
        sampler = SliceSampler(slice_len=4, strict_length=False, seed=1)
        rb = ReplayBuffer(storage=kind(40), sampler=sampler, batch_size=16, next_obs=next_obs, codes=codes)
        rb.extend(episodes([7, 9, 12]))
        samples.append([rb.sample() for _ in range(5)])
    assert all((a == b).all() for a, b in zip(*samples, strict=True))


# ---- one of ours that writes and reads otherwise -------------------------------------------------------------------
def flipped(columns):
    return {k: (c.contiguous().view(torch.uint8) ^ 0xAA).view(c.dtype) for k, c in columns.items()}


def enciphered(base):
    class Enciphered(base):
        def write(self, number, columns):
            super().write(number, flipped(columns))

        def scatter(self, rows, columns):
            super().scatter(rows, flipped(columns))

        def gather(self, rows, keys=None):
            return flipped(super().gather(rows, keys))

    return Enciphered


Memory, Compressed, Disk = map(enciphered, (LazyTensorStorage, CompressedStorage, LazyMemmapStorage))


def counted(first, count=50, largest=0):
    wide = (torch.arange(first, first + count)[:, None] % 251).to(torch.uint8).expand(-1, 2048).contiguous()
    rows = TensorDict({"pixels": wide, "count": torch.arange(first, first + count) % 100 + largest}, [count])
    return rows.set("number", torch.arange(first, first + count).float())


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("kind", ["memory", "compressed", "temporary", "kept"])
def test_what_it_writes_is_read_back_by_itself_wherever_the_rows_go(tmp_path, kind, codes):
    made = {"memory": Memory, "compressed": Compressed, "temporary": Disk, "kept": Disk}[kind]

    def storage(name, **options):
        folder = {"scratch_dir": tmp_path / name, "commit_seconds": 0.0} if kind == "kept" else {}
        return made(400, **folder, **options)

    def read(rb):
        rows = rb[:]
        found = rows["number"].long()
        order = found.sort().indices
        assert torch.equal(rows["pixels"][:, 0].long(), found % 251)
        return found[order].tolist(), (rows["count"] - found % 100)[order].tolist()

    rb = ReplayBuffer(storage=storage("rows"), codes=codes)
    for first in range(0, 250, 50):
        rb.extend(counted(first))
    rb.extend(counted(250, largest=10**6))
    rb[[3]] = counted(3, 1)
    wanted = [*range(300)], [0] * 250 + [10**6] * 50
    assert read(rb) == wanted
    rb.dumps(tmp_path / "dump")
    for other in (storage("again"), LazyTensorStorage(400)):
        again = ReplayBuffer(storage=other)
        again.loads(tmp_path / "dump")
        assert read(again) == wanted
    assert read(open_buffer(tmp_path / "dump")) == wanted
    rb.close()
    if kind == "kept":
        for wrong in (
            lambda: open_buffer(tmp_path / "rows"),
            lambda: LazyMemmapStorage(400, scratch_dir=tmp_path / "rows", resume=True),
        ):
            with refused(ArgumentError, "test_own_storage"):
                wrong()
        assert read(ReplayBuffer(storage=storage("rows", resume=True))) == wanted
        ReplayBuffer(storage=LazyMemmapStorage(9, scratch_dir=tmp_path / "plain", commit_seconds=0.0)).extend(
            counted(0, 9)
        )
        refused(ArgumentError, "plain", lambda: Disk(9, scratch_dir=tmp_path / "plain", resume=True))
