"""Every storage answers as plain memory does, whatever was written, written over, wrapped and opened again."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from face import Field, refused
from rows_of import columns, fields, same

from rlcli.data.storages import CompressedStorage, LazyMemmapStorage, LazyTensorStorage, ListStorage
from rlcli.errors import ArgumentError

CAPACITY = 90


def compressed(lanes):
    def make(folder):
        storage = CompressedStorage(CAPACITY, longest=3)
        storage.lanes = lanes
        return storage

    return make


def on_disk(folder):
    return LazyMemmapStorage(CAPACITY, scratch_dir=folder / "rows", commit_seconds=0.0)


def temporary(folder):
    return LazyMemmapStorage(CAPACITY)


KINDS = {"disk": on_disk, "temporary": temporary, "compressed": compressed(1), "compressed, 3 lanes": compressed(3)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_a_storage_holds_what_plain_memory_holds(tmp_path, kind, seed):
    storage, plain, rng = KINDS[kind](tmp_path), LazyTensorStorage(CAPACITY), np.random.default_rng(seed)
    storage.declare(fields(), CAPACITY)
    plain.declare(fields(), CAPACITY)
    cursor = 0
    for i in range(40):
        count = int(rng.integers(1, [4, 60][int(rng.integers(2))]))
        for one in (storage, plain):
            one.write(cursor, columns(count, 1000 * seed + i))
        cursor += count
        if rng.random() < 0.3:
            rows = rng.integers(0, min(cursor, CAPACITY), int(rng.integers(1, 8)))
            new = columns(len(rows), -(i + 1) % 997)
            new = new if rng.random() < 0.5 else {("nested", "pixels"): new["nested", "pixels"]}
            for one in (storage, plain):
                one.scatter(rows, new)
        if rng.random() < 0.5:
            storage.commit()
        if kind == "disk" and rng.random() < 0.1:
            storage.close()
            storage = LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "rows", resume=True, commit_seconds=0.0)
        rows = rng.permutation(min(cursor, CAPACITY))[: 1 + int(rng.integers(CAPACITY))]
        rows = rows if rng.random() < 0.5 else np.sort(rows)
        assert same(storage.gather(rows), plain.gather(rows)), f"seed {seed}, write {i}"
        one_key = storage.gather(rows, [("nested", "pixels")])
        assert same(one_key, plain.gather(rows, [("nested", "pixels")]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_was_never_written_is_refused(tmp_path, kind):
    storage = KINDS[kind](tmp_path)
    storage.declare(fields(), CAPACITY)
    storage.write(0, columns(5, 0))
    for rows in ([5000], [-1], [60], [0, 5]):
        with pytest.raises(AssertionError):
            storage.gather(np.array(rows))


@pytest.mark.parametrize("kind", KINDS)
def test_clear_gives_everything_back(tmp_path, kind):
    storage = KINDS[kind](tmp_path)
    for seed in range(2):
        storage.declare(fields(), CAPACITY)
        storage.write(0, columns(80, seed))
        storage.write(80, columns(30, seed))
        assert storage.nbytes > 0
        storage.clear()
        assert storage.nbytes == 0 and storage.fields == {}
    assert not (tmp_path / "rows").exists() or list((tmp_path / "rows").iterdir()) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_storage_may_begin_at_any_row(tmp_path, kind):
    """As a ring does that was loaded from a dump."""
    storage = KINDS[kind](tmp_path)
    storage.declare(fields(), CAPACITY)
    for i, start in enumerate((1240, 1255, 1260, 1270)):  # rows 70, 85, 0, 10
        new = columns([15, 5, 10, 20][i], i)
        storage.write(start, new)
        assert same(storage.gather(np.arange(start, start + len(new["flag"])) % CAPACITY), new)


@pytest.mark.parametrize("number", [1200, 1256])
def test_a_storage_on_disk_takes_rows_in_order(tmp_path, number):
    storage = on_disk(tmp_path)
    storage.declare(fields(), CAPACITY)
    storage.write(1240, columns(15, 0))
    with pytest.raises(AssertionError):
        storage.write(number, columns(5, 1))
    assert same(storage.gather(np.arange(1240, 1255) % CAPACITY), columns(15, 0))


def test_a_temporary_storage_leaves_no_file_behind():
    storage = LazyMemmapStorage(CAPACITY)
    storage.declare(fields(), CAPACITY)
    storage.write(0, columns(50, 0))
    folder = storage.folder
    assert list(folder.iterdir()) == []  # the space is free when this process ends, in whatever way
    del storage
    assert not folder.exists()


def test_memory_of_compressed_frames_is_used_again():
    storage = CompressedStorage(64)
    pixels = {"pixels": torch.randint(0, 255, (64, 100, 100), dtype=torch.uint8)}  # noise: nothing can be saved
    storage.declare({"pixels": fields_of_pixels(pixels)}, 64)
    sizes = []
    for _ in range(40):
        storage.write(0, pixels)
        sizes.append(storage.nbytes)
    assert sizes[-1] == sizes[5] and sizes[-1] < 4 * pixels["pixels"].numel()


def fields_of_pixels(pixels):
    from rlcli.specs.field import Field

    return Field.of(pixels["pixels"])


def test_rows_on_a_device_keep_no_graph():
    """`meta` stands for a device: rows there are written as on a GPU."""
    storage = LazyTensorStorage(10, device="meta")
    storage.declare({"x": Field((1,), torch.float32)}, 10)
    for write in (
        lambda x: storage.write(0, {"x": x}),
        lambda x: storage.scatter(np.array([1, 2, 1]), {"x": x}),
    ):
        write(torch.zeros(3, 1, requires_grad=True) * 2)
        assert not storage.column("x").requires_grad and not storage.gather(np.arange(2))["x"].requires_grad


@pytest.mark.parametrize("rows", [1 << 70, (1 << 40) + 1])
def test_more_rows_than_any_file_can_speak_of_are_refused(rows):
    for kind in (LazyTensorStorage, LazyMemmapStorage, CompressedStorage):
        with refused(ArgumentError, "max_size 1,099,511,627,776"):
            kind(rows)
    assert ListStorage(sys.maxsize).max_size == sys.maxsize  # of objects there are no files
