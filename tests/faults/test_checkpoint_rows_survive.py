"""Checkpoints that hold a buffer: its rows are files of their own, written once, and each one has its own copy."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from disks import CountingDisk, DyingDisk, run_and_die
from face import Disk, refused
from rings import STEPS, batch, equal, live, quiet, reference

from rlcli.data import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer
from rlcli.data.files.row_files import SavedRows
from rlcli.errors import DamagedDataError
from rlcli.runs import checkpoint


def buffer_of(batches=0, tier="memory", folder=None):
    options = {} if tier == "memory" else {"scratch_dir": folder / "rows", "commit_seconds": 0.0}
    kind = LazyTensorStorage if tier == "memory" else LazyMemmapStorage
    buffer = TensorDictReplayBuffer(storage=kind(STEPS * 2, ndim=2, **options), batch_size=8, next_obs="exact")
    return more(buffer, batches)


def more(buffer, batches):
    while buffer.ring.cursor < 4 * batches:
        buffer.extend(batch(buffer.ring.cursor // 4))
    return buffer


def save(buffer, folder, disk=None, ranks=1):
    """Save as each rank of so many, rank 0 last."""
    for rank in reversed(range(ranks)):
        state, ring = buffer.state_and_ring()
        path = checkpoint.save(
            folder, {"buffer": state, "update": {"rank": rank}}, number=buffer.ring.cursor, may_be_infinite=("buffer",),
            ring=ring, disk=disk, rank=rank, ranks=ranks, config={"learner": {"world_size": ranks}},
        )  # fmt: skip
    return path


def newest(folder, ranks=1):
    """Batches in the newest checkpoint that verifies; what each rank's buffer gets from it is compared."""
    newest = checkpoint.load_latest(folder)
    for rank in range(ranks):
        found = checkpoint.load(newest.path, rank, ranks)
        buffer = buffer_of()
        buffer.load_state_dict(found.state["buffer"])
        count = buffer.ring.cursor // 4
        assert found.manifest["number"] == 4 * count and equal(live(buffer.ring), reference(count, "exact"))
        assert found.whole and found.state["update"]["rank"] == rank
    return count


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_a_checkpoint_holds_the_rows_without_a_copy_of_them_in_its_tensors(tmp_path, tier):
    buffer = buffer_of(0, tier, tmp_path)
    for count in (0, 3, 6, 7, 13):
        path = save(more(buffer, count), tmp_path / "checkpoints")
        assert newest(tmp_path / "checkpoints") == count
        held = checkpoint.load(path).state["buffer"]["rows"]["columns"]
        assert isinstance(held, SavedRows) and len(held) == len(buffer)
        assert not [name for name in (path / "tensors.safetensors").read_bytes().split(b'"') if b"columns" in name]
    kept = checkpoint.FOLDERS.paths(tmp_path / "checkpoints")
    inodes = [{file.stat().st_ino for file in path.glob("rows-*")} for path in kept]
    assert len(kept) == 2 and (tier == "disk" or not inodes[0] & inodes[1])


class Written(Disk):
    rows = 0

    def write_file(self, path, chunks, **options):
        stamp = super().write_file(path, chunks, **options)
        self.rows += stamp.size if path.name.startswith("rows-") else 0
        return stamp


def test_from_the_third_checkpoint_on_only_what_is_new_since_the_last_but_one_is_written(tmp_path):
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(2000), batch_size=8, next_obs="exact")
    sizes = []
    for _ in range(8):
        for _ in range(4):
            buffer.extend(batch(buffer.ring.cursor // 8))
        save(buffer, tmp_path, disk := Written())
        sizes.append(disk.rows)
    width = sum(field.width for field in buffer.storage.fields.values())
    file = 128 * width  # rows of a file of this ring
    assert all(size <= 2 * 4 * 8 * width + 2 * file for size in sizes[2:]) and sum(sizes) > sizes[-1]
    assert newest_rows(tmp_path) == len(buffer)


def newest_rows(folder):
    return len(checkpoint.load_latest(folder).state["buffer"]["rows"]["columns"])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_before_any_call_the_checkpoint_before_is_whole(tmp_path, step, ranks):
    def work(folder, disk):
        buffer = buffer_of(5)
        for count in (6, 7):
            save(more(buffer, count), folder, ranks=ranks)
        save(more(buffer, 9), folder, disk, ranks)

    work(tmp_path / "counted", disk := CountingDisk())
    assert {"link", "rename", "write"} <= {call for call, _ in disk.calls}
    renamed = disk.calls.index(("rename", "checkpoint_000003")) + 1
    for n in {*range(1, len(disk.calls) + 1, step), renamed, renamed + 1}:
        folder = tmp_path / str(n)
        assert run_and_die(lambda _, n=n, folder=folder: work(folder, DyingDisk(n)))[0] == 77
        text = f"killed before call {n}: {disk.calls[n - 1]}"
        assert newest(folder, ranks) == (9 if n > renamed else 7), text
        save(buffer_of(4), folder)
        assert newest(folder) == 4 and len([*folder.iterdir()]) == 2, text
        shutil.rmtree(folder)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_flip_in_any_file_falls_back_one_checkpoint_and_is_mended_by_the_next(tmp_path, ranks):
    buffer, rng = buffer_of(5), np.random.default_rng(0)
    for count in (5, 6, 7, 8):
        path = save(more(buffer, count), tmp_path, ranks=ranks)
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        content = file.read_bytes()
        for at in rng.integers(0, len(content), 4).tolist():
            file.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
            with pytest.warns(UserWarning, match=f"skipped.*{file.name}"):
                assert newest(tmp_path, ranks) == 7
            assert checkpoint.FOLDERS.verify(path) is not None
        file.write_bytes(content)
    for file in path.rglob("rows-*"):
        content = file.read_bytes()
        file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    save(more(buffer, 9), tmp_path, ranks=ranks)
    again = save(more(buffer, 9), tmp_path, ranks=ranks)  # would link to the damaged one, had it not compared the bytes
    assert checkpoint.FOLDERS.verify(again) is None and newest(tmp_path, ranks) == 9


def test_a_file_of_rows_that_is_missing_or_not_named_is_refused(tmp_path):
    path = save(buffer_of(6), tmp_path)
    file = sorted(path.glob("rows-*"))[0]
    file.rename(tmp_path / "away")
    refused(DamagedDataError, file.name, lambda: quiet(lambda: checkpoint.load(path)))
    assert file.name in checkpoint.FOLDERS.verify(path)
