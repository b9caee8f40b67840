"""Files that are sealed, and say what nobody of us writes: refused by name, before a number in them is used."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from answers import is_a_sentence
from damages import write
from face import open_run, refused
from tensordict import TensorDict

from rlcli.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, SegmentReader, SegmentWriter, open_buffer
from rlcli.data.files.disk import digest_of
from rlcli.data.files.sealed_folder import sealed
from rlcli.errors import DamagedDataError, ResourceError
from rlcli.processes.lock import ProcessLock
from rlcli.runs import checkpoint
from rlcli.runs.folder import locked, read_holder


def steps(count: int = 40) -> TensorDict:
    nexts = {"observation": torch.rand(count, 3), "done": torch.zeros(count, 1, dtype=torch.bool)}
    return TensorDict({"observation": torch.rand(count, 3), "next": nexts}, [count])


def seal_again(path: Path, change) -> None:
    """Change a manifest as whoever made it could."""
    body = json.loads(path.read_bytes())
    del body["seal"]
    change(body)
    write(path, sealed(body))


def write_journal(path: Path, change) -> None:
    """Change the records of a journal, and make their checksums anew."""
    found = [json.loads(line[33:]) for line in path.read_bytes().splitlines()]
    change(found)
    out, digest = [], ""
    for record in found:
        text = json.dumps(record).encode()
        digest = digest_of(digest.encode(), text)
        out.append(digest.encode() + b" " + text + b"\n")
    write(path, b"".join(out))


# ---- dumps and checkpoints ------------------------------------------------------------------------------------------
@pytest.fixture
def dump(tmp_path):
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    buffer.extend(steps())
    return buffer.dumps(tmp_path / "dumps")


def put(*path, value):
    def change(body) -> None:
        for name in path[:-1]:
            body = body[name]
        body[path[-1]] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        put("rows", -1, "stride", value=100_000),
        put("rows", -1, "stride", value=10**12),
        put("rows", 0, "start", value=-8),
        put("rows", 0, "first", value=10**15),
        put("rows", 0, "packed", value=[]),
        put("fields", 0, 1, value="load"),
        put("fields", 0, 1, value="float64"),
        put("fields", 0, 2, value=[10**9]),
        put("capacity", value=10**30),
        put("capacity", value=-5),
        put("lanes", value="x"),
        put("ndim", value=0),
        put("max_size", value=1),
        put("unknown", value=1),
        put("created", value=None),
        put("sequence", value=-1),
        put("files", value=[]),
        put("version", value=1),
    ],
)
def test_a_sealed_manifest_of_nonsense_is_refused(rlcli, dump, change):
    """A stride beyond the file gave rows of foreign memory, and a larger one ended the process."""
    seal_again(dump / "manifest.json", change)
    refused(DamagedDataError, "manifest.json", lambda: open_buffer(dump.parent))
    is_a_sentence(rlcli("verify", str(dump.parent)), 4, "manifest.json")


@pytest.mark.parametrize("change", [put("number", value=-5), put("versions", value=[1]), put("config", value="x")])
def test_a_sealed_checkpoint_of_nonsense_is_refused(tmp_path, change):
    path = checkpoint.save(tmp_path, {"weight": torch.ones(3)}, number=1)
    seal_again(path / "manifest.json", change)
    refused(DamagedDataError, "manifest.json", lambda: checkpoint.load_latest(tmp_path))


def test_a_checkpoint_without_its_manifest_is_damaged(rlcli, tmp_path):
    path = checkpoint.save(tmp_path / "c", {"weight": torch.ones(3)}, number=1)
    (path / "manifest.json").unlink()
    is_a_sentence(rlcli("verify", str(tmp_path)), 4, "manifest.json")


def test_a_checkpoint_that_is_a_link_is_unlinked_and_never_followed(tmp_path):
    """Pruning it ended every later save of the run."""
    path = checkpoint.save(tmp_path / "c", {"weight": torch.ones(3)}, number=1)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    for number in (2, 3, 4):
        checkpoint.save(tmp_path / "c", {"weight": torch.ones(3)}, number=number)
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["checkpoint_000003", "checkpoint_000004"]
    assert checkpoint.FOLDERS.verify(tmp_path / "elsewhere") is None


# ---- journals ------------------------------------------------------------------------------------------------------
RECORDS = {
    "no kind": lambda found: found[1].pop("kind"),
    "an unknown kind": put(1, "kind", value="segmnt"),
    "a kind of another type": put(1, "kind", value=["segment"]),
    "frames below zero": put(1, "frames", value=-3),
    "more frames than rows": put(1, "frames", value=10**15),
    "another number": put(1, "sequence", value=7),
    "a dtype that is a function": put(1, "layout", "observation", "dtype", value="load"),
    "metadata of another type": put(0, "metadata", value=3),
    "an older version": put(0, "version", value=1),
    "a second header": lambda found: found.insert(1, found[0]),
    "fewer frames at its end": put(-1, "frames", value=1),
}


@pytest.mark.parametrize("change", RECORDS.values(), ids=RECORDS)
def test_a_journal_of_segments_with_nonsense_is_refused_and_nothing_is_taken_away(tmp_path, change):
    with SegmentWriter(tmp_path / "data") as writer:
        writer.append(steps())
        writer.append(steps())
    write_journal(tmp_path / "data" / "journal.jsonl", change)
    before = sorted(p.name for p in (tmp_path / "data").iterdir())
    for read in (SegmentReader, open_buffer, lambda folder: SegmentWriter(folder, resume=True)):
        with refused(DamagedDataError, "journal.jsonl"):
            read(tmp_path / "data")
    assert sorted(p.name for p in (tmp_path / "data").iterdir()) == before


ROWS = {
    "first below zero": put(1, "first", value=-1),
    "first beyond": put(1, "first", value=39),
    "a capacity of another ring": put(0, "capacity", value=10**15),
    "no power of two": put(0, "segment_rows", value=3),
    "more dims": put(0, "ndim", value=99),
    "no dims": put(0, "ndim", value=None),
    "a dtype that is a function": put(0, "fields", 0, 1, value="load"),
    "an unknown kind": put(1, "kind", value="comit"),
    "rows beyond a segment": put(1, "pieces", 0, 3, value=10**9),
    "a segment that is not there": put(1, "pieces", 0, 0, value=10**9),
    "an older version": put(0, "version", value=2),
    "a second header": lambda found: found.insert(1, found[0]),
    "a header in the middle": lambda found: found.insert(2, found[0]),
}


@pytest.mark.parametrize("change", ROWS.values(), ids=ROWS)
def test_a_journal_of_rows_with_nonsense_is_refused_and_nothing_is_taken_away(tmp_path, change):
    storage = LazyMemmapStorage(100, scratch_dir=tmp_path / "rows", commit_seconds=0)
    buffer = ReplayBuffer(storage=storage, batch_size=4)
    buffer.extend(steps())
    storage.close(buffer.ring.content)
    write_journal(tmp_path / "rows" / "journal.jsonl", change)
    before = sorted(p.name for p in (tmp_path / "rows").iterdir())
    with refused(DamagedDataError, "journal.jsonl"):
        LazyMemmapStorage(100, scratch_dir=tmp_path / "rows", resume=True)
    refused(DamagedDataError, "journal.jsonl", lambda: open_buffer(tmp_path / "rows"))
    assert sorted(p.name for p in (tmp_path / "rows").iterdir()) == before


def test_a_state_that_leads_out_of_the_index_is_refused(tmp_path):
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    buffer.extend(steps())
    state = buffer.state_dict()
    for name, row in (("trajs", 2), ("runs", 2), ("runs", 4), ("lanes", 1)):
        broken = {**state["rows"]["ring"]["index"], name: state["rows"]["ring"]["index"][name].clone()}
        broken[name][row] = 10**6
        ring = {**state["rows"]["ring"], "index": broken}
        other = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        with pytest.raises(ValueError, match=r"expected|lanes|run|begins|live"):
            other.load_state_dict({**state, "rows": {**state["rows"], "ring": ring}})


# ---- a run's own files ---------------------------------------------------------------------------------------------
def test_both_states_of_a_collection_are_verified(rlcli, tmp_path):
    with SegmentWriter(tmp_path / "data", commit_seconds=float("inf")) as writer:
        for _ in range(3):
            writer.append(steps())
            writer.commit(state=[b"state"])
    for path in sorted((tmp_path / "data").glob("state-*")):
        path.write_bytes(b"stale")
        is_a_sentence(rlcli("verify", str(tmp_path)), 4, path.name)
        path.write_bytes(b"state")
    assert rlcli("verify", str(tmp_path)).code == 0


@pytest.mark.parametrize("resumed", [[1, 2], "x", [{"when": 3}], {}])
def test_a_run_file_of_other_types_is_damaged(rlcli, tmp_path, resumed):
    assert rlcli("collect", "run.dir=r", "total_frames=256").code == 0
    info = json.loads(Path("r/run.json").read_bytes())
    Path("r/run.json").write_text(json.dumps({**info, "resumed": resumed}))
    is_a_sentence(rlcli("resume", "r", "total_frames=512"), 4, "run.json", "resumed")


@pytest.mark.parametrize("content", [b"[" * 100_000, b"[1]", b'{"pid": "x"}', b"\xff", b'{"pid": 1e999}'])
def test_the_text_of_a_lock_is_nobody_s_where_it_cannot_be_read(tmp_path, content):
    (tmp_path / "lock").write_bytes(content)
    assert read_holder(tmp_path) is None
    with locked(tmp_path):
        assert read_holder(tmp_path).pid == os.getpid()


def test_a_pipe_in_a_file_s_place_is_not_waited_for(rlcli, tmp_path):
    (tmp_path / "r").mkdir()
    os.mkfifo(tmp_path / "r" / "run.json")
    is_a_sentence(rlcli("resume", "r"), 4, "run.json", "regular file")
    with pytest.raises(DamagedDataError):
        open_run(tmp_path / "r")


def test_a_run_folder_whose_name_is_no_text_is_resumed(rlcli, tmp_path):
    """Its name is in the report: a surrogate that no encoding has."""
    assert rlcli("collect", "run.dir=r", "total_frames=256").code == 0
    Path("r").rename(os.fsdecode(b"r\xff"))
    assert rlcli("resume", os.fsdecode(b"r\xff"), "total_frames=512").code == 0
    assert "r\\udcff" in Path(os.fsdecode(b"r\xff/report.md")).read_text()


def test_a_flipped_segment_is_found_before_a_collection_goes_on(rlcli, tmp_path):
    """It ended `done`, and said nothing."""
    assert rlcli("collect", "run.dir=r").code == 0
    path = Path("r/data/00000000.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    is_a_sentence(rlcli("resume", "r", "total_frames=1024"), 4, path.name)


def test_rows_of_another_run_are_not_taken_away(rlcli, tmp_path):
    """Runs of one name lie side by side under storage.scratch_dir; a copy of a run has the place of that."""
    words = ["recipe=dqn_cartpole", "storage=memmap", "storage.max_size=600", f"storage.scratch_dir={tmp_path}/rows"]
    words += ["total_frames=256", "collector.init_random_frames=64"]
    assert rlcli("train", "run.dir=a/r", *words).code == 0
    (place,) = (tmp_path / "rows").iterdir()
    (place / "mine").write_text("kept")
    before = {path: path.read_bytes() for path in place.iterdir()}
    assert rlcli("train", "run.dir=b/r", *words).code == 0 == rlcli("resume", "b/r", "total_frames=384").code
    assert {path: path.read_bytes() for path in place.iterdir()} == before and place.name.startswith("r_")
    assert rlcli("resume", "a/r", "total_frames=384").code == 0 and (place / "mine").exists()
    assert before.keys() & {*place.glob("rows-*")} and len([*(tmp_path / "rows").iterdir()]) == 2
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    with held(place / "journal.jsonl"):
        is_a_sentence(rlcli("resume", "copy/r", "total_frames=512"), 5, "another process is writing here", str(place))
    shutil.rmtree(tmp_path / "rows")
    (tmp_path / "rows").write_text("a file")
    for command in (["train", "run.dir=c", *words], ["resume", "a/r", "total_frames=512"]):
        is_a_sentence(rlcli(*command), 5, "a file stands where a folder should be", f"{tmp_path}/rows")


@contextlib.contextmanager
def held(journal):
    lock = ProcessLock(os.open(journal, os.O_RDWR))
    yield
    lock.drop()


def test_a_finished_run_leaves_nothing_open_in_its_rows(rlcli):
    words = ["recipe=dqn_cartpole", "storage=memmap", "storage.max_size=600", "total_frames=256"]
    assert rlcli("train", "run.dir=r", "collector.init_random_frames=64", *words).code == 0
    answer = rlcli("inspect", "r")
    assert answer.code == 0 and "did not finish" not in answer.out + answer.err


def test_a_storage_without_its_journal_is_refused(tmp_path):
    storage = LazyMemmapStorage(100, scratch_dir=tmp_path / "rows", commit_seconds=0)
    buffer = ReplayBuffer(storage=storage, batch_size=4)
    buffer.extend(steps())
    storage.close(buffer.ring.content)
    (tmp_path / "rows" / "journal.jsonl").unlink()
    with refused(DamagedDataError, "journal.jsonl"):
        LazyMemmapStorage(100, scratch_dir=tmp_path / "rows", resume=True)
    refused(ResourceError, "already", lambda: LazyMemmapStorage(100, scratch_dir=tmp_path / "rows"))
