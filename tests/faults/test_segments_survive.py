"""Segments under kills, power cuts, flips and full disks: acknowledged frames are not lost, torn ones not read."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import warnings

import numpy as np
import pytest
from disks import CountingDisk, DyingDisk, LosingDisk, PowerCut, RefusingDisk, batch, equal, places, run_and_die
from face import Disk, refused

from rlcli.data import SegmentReader, SegmentWriter, open_segments, verify_segments
from rlcli.errors import DamagedDataError, ResourceError

BATCHES = [batch(seed) for seed in range(3)]
ABOUT = {"env": "Test-v0"}


# the default run takes a part of all bytes, each time the same
EVERY = pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.slow)])


def write_all(folder, disk, report=lambda value: None, *, resume=False, commit_seconds=0.0):
    with SegmentWriter(folder, ABOUT, resume=resume, commit_seconds=commit_seconds, disk=disk) as writer:
        for exact, _ in BATCHES[writer.count :]:
            writer.append(exact)
            report(writer.count)
    report("closed")


def check_and_finish(folder, acknowledged, text):
    """What was acknowledged is there; the rest can be added; the whole then verifies."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not acknowledged and not (folder / "journal.jsonl").exists():
            write_all(folder, Disk())
        else:
            with SegmentWriter(folder, ABOUT, resume=True) as writer:
                assert acknowledged <= writer.count <= len(BATCHES), text
                reader = SegmentReader(folder)
                assert len(reader) == writer.count, text
                assert all(equal(reader.read(i), BATCHES[i][1]) for i in range(len(reader))), text
                for exact, _ in BATCHES[writer.count :]:
                    writer.append(exact)
    reader = open_segments(folder)
    assert reader.verify() == [] and len(reader) == len(BATCHES), text
    assert all(equal(reader.read(i), full) for i, (_, full) in enumerate(BATCHES)), text
    assert sum(path.is_file() for path in folder.iterdir()) == len(BATCHES) + 1, text


# one torn file stands by default for all pieces that it may be torn at
PIECES = pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])


@PIECES
@pytest.mark.parametrize("commit_seconds", [0.0, 3600.0])
def test_killed_before_every_single_call(tmp_path, commit_seconds, every):
    counted = CountingDisk()
    write_all(tmp_path / "whole", counted, commit_seconds=commit_seconds)
    assert {call for call, _ in counted.calls} >= {"create", "reserve", "write", "sync", "sync_folder"}
    for n in places(counted.calls, every):
        folder = tmp_path / str(n)
        code, reported = run_and_die(
            lambda report, n=n, folder=folder: write_all(folder, DyingDisk(n), report, commit_seconds=commit_seconds)
        )
        assert code == 77
        done = max([value for value in reported if value != "closed"], default=0)
        check_and_finish(folder, done, f"killed before call {n}: {counted.calls[n - 1]}")
        shutil.rmtree(folder)


@PIECES
@pytest.mark.parametrize("seed", range(3))
def test_power_cut_before_every_single_call(tmp_path, seed, every):
    counted = CountingDisk()
    write_all(tmp_path / "whole", counted)
    rng = np.random.default_rng(seed)
    for n in places(counted.calls, every):
        folder, disk, reported = tmp_path / f"{n}", LosingDisk(n), [0]
        folder.mkdir()
        disk.names[tmp_path.stat().st_ino] = {folder.name: folder.stat().st_ino}
        writer = SegmentWriter.__new__(SegmentWriter)  # kept, so that its lock can be let go after the cut
        with pytest.raises(PowerCut):
            writer.__init__(folder, ABOUT, disk=disk)
            for exact, _ in BATCHES:
                writer.append(exact)
                reported.append(writer.count)
            writer.close()
        if hasattr(writer, "_journal"):
            writer._journal.close()
        after = tmp_path / f"{n} after"
        disk.after_the_cut(folder, after, rng)
        check_and_finish(after, max(reported), f"seed {seed}, power cut before call {n}: {counted.calls[n - 1]}")


@PIECES
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_every_call_may_be_refused_and_nothing_acknowledged_is_lost(tmp_path, error, every):
    counted = CountingDisk()
    write_all(tmp_path / "whole", counted)
    for n in places(counted.calls, every):
        folder, done = tmp_path / str(n), [0]
        with pytest.raises(ResourceError) as caught:
            write_all(folder, RefusingDisk(n, error), done.append)
        assert caught.value.exit_code == 5 and str(tmp_path) in str(caught.value)
        if error == errno.ENOSPC and counted.calls[n - 1][0] in ("reserve", "write"):
            assert "bytes are needed" in str(caught.value)
        done = [value for value in done if value != "closed"]
        check_and_finish(folder, max(done), f"call {n} refused: {counted.calls[n - 1]}")


def test_a_writer_goes_on_after_the_disk_was_full(tmp_path):
    disk = RefusingDisk(2, call="reserve")
    with SegmentWriter(tmp_path, disk=disk) as writer:
        writer.append(BATCHES[0][0])
        refused(ResourceError, "needed", lambda: writer.append(BATCHES[1][0]))
        assert len(list(tmp_path.glob("*.safetensors"))) == 1
        for exact, _ in BATCHES[1:]:
            writer.append(exact)
    reader = open_segments(tmp_path)
    assert reader.verify() == [] and all(equal(reader.read(i), full) for i, (_, full) in enumerate(BATCHES))


def test_a_really_full_disk_is_refused_with_the_bytes_needed(tmp_path):
    """On a file system of 1 MB, where this process may mount one."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", small], capture_output=True)
    if mounted.returncode:
        pytest.skip("a file system of 1 MB cannot be mounted here")
    try:
        writer = SegmentWriter(small / "data", ABOUT)
        written = 0
        with refused(ResourceError, "needed"):
            while True:
                writer.append(batch(written, steps=4000)[0])
                written += 1
        writer._journal.close()
        assert written >= 3
        reader = SegmentReader(small / "data")
        assert len(reader) == written
        assert all(equal(reader.read(i), batch(i, steps=4000)[1]) for i in range(written))
    finally:
        subprocess.run(["umount", small], check=True)


def test_a_read_only_folder_is_refused(tmp_path):
    """By the file system where one may be mounted, by its mode where that means something to this user."""
    folder = tmp_path / "folder"
    folder.mkdir()
    mounted = not subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", folder], capture_output=True).returncode
    if not mounted and os.geteuid() == 0:
        pytest.skip("nothing is read-only for this user")
    folder.chmod(0o500) if not mounted else None
    try:
        with refused(ResourceError, "write") as caught:
            SegmentWriter(folder / "data")
        assert caught.value.exit_code == 5
    finally:
        if mounted:
            subprocess.run(["umount", folder], check=True)
        folder.chmod(0o700)


def whole(folder):
    write_all(folder, Disk())
    return sorted(folder.iterdir())


def is_found(folder, text):
    """Seen by verify, and no read gives a batch that was not written."""
    assert verify_segments(folder), text
    try:
        reader = SegmentReader(folder, check_sizes=False)
    except DamagedDataError as error:
        assert str(folder) in str(error)
        return
    for i in range(len(reader)):
        try:
            found = reader.read(i)
        except DamagedDataError as error:
            assert str(folder) in str(error)
        else:
            assert equal(found, BATCHES[i][1]), text


@EVERY
def test_a_flip_of_any_byte_in_any_file_is_found(tmp_path, step):
    rng, tried = np.random.default_rng(0), 0
    for path in whole(tmp_path / "data"):
        content = path.read_bytes()
        for at in range(int(rng.integers(step)), len(content), step):
            tried += 1
            path.write_bytes(content[:at] + bytes([content[at] ^ (1 << int(rng.integers(8)))]) + content[at + 1 :])
            is_found(tmp_path / "data", f"seed 0, byte {at} of {path.name}")
        path.write_bytes(content)
    assert verify_segments(tmp_path / "data") == []
    print(f"{tried} flips, {tried} found")


@EVERY
def test_a_file_cut_anywhere_grown_or_missing_is_found(tmp_path, step):
    for path in whole(tmp_path / "data"):
        content = path.read_bytes()
        for end in range(0, len(content), step):
            path.write_bytes(content[:end])
            is_found(tmp_path / "data", f"{path.name} cut at {end}")
        for more in (b"\0", b"x" * 5000, b"\n", content):
            path.write_bytes(content + more)
            is_found(tmp_path / "data", f"{path.name} grown by {len(more)}")
        path.write_bytes(content)
        path.rename(tmp_path / "away")
        if path.suffix == ".safetensors":
            is_found(tmp_path / "data", f"{path.name} missing")
            with refused(DamagedDataError, path.name):
                open_segments(tmp_path / "data")
        else:
            with refused(DamagedDataError, "journal"):
                open_segments(tmp_path / "data")
        (tmp_path / "away").rename(path)


def test_records_exchanged_doubled_or_dropped_are_found(tmp_path):
    whole(tmp_path / "data")
    journal = tmp_path / "data" / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    for new in (
        [lines[0], lines[2], lines[1], *lines[3:]],
        [*lines[:2], lines[1], *lines[2:]],
        [*lines[:2], *lines[3:]],
        lines[:-1],
        lines[:-2],
        lines[1:],
        lines[:1],
        [],
    ):
        journal.write_bytes(b"".join(new))
        is_found(tmp_path / "data", f"{len(new)} lines")
