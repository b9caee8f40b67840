"""What a disk that refuses says: what, where, how much was needed and is free, and what to do."""

import errno
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from face import Disk, refused
from tensordict import TensorDict

from rlcli.data.files import disk as disks
from rlcli.data.files.disk import shortage
from rlcli.errors import ResourceError


def refuse_with(number):
    class Refusing(Disk):
        def at(self, call, path):
            if call in ("create", "mkdir", "reserve", "write"):
                raise OSError(number, os.strerror(number))

    return Refusing()


def counted(monkeypatch, blocks, files, all_files=1000):
    found = SimpleNamespace(f_bavail=blocks, f_frsize=4096, f_favail=files, f_files=all_files)
    monkeypatch.setattr(disks.os, "statvfs", lambda path: found)


def said(disk, path, data=b"x" * 5000):
    with pytest.raises(ResourceError) as error:
        disk.write_file(path, [data])
    return str(error.value)


def test_without_inodes_the_sentence_is_about_files(tmp_path, monkeypatch):
    counted(monkeypatch, 100, 0)
    text = said(refuse_with(errno.ENOSPC), tmp_path / "new" / "file")
    assert "the disk is full" in text and "0 of 1,000 inodes are free, and 409,600 bytes" in text
    assert "bytes are needed" not in text and f"df -i {tmp_path}" in text


def test_without_bytes_it_is_about_bytes(tmp_path, monkeypatch):
    counted(monkeypatch, 1, 7)
    text = said(refuse_with(errno.ENOSPC), tmp_path / "file")
    assert "5,000 bytes are needed and 4,096 are free" in text and "run.dir=FOLDER" in text and "inode" not in text


def test_a_file_system_that_counts_no_files_is_never_out_of_them(tmp_path, monkeypatch):
    counted(monkeypatch, 1, 0, all_files=0)
    assert "5,000 bytes are needed and 4,096 are free" in said(refuse_with(errno.ENOSPC), tmp_path / "file")


def test_what_is_free_is_not_said_to_be_too_little_where_it_is_not(tmp_path, monkeypatch):
    counted(monkeypatch, 100, 7)
    text = said(refuse_with(errno.ENOSPC), tmp_path / "file")
    assert "409,600 are free, but the file system does not give them" in text


def test_where_nothing_is_known_to_be_needed_no_number_is_made_up(tmp_path, monkeypatch):
    counted(monkeypatch, 1, 7)
    with pytest.raises(ResourceError) as error:
        refuse_with(errno.ENOSPC).make_folder(tmp_path / "new")
    assert "(4,096 bytes are free)" in str(error.value) or ": 4,096 bytes are free." in str(error.value)
    assert "needed" not in str(error.value)
    monkeypatch.setattr(disks.os, "statvfs", lambda path: (_ for _ in ()).throw(OSError()))
    assert shortage(tmp_path)[0] == "no more fits"


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EDQUOT, ("the disk is full", "quota")),
        (errno.EFBIG, ("5,000 bytes are needed", "ulimit -f")),
        (errno.EROFS, ("cannot write", "Read-only", "run.dir=")),
        (errno.EACCES, ("Permission denied", "write permission")),
        (errno.EPERM, ("not permitted", "write permission")),
        (errno.ENOENT, ("folder is gone",)),
        (errno.ENOTDIR, ("a file stands where a folder should be",)),
        (errno.EIO, ("the disk itself fails",)),
        (errno.EMFILE, ("too many files", "ulimit -n")),
        (errno.ENAMETOOLONG, ("shorter",)),
        (errno.ESTALE, ("handle",)),
    ],
)
def test_every_refusal_says_what_where_and_what_to_do(tmp_path, number, words):
    text = said(refuse_with(number), tmp_path / "file")
    assert str(tmp_path / "file") in text and text.endswith(".")
    for word in words:
        assert word in text


def test_a_disk_too_small_for_what_comes_is_refused_beforehand(tmp_path, monkeypatch):
    refused(ResourceError, "10,000,000,000,000,000", lambda: Disk().require(tmp_path, 10**16))


def test_on_a_real_file_system_of_a_few_files(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    how = "size=1m,nr_inodes=4"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", how, "none", small], capture_output=True).returncode:
        pytest.skip("a file system of four files cannot be mounted here")
    try:
        texts = []
        for number in range(5):
            try:
                Disk().write_file(small / str(number), [b"x"])
            except ResourceError as error:
                texts.append(str(error))
        assert len(texts) == 2 and all("0 of 4 inodes are free" in text for text in texts)
        refused(ResourceError, "inodes", lambda: Disk().make_folder(small / "folder"))
    finally:
        subprocess.run(["umount", small], check=True)


def test_files_that_end_with_their_process_are_not_said_to_be_of_a_run():
    here = shortage(Path("/dev/shm/rlcli-rows-3f09c1aa-4711-0/rows-00000000.0.bin"), 1 << 60)[1]
    assert "LazyMemmapStorage(max_size)" in here and "run.dir" not in here
    there = shortage(Path("/tmp/rlcli-rows-x1/rows-00000000.0.bin"), 1 << 60)[1]
    assert "TMPDIR=FOLDER" in there and "run.dir" not in there


@pytest.mark.parametrize("call", ["mkdir", "pwrite", "posix_fallocate", "replace"])
def test_what_the_system_refuses_a_shared_buffer_is_said_in_a_sentence(monkeypatch, call):
    def refuse(*args, **options):
        raise OSError(errno.ENOSPC, "full")

    from rlcli.data import LazyTensorStorage, ReplayBuffer

    with ReplayBuffer(storage=LazyTensorStorage(10), shared=True) as rb:  # its kernels are compiled, and kept on disk
        rb.extend(TensorDict({"x": torch.zeros(3)}, [3]))
    with monkeypatch.context() as patch, refused(ResourceError, "disk full"):
        patch.setattr(os, call, refuse)
        rb = ReplayBuffer(storage=LazyTensorStorage(10), shared=True)
        rb.extend(TensorDict({"x": torch.zeros(3)}, [3]))
