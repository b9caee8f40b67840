"""A journal that is gone or was cut: what it acknowledged stays on the disk, and whoever goes on is refused."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest
from answers import is_a_sentence
from disks import batch
from face import Disk, refused
from rings import batch as rows
from rings import begin, quiet, wrong

from rlcli import verify
from rlcli.build import resume
from rlcli.data import SegmentReader, SegmentWriter, open_buffer
from rlcli.data.files.journal import Journal
from rlcli.errors import DamagedDataError, ResourceError
from rlcli.inspection.folder import inspect


def lines(journal: Path, keep: int) -> None:
    """Cut a journal to its first records, none of them torn."""
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:keep]))


def tear_header(journal: Path) -> None:
    journal.write_bytes(journal.read_bytes()[:20])


CUTS = {
    "missing": Path.unlink,
    "empty": lambda journal: lines(journal, 0),
    "torn header": tear_header,
    "header only": lambda journal: lines(journal, 1),
    "3 lines": lambda journal: lines(journal, 3),
    "the last segment": lambda journal: lines(journal, 8),
}


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.suffix != ".jsonl"
    }


# ---- collected frames ----------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("collected") / "t"
    return folder


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_a_collection_whose_journal_was_cut_is_refused_and_loses_nothing(rlcli, collected, tmp_path, cut):
    if not collected.exists():
        assert rlcli("collect", f"run.dir={collected}", "total_frames=1024").code == 0
    shutil.copytree(collected, tmp_path / "t")
    data = tmp_path / "t" / "data"
    cut(data / "journal.jsonl")
    before = files(data)
    is_a_sentence(rlcli("resume", "t"), 4, "journal.jsonl")
    assert files(data) == before
    for folder in ("t", "t/data"):
        answer = rlcli("verify", folder)
        assert answer.code == 4 and "damaged  " in answer.out and "journal.jsonl" in answer.err, answer


def test_frames_that_the_run_had_saved_are_missed_by_every_reader(rlcli, collected, tmp_path):
    """Cut by exactly its last commit, a journal looks as after a crash: the closing report knows better."""
    if not collected.exists():
        assert rlcli("collect", f"run.dir={collected}", "total_frames=1024").code == 0
    shutil.copytree(collected, tmp_path / "t")
    data, said = tmp_path / "t" / "data", "1,024 were saved when the run ended"
    for state in data.glob("state-*"):
        state.unlink()
    lines(data / "journal.jsonl", 8)
    segments = list(data.glob("0*.safetensors"))
    assert len(segments) == 8, segments
    assert said in SegmentReader(data).lost
    for folder in (tmp_path / "t", data):
        with pytest.raises(DamagedDataError, match=said):
            open_buffer(folder)
        with pytest.raises(DamagedDataError, match=said):
            open_buffer(folder, max_size=100)
        assert any(said in file.why for file in verify(folder) if file.state == "damaged")
        assert any(said in notice for found in inspect(folder) for notice in found.notices)
    is_a_sentence(rlcli("resume", "t"), 4, said)
    for folder in ("t", "t/data"):
        answer = rlcli("verify", folder)
        assert answer.code == 4 and said in answer.out, answer
    with pytest.raises(DamagedDataError, match=said):
        SegmentWriter(data, resume=True)
    for path in data.glob("0*.safetensors"):
        path.unlink()
    lines(data / "journal.jsonl", 0)
    for look in (open_buffer, resume):
        with pytest.raises(DamagedDataError, match=said):
            look(tmp_path / "t")


def test_a_folder_that_is_not_the_runs_own_is_not_held_to_its_report(collected, rlcli, tmp_path):
    if not collected.exists():
        assert rlcli("collect", f"run.dir={collected}", "total_frames=1024").code == 0
    shutil.copytree(collected, tmp_path / "t")
    with SegmentWriter(tmp_path / "t" / "mine") as writer:
        writer.append(batch(0)[0])
    assert SegmentReader(tmp_path / "t" / "mine").lost is None
    assert rlcli("verify", "t").code == 0


@pytest.fixture
def committed(tmp_path):
    """5 commits, each of two segments and a state, by a writer that was killed."""
    with pytest.raises(KeyboardInterrupt), SegmentWriter(tmp_path / "data", commit_seconds=float("inf")) as writer:
        for i in range(10):
            writer.append(batch(i)[0])
            if i % 2:
                writer.commit(state=[b"state"])
        raise KeyboardInterrupt
    return tmp_path / "data"


@pytest.mark.parametrize("keep", [1, 2, 3, 4, 5, 6, 7, 8, 9])
def test_a_journal_that_lost_a_commit_is_refused_wherever_it_was_cut(committed, keep):
    before = files(committed)
    lines(committed / "journal.jsonl", keep)
    refused(DamagedDataError, "journal.jsonl", lambda: SegmentWriter(committed, resume=True))
    assert files(committed) == before
    assert SegmentReader(committed).lost
    refused(DamagedDataError, "journal.jsonl", lambda: open_buffer(committed))


def test_what_one_interrupted_commit_left_is_moved_aside(committed):
    """The state is on the disk before its record: a crash between the two is no cut."""
    journal = committed / "journal.jsonl"
    whole = files(committed)
    with SegmentWriter(committed, resume=True, commit_seconds=float("inf")) as writer:
        said = journal.read_bytes()
        writer.append(batch(10)[0])
        left = files(committed).keys() - whole.keys()
        (committed / "state-00000011.safetensors").write_bytes(b"state")
        writer._journal.close()
    journal.write_bytes(said)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again = SegmentWriter(committed, resume=True)
    assert any("00000010.safetensors" in str(w.message) and "aside-0001" in str(w.message) for w in caught)
    assert sorted(p.name for p in (committed / "aside-0001").iterdir()) == [*left, "state-00000011.safetensors"]
    assert again.count == 10
    again.append(batch(10)[0])
    again.close()
    assert SegmentReader(committed).verify() == []


# ---- rows of a storage ---------------------------------------------------------------------------------------------
@pytest.fixture
def kept(tmp_path):
    """8 commits of a ring of 20 steps, by a process that was killed."""
    ring = begin(tmp_path / "rows")
    for i in range(8):
        ring.extend(rows(i))
    ring.storage._journal.abandon()
    return tmp_path / "rows"


@pytest.mark.parametrize("keep", range(9))
def test_rows_whose_journal_was_cut_are_refused_and_lose_nothing(kept, keep):
    before = files(kept)
    lines(kept / "journal.jsonl", keep) if keep else (kept / "journal.jsonl").unlink()
    assert wrong(kept)
    refused(DamagedDataError, "journal.jsonl", lambda: begin(kept))
    assert files(kept) == before
    with pytest.raises(DamagedDataError):
        open_buffer(kept)


def test_rows_of_an_interrupted_first_commit_are_moved_aside(tmp_path):
    folder = tmp_path / "rows"
    ring = begin(folder)
    ring.extend(rows(0))
    ring.storage._journal.abandon()
    before = files(folder)
    lines(folder / "journal.jsonl", 1)
    again = quiet(lambda: begin(folder))
    again.extend(rows(0))
    assert files(folder / "aside-0001") == before
    again.storage.close(again.contents.encoded)
    assert wrong(folder) == []


# ---- a journal that was closed -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "write", [lambda journal: journal.append({"n": 1}), Journal.settle, Journal.replace],
    ids=["append", "settle", "replace"],
)  # fmt: skip
def test_a_closed_journal_leaves_the_file_alone_that_got_its_descriptor(tmp_path, write):
    journal = Journal(tmp_path / "journal.jsonl", Disk())
    fd = journal._lock.fd
    journal.append({"n": 0})
    said = journal.path.read_bytes()
    journal.close()
    with open(tmp_path / "other", "w+b") as other:
        assert other.fileno() == fd
        other.write(b"of somebody else")
        other.flush()
        refused(ResourceError, "write here", lambda: write(journal))
    assert (tmp_path / "other").read_bytes() == b"of somebody else" and journal.path.read_bytes() == said
