"""`dump` and `load`: what comes back is what was there, and what cannot be read is refused in a sentence."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch
from face import Disk, Ring
from rows_of import live, same, steps
from tensordict import TensorDict

from rlcli.data import ReplayBuffer, open_buffer
from rlcli.data.files import dumps
from rlcli.data.files.sealed_folder import sealed
from rlcli.data.storages import CompressedStorage, LazyMemmapStorage, LazyTensorStorage
from rlcli.errors import ArgumentError, DamagedDataError, ResourceError

SIZE = 70
KINDS = {
    "memory": lambda folder, ndim: LazyTensorStorage(SIZE, ndim=ndim),
    "compressed": lambda folder, ndim: CompressedStorage(SIZE, ndim=ndim),
    "temporary": lambda folder, ndim: LazyMemmapStorage(SIZE, ndim=ndim),
    "disk": lambda folder, ndim: LazyMemmapStorage(SIZE, ndim=ndim, scratch_dir=folder / os.urandom(4).hex()),
}


@pytest.mark.parametrize("mode", ["exact", "full"])
@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.every(3)
def test_a_dump_gives_the_same_ring_in_any_storage(tmp_path, kind, ndim, mode):
    ring = Ring(KINDS[kind](tmp_path, ndim), next_obs=mode)
    for i in range(18):
        ring.extend(steps(i))
        if i in (0, 3, 11, 17):
            extra = {"sampler": {"state": 2**100 + i, "weights": torch.arange(i)}, "none": None}
            dumps.dump(ring, tmp_path / "dumps", extra)
            every = list(KINDS)
            some = every if i == 17 else [every[(every.index(kind) + i + 2 * ndim + (mode == "full")) % len(every)]]
            for other in some:
                again = Ring(KINDS[other](tmp_path, ndim), next_obs=mode)
                back = dumps.load(again, tmp_path / "dumps")
                assert back["sampler"]["state"] == 2**100 + i and back["none"] is None
                assert torch.equal(back["sampler"]["weights"], torch.arange(i))
                assert (again.base, again.cursor, len(again)) == (ring.base, ring.cursor, len(ring))
                assert same(live(again), live(ring)), f"{kind} to {other} after {i} writes"
                rows = np.arange(len(ring))
                for face in ("ids", "successors"):
                    np.testing.assert_array_equal(getattr(again.index, face)(rows), getattr(ring.index, face)(rows))
    for i in range(18, 24):  # and goes on as the first one does
        ring.extend(steps(i))
        again.extend(steps(i))
        assert same(live(again), live(ring))
    (dump,) = (tmp_path / "dumps").iterdir()
    assert dumps.FOLDERS.verify(dump) is None


def test_an_empty_ring_can_be_dumped_and_loaded(tmp_path):
    dumps.dump(Ring(LazyTensorStorage(SIZE)), tmp_path)
    ring = Ring(LazyTensorStorage(SIZE))
    assert dumps.load(ring, tmp_path) == {} and len(ring) == 0
    ring.extend(steps(0))


def test_a_dump_of_a_storage_on_disk_writes_only_what_is_new(tmp_path):
    ring = Ring(LazyMemmapStorage(1000, scratch_dir=tmp_path / "rows"))
    for i in range(60):
        ring.extend(steps(i))
    first = dumps.dump(ring, tmp_path / "dumps", keep=2)
    ring.extend(steps(60))
    second = dumps.dump(ring, tmp_path / "dumps", keep=2)
    linked = [path.name for path in second.glob("rows-*") if path.stat().st_nlink == 3]
    assert len(linked) >= len(list(second.glob("rows-*"))) - 1 > 3
    before = live(ring)
    ring.overwrite(np.array([3, 4]), steps(99).reshape(-1)[:2])  # what a dump links to is never written
    for i in range(61, 190):
        ring.extend(steps(i))
    for path in (first, second):
        assert dumps.FOLDERS.verify(path) is None
    again = Ring(LazyTensorStorage(1000))
    dumps.load(again, tmp_path / "dumps")
    assert same(live(again), before)


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("kind", ["memory", "compressed"])
def test_a_dump_of_memory_writes_only_what_is_new_and_proves_by_bytes_what_is_not(tmp_path, kind, keep):
    storage = {"memory": LazyTensorStorage, "compressed": CompressedStorage}[kind](500)
    ring, kept = Ring(storage), []
    for number in range(1, 70):
        ring.extend(steps(number))
        if number == 32:
            ring.overwrite(np.arange(100, 104), steps(99).reshape(-1)[:4])
        if number % 8:
            continue
        path, keeps = dumps.dump(ring, tmp_path, {"number": number}, keep=keep), live(ring)
        kept = [*kept, (path, keeps)][-keep:]
        assert [folder for folder, _ in kept] == dumps.FOLDERS.paths(tmp_path)
        inodes = [{file.stat().st_ino for file in folder.glob("rows-*")} for folder, _ in kept]
        assert len(set.union(*inodes)) == sum(map(len, inodes))  # no two of the kept ones share a byte
        for folder, _ in kept:
            assert dumps.FOLDERS.verify(folder) is None
        back = Ring(LazyTensorStorage(500))
        assert dumps.load(back, tmp_path) == {"number": number} and same(live(back), keeps)


def written(ring, folder, **options):
    """Bytes of rows that a dump wrote, and its folder."""
    disk = CountedBytes()
    path = dumps.dump(ring, folder, disk=disk, **options)
    return disk.rows, path


class CountedBytes(Disk):
    rows = 0

    def write_file(self, path, chunks, **options):
        stamp = super().write_file(path, chunks, **options)
        self.rows += stamp.size if path.name.startswith("rows-") else 0
        return stamp


@pytest.mark.parametrize("keep", [1, 2])
def test_how_much_a_later_dump_writes(tmp_path, keep):
    ring = Ring(LazyTensorStorage(1000))
    for number in range(90):
        ring.extend(steps(number))
    first, _ = written(ring, tmp_path, keep=keep)
    for _ in range(keep - 1):
        assert written(ring, tmp_path, keep=keep)[0] == first  # a second copy, for a flip in the first
    assert written(ring, tmp_path, keep=keep)[0] == 0
    ring.extend(steps(90))
    new, _ = written(ring, tmp_path, keep=keep)
    assert 0 < new < first / 4
    for _ in range(keep - 1):
        written(ring, tmp_path, keep=keep)
    ring.overwrite(np.arange(4), steps(50).reshape(-1)[:4])
    rewritten, _ = written(ring, tmp_path, keep=keep)
    assert 0 < rewritten < first / 4  # the file of these rows, and no other
    back = Ring(LazyTensorStorage(1000))
    dumps.load(back, tmp_path)
    assert same(live(back), live(ring))


def test_a_file_that_the_disk_has_damaged_is_written_anew_and_not_linked(tmp_path):
    ring, path = dumped(tmp_path)
    file = sorted(path.glob("rows-*"))[0]
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    bytes_, path = written(ring, tmp_path)
    assert bytes_ == len(content) and dumps.FOLDERS.verify(path) is None


def test_frames_are_dumped_as_they_are_compressed(tmp_path):
    sizes = {}
    for kind in ("memory", "compressed"):
        ring = Ring(KINDS[kind](tmp_path, 1))
        for i in range(7):
            ring.extend(steps(i)[..., :1].expand(2, 5).clone())  # a still picture
        path = dumps.dump(ring, tmp_path / kind)
        sizes[kind] = sum(file.stat().st_size for file in path.glob("rows-*"))
    assert sizes["compressed"] < sizes["memory"] / 3


class Own(CompressedStorage):
    pass


def test_a_storage_of_ones_own_may_compress_frames(tmp_path):
    rb = ReplayBuffer(storage=Own(20))
    pixels = torch.randint(0, 255, (9, 40, 40), dtype=torch.uint8)
    rb.extend(TensorDict({"pixels": pixels}, [9]))
    rb.dumps(tmp_path)
    other = ReplayBuffer(storage=Own(20))
    other.loads(tmp_path)
    for read in (other, open_buffer(tmp_path)):
        assert torch.equal(read[:]["pixels"], pixels)


def dumped(folder, count=6, keep=1, size=SIZE, ndim=1):
    ring = Ring(LazyTensorStorage(size, ndim=ndim))
    for i in range(count):
        ring.extend(steps(i))
    return ring, dumps.dump(ring, folder, keep=keep)


def refused(folder, error, text, code):
    """By a ring that holds rows, which stay."""
    ring = Ring(LazyTensorStorage(SIZE))
    ring.extend(steps(50))
    before = live(ring)
    warned = pytest.warns() if error is DamagedDataError else pytest.MonkeyPatch.context()
    with warned, pytest.raises(error, match=text) as caught:
        dumps.load(ring, folder)
    assert caught.value.exit_code == code
    assert same(live(ring), before) and len(ring) == 10


def test_a_folder_that_is_no_buffer_is_refused(tmp_path):
    refused(tmp_path / "nowhere", ResourceError, "there is no such folder", 5)
    refused(tmp_path, ResourceError, "not the folder of a buffer.*holds no dump", 5)
    (tmp_path / ".tmp_000001_77").mkdir()
    refused(tmp_path, ResourceError, "never finished", 5)


def test_a_dump_of_another_shape_is_refused(tmp_path):
    dumped(tmp_path / "a", size=SIZE + 1)
    refused(tmp_path / "a", ArgumentError, f"max_size is {SIZE + 1} there, {SIZE} here", 2)
    dumped(tmp_path / "b", ndim=2)
    refused(tmp_path / "b", ArgumentError, "ndim is 2 there, 1 here", 2)


def test_a_newer_dump_is_refused(tmp_path):
    _, path = dumped(tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["seal"]
    (path / "manifest.json").write_bytes(sealed({**manifest, "version": 99}))
    refused(tmp_path, DamagedDataError, "99; .rlcli-buffer. 2 is read here", 4)


def test_a_name_that_leads_elsewhere_is_never_opened(tmp_path):
    _, path = dumped(tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["seal"]
    manifest["files"]["../secret"] = {"size": 1, "digest": "0" * 32}
    (path / "manifest.json").write_bytes(sealed(manifest))
    refused(tmp_path, DamagedDataError, "no place there", 4)


def test_a_damaged_dump_is_passed_over_loudly(tmp_path):
    first, _ = dumped(tmp_path, keep=2)
    before = live(first)
    first.extend(steps(9))
    second = dumps.dump(first, tmp_path, keep=2)
    file = sorted(second.glob("rows-*"))[0]
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    ring = Ring(LazyTensorStorage(SIZE))
    with pytest.warns(UserWarning, match=f"skipped.*{file.name}"):
        dumps.load(ring, tmp_path)
    assert same(live(ring), before)


def test_a_later_dump_leaves_what_a_crash_left_behind(tmp_path):
    (tmp_path / ".tmp_000001_77").mkdir()
    _, path = dumped(tmp_path)
    assert list(tmp_path.iterdir()) == [path]
