"""Dumps of a buffer under kills, power cuts, flips and full disks: a good one is there, a bad one is never believed."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess

import numpy as np
import pytest
from disks import CountingDisk, DyingDisk, LosingDisk, PowerCut, RefusingDisk, places, run_and_die
from face import Disk, Ring, refused
from rings import STEPS, LosingPages, batch, equal, live, quiet, reference

from rlcli.data.files import dumps
from rlcli.data.storages import LazyMemmapStorage, LazyTensorStorage
from rlcli.errors import DamagedDataError, ResourceError

TIERS = ["memory", "disk"]


def ring_of(tier, folder, batches, disk=None):
    """Rows of so many batches, in memory or on disk."""
    options = {"scratch_dir": folder / "rows", "disk": disk or Disk(), "commit_seconds": 0.0}
    storage = (
        LazyTensorStorage(STEPS * 2, ndim=2) if tier == "memory" else LazyMemmapStorage(STEPS * 2, ndim=2, **options)
    )
    ring = Ring(storage, next_obs="exact")
    for i in range(batches):
        ring.extend(batch(i))
    return ring


def more(ring, batches):
    while ring.cursor < 4 * batches:
        ring.extend(batch(ring.cursor // 4))
    return ring


def wrong(folder):
    """A sentence for every dump of a folder that is not as it was written."""
    return [found for path in dumps.FOLDERS.paths(folder) if (found := dumps.FOLDERS.verify(path))]


def newest(folder):
    """Number of batches in the newest dump that loads; what it holds is compared."""
    ring = Ring(LazyTensorStorage(STEPS * 2, ndim=2), next_obs="exact")
    extra = quiet(lambda: dumps.load(ring, folder))
    count = ring.cursor // 4
    assert extra == {"count": count} and equal(live(ring), reference(count, "exact"))
    return count


def save(ring, folder, disk=None, keep=1):
    return dumps.dump(ring, folder / "dumps", {"count": ring.cursor // 4}, keep=keep, disk=disk)


@pytest.fixture(params=TIERS)
def tier(request):
    return request.param


def calls_of(tier, folder):
    ring = ring_of(tier, folder, 6)
    save(ring, folder)
    more(ring, 8)
    disk = CountingDisk()
    save(ring, folder, disk)
    return disk.calls


# every call by default, except that one torn file stands for all pieces that it may be torn at
EVERY = pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])


@EVERY
def test_killed_before_every_single_call(tmp_path, tier, every):
    calls = calls_of(tier, tmp_path / "counted")
    renamed = [call for call, _ in calls].index("rename") + 1
    assert {"write", "sync", "sync_folder"} <= {call for call, _ in calls}
    assert tier == "memory" or "link" in {call for call, _ in calls}
    for n in places(calls, every):
        folder = tmp_path / str(n)

        def work(report, n=n, folder=folder):
            ring = ring_of(tier, folder, 6)
            save(ring, folder)
            save(more(ring, 8), folder, DyingDisk(n))

        assert run_and_die(work)[0] == 77
        text = f"killed before call {n}: {calls[n - 1]}"
        assert newest(folder / "dumps") == (8 if n > renamed else 6), text
        save(ring_of("memory", folder, 1), folder)
        assert newest(folder / "dumps") == 1 and len(list((folder / "dumps").iterdir())) == 1, text
        shutil.rmtree(folder)


@EVERY
def test_power_cut_before_every_single_call(tmp_path, tier, every):
    calls, rng = calls_of(tier, tmp_path / "counted"), np.random.default_rng(0)
    for n in places(calls, every):
        folder = tmp_path / str(n)
        folder.mkdir()
        disk: LosingDisk = LosingPages(10**9)
        disk.names[tmp_path.stat().st_ino] = {folder.name: folder.stat().st_ino}
        ring = ring_of(tier, folder, 6, disk)
        disk.sync_folder(folder)
        save(ring, folder, disk)
        disk.sync_folder(folder)
        more(ring, 8)
        disk.n = len(disk.calls) + n
        if tier == "disk":
            ring.storage.disk = Disk()
        with pytest.raises(PowerCut):
            save(ring, folder, disk)
        after = tmp_path / f"{n} after"
        disk.after_the_cut(folder, after, rng)
        assert newest(after / "dumps") in (6, 8), f"power cut before call {n}: {calls[n - 1]}"
        for path in (folder, after):
            shutil.rmtree(path)


@EVERY
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_every_call_may_be_refused_and_the_dump_before_stays(tmp_path, tier, error, every):
    """Each with one of the errors, or with either: what is made of them does not look at which it was."""
    calls = calls_of(tier, tmp_path / "counted")
    for n in range(1 + (error == errno.EIO and not every), len(calls) + 1, 1 if every else 2):
        folder = tmp_path / str(n)
        ring = ring_of(tier, folder, 6)
        save(ring, folder)
        more(ring, 8)
        with pytest.raises(ResourceError) as caught:
            save(ring, folder, RefusingDisk(n, error))
        assert caught.value.exit_code == 5 and str(tmp_path) in str(caught.value)
        assert newest(folder / "dumps") in (6, 8), f"call {n} refused: {calls[n - 1]}"
        save(more(ring, 10), folder)
        assert newest(folder / "dumps") == 10 and len(list((folder / "dumps").iterdir())) == 1
        shutil.rmtree(folder)


def test_a_full_disk_refuses_a_dump_and_keeps_the_one_before(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", small], capture_output=True).returncode:
        pytest.skip("a file system of 1 MB cannot be mounted here")
    try:
        ring = ring_of("memory", small, 6)
        save(ring, small)
        room = os.statvfs(small).f_bavail * os.statvfs(small).f_frsize
        (small / "ballast").write_bytes(bytes(room - 4096))
        refused(ResourceError, "needed", lambda: save(more(ring, 8), small))
        assert newest(small / "dumps") == 6
        assert [path.name for path in (small / "dumps").iterdir()] == ["dump_000001"]
    finally:
        subprocess.run(["umount", "-l", small], check=True)


def flips(tmp_path, count, seed):
    ring = ring_of("memory", tmp_path, 6)
    path, rng = save(ring, tmp_path), np.random.default_rng(seed)
    files = sorted(path.iterdir())
    sizes = np.cumsum([file.stat().st_size for file in files])
    for place in rng.integers(0, sizes[-1], count):
        which = int(np.searchsorted(sizes, place, "right"))
        file, at = files[which], int(place - (sizes[which - 1] if which else 0))
        content = file.read_bytes()
        file.write_bytes(content[:at] + bytes([content[at] ^ (1 << int(rng.integers(8)))]) + content[at + 1 :])
        text = f"seed {seed}, byte {at} of {file.name}"
        assert any(file.name in line for line in wrong(tmp_path / "dumps")), text
        with refused(DamagedDataError, file.name):
            quiet(lambda: dumps.load(ring, tmp_path / "dumps"))
        file.write_bytes(content)
    assert newest(tmp_path / "dumps") == 6
    print(f"seed {seed}: {count} flips, {count} found")


def test_100_flips_in_a_dump_are_all_found(tmp_path):
    flips(tmp_path, 100, seed=0)


@pytest.mark.slow
def test_2000_flips_in_a_dump_are_all_found(tmp_path):
    flips(tmp_path, 2000, seed=1)


def test_a_file_of_a_dump_cut_grown_or_missing_is_named(tmp_path):
    path, rng = save(ring_of("memory", tmp_path, 6), tmp_path), np.random.default_rng(0)
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        ends = [0, len(content) - 1, *rng.integers(0, len(content), 20).tolist()]
        for new in (*(content[:end] for end in ends), content + b"\0", content * 2):
            file.write_bytes(new)
            assert any(file.name in line for line in wrong(tmp_path / "dumps"))
        file.unlink()
        assert any(file.name in line for line in wrong(tmp_path / "dumps"))
        with refused(DamagedDataError, file.name):
            quiet(lambda: newest(tmp_path / "dumps"))
        file.write_bytes(content)
    assert newest(tmp_path / "dumps") == 6
