"""A ring's journal that has grown long is replaced by a short one that says the same: at no moment is anything lost."""

from __future__ import annotations

import errno
import shutil

import numpy as np
import pytest
from disks import CountingDisk, DyingDisk, PowerCut, RefusingDisk, run_and_die
from face import refused
from rings import LosingPages, batch, batches_in, begin, equal, live, quiet, reference, wrong
from test_rows_survive import check_and_finish, let_go, write_all

from rlcli.data.files.journal import Journal
from rlcli.data.storages import row_journal
from rlcli.data.storages.row_journal import Committed
from rlcli.errors import ResourceError


@pytest.fixture(autouse=True)
def at_every_commit(monkeypatch):
    monkeypatch.setattr(row_journal, "LONG", 1)
    monkeypatch.setattr(row_journal, "GROWTH", 1)


@pytest.fixture
def calls(tmp_path):
    disk = CountingDisk()
    let_go(write_all(tmp_path / "counted", disk))
    renames = [i for i, (call, _) in enumerate(disk.calls, 1) if call == "rename"]
    assert len(renames) > 8
    around = {n + by for n in renames[3:6:2] for by in range(-4, 3)}
    return {n: disk.calls[n - 1] for n in sorted(around) if n <= len(disk.calls)}


def test_killed_around_the_exchange_of_journals(tmp_path, calls):
    for n, call in calls.items():
        folder = tmp_path / str(n)
        code, reported = run_and_die(lambda report, n=n, folder=folder: write_all(folder, DyingDisk(n), report))
        assert code == 77
        check_and_finish(folder, max(reported, default=0), f"killed before call {n}: {call}")
        assert not (folder / "journal.jsonl.new").exists()
        shutil.rmtree(folder)


def test_power_cut_around_the_exchange_of_journals(tmp_path, calls):
    rng = np.random.default_rng(0)
    for n, call in calls.items():
        folder, disk, reported = tmp_path / f"{n}", LosingPages(n), [0]
        folder.mkdir()
        with pytest.raises(PowerCut) as cut:
            write_all(folder, disk, reported.append)
        del cut
        after = tmp_path / f"{n} after"
        disk.after_the_cut(folder, after, rng)
        check_and_finish(after, max(reported), f"power cut before call {n}: {call}")


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_refused_exchange_leaves_the_commit_before_it_and_the_ring_goes_on(tmp_path, calls, error):
    """Around one exchange with one error, around the other with the other: it is not looked at which it was."""
    half = len(calls) // 2
    for n, (call, name) in list(calls.items())[half:] if error == errno.EIO else list(calls.items())[:half]:
        folder, done = tmp_path / str(n), [0]
        disk = RefusingDisk(n, error)
        try:
            ring = write_all(folder, disk, done.append)
        except ResourceError:  # of the commit itself
            check_and_finish(folder, max(done), f"call {n} refused: {call} {name}")
            continue
        assert equal(live(begin_again(ring, folder)), live(ring)), f"call {n} refused: {call} {name}"


def begin_again(ring, folder):
    let_go(ring)
    return quiet(lambda: begin(folder))


def test_a_journal_does_not_grow_with_the_time_that_a_ring_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(row_journal, "LONG", 4000)
    monkeypatch.setattr(row_journal, "GROWTH", 2)
    ring, sizes = begin(tmp_path / "rows"), []
    for i in range(200):
        ring.extend(batch(i))
        sizes.append((tmp_path / "rows" / "journal.jsonl").stat().st_size)
    assert max(sizes) < 4500
    assert len(list((tmp_path / "rows").glob("state-*"))) == 1
    for n in range(3):
        again = begin_again(ring, tmp_path / "rows")
        assert batches_in(again) == 200 + n and equal(live(again), reference(200 + n, "exact"))
        again.extend(batch(200 + n))
        ring = again
    ring.storage.close(ring.content)
    said = Committed(tmp_path / "rows" / "journal.jsonl")
    assert said.closed and said.start > 150 and wrong(tmp_path / "rows") == []


def test_a_journal_that_was_exchanged_under_a_second_writer_is_not_written_by_both(tmp_path):
    path = tmp_path / "journal.jsonl"
    from rlcli.data.files.disk import Disk

    class Slow(Disk):
        """Between opening and locking, the first writer exchanges the file and ends."""

        def open_to_append(self, path):
            fd = super().open_to_append(path)
            first.replace({"kind": "short"})
            first.close()
            return fd

    first = Journal(path, Disk())
    first.append({"kind": "header"}, {"kind": "commit"})
    refused(ResourceError, "writing", lambda: Journal(path, Slow()))
    assert Journal(path, Disk()).end.records == 1
