"""`rlcli verify`: one line a file, exit 4 with the file named where one is damaged."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from rlcli.data import ReplayBuffer, SegmentWriter
from rlcli.data.storages import LazyMemmapStorage
from rlcli.runs import checkpoint


def frames(seed: int) -> TensorDict:
    torch.manual_seed(seed)
    nexts = {"observation": torch.rand(10, 3), "done": torch.zeros(10, 1, dtype=torch.bool)}
    return TensorDict({"observation": torch.rand(10, 3), "next": nexts}, [10])


@pytest.fixture
def folder(tmp_path):
    """A run's checkpoint, collected frames, a buffer on disk and a dump of it."""
    checkpoint.save(tmp_path / "run" / "checkpoints", {"weight": torch.ones(5)}, number=1)
    (tmp_path / "run" / "config.json").write_text("{}")
    with SegmentWriter(tmp_path / "run" / "data") as writer:
        writer.append(frames(0))
    storage = LazyMemmapStorage(40, scratch_dir=tmp_path / "run" / "rows")
    buffer = ReplayBuffer(storage=storage, batch_size=4)
    for i in range(5):
        buffer.extend(frames(i))
    buffer.dumps(tmp_path / "run" / "dumps")
    storage.close(buffer.ring.content)
    return tmp_path / "run"


def test_a_whole_folder_is_whole(rlcli, folder):
    code, out, err = rlcli(f"verify {folder}")
    assert code == 0 and "damaged" not in out and "note" not in out, out + err
    for name in ("tensors.safetensors", "00000000.safetensors", "rows-00000002.0.bin", "dump_000001/manifest.json"):
        assert any(line.startswith("ok") and name in line for line in out.splitlines()), name
    assert "no sum" in next(line for line in out.splitlines() if "config.json" in line)


def test_every_damaged_file_is_named(rlcli, folder):
    for path in sorted(p for p in folder.glob("**/*") if p.is_file()):
        content = path.read_bytes()
        at = 9 if path.suffix == ".bin" and path.parent.name == "rows" else len(content) // 2
        path.write_bytes(content[:at] + bytes([content[at] ^ 64]) + content[at + 1 :])
        code, out, err = rlcli(f"verify {folder}")
        line = next(line for line in out.splitlines() if str(path) in line)
        if path.name == "config.json" or (path.suffix == ".bin" and code == 0):
            path.write_bytes(content)  # no checksum, or a row that is no longer live
            continue
        assert code == 4 and line.startswith("damaged") and str(path) in err, f"{path}: {out}{err}"
        path.write_bytes(content)
        if "journal" not in path.name and "manifest" not in path.name:
            path.unlink()
            code, out, err = rlcli(f"verify {folder}")
            assert code == 4 and str(path) in err, f"{path} missing: {out}{err}"
            path.write_bytes(content)


def test_what_a_crash_left_is_a_note(rlcli, folder):
    (folder / "dumps" / ".tmp_000002_77").mkdir()
    journal = folder / "rows" / "journal.jsonl"
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:-1]))
    code, out, _ = rlcli(f"verify {folder}")
    notes = [line for line in out.splitlines() if line.startswith("note")]
    assert code == 0 and len(notes) == 2 and "did not finish" in "".join(notes)


@pytest.mark.parametrize("torn", [b"", b"3f2a"])
def test_a_journal_that_a_crash_left_without_a_record_is_no_damage(rlcli, tmp_path, torn):
    (tmp_path / "run" / "data").mkdir(parents=True)
    (tmp_path / "run" / "data" / "journal.jsonl").write_bytes(torn)
    code, out, err = rlcli("verify run")
    assert code == 0 and "did not finish" in out, out + err
    run = {"run": '{"verb": "collect"}', "config": "{}", "summary": '{"status": "done", "frames": 500}'}
    for name, content in run.items():
        (tmp_path / "run" / f"{name}.json").write_text(content)
    code, out, err = rlcli("verify run")
    assert code == 4 and "500 frames were saved" in out, out + err


def test_folders_without_checksums_are_refused(rlcli, tmp_path):
    assert rlcli("verify")[0] == 2
    assert rlcli(f"verify {tmp_path}/nowhere")[0] == 2
    (tmp_path / "empty").mkdir()
    code, _, err = rlcli(f"verify {tmp_path}/empty")
    assert code == 2 and "nothing with checksums" in err
