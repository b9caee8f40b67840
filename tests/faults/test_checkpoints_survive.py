"""Checkpoints under kills, power cuts, flips and full disks: a good one is there, a bad one is never believed."""

from __future__ import annotations

import errno
import shutil
import subprocess
import warnings

import numpy as np
import pytest
import torch
from disks import CountingDisk, DyingDisk, LosingDisk, PowerCut, RefusingDisk, places, run_and_die
from face import refused

from rlcli.data.files import sealed_folder
from rlcli.errors import DamagedDataError, ResourceError
from rlcli.runs import checkpoint


def state(number):
    return {"policy": {"weight": torch.full((40,), float(number))}, "loop": {"frames": number, "seed": 2**100}}


def save(folder, number, disk=None):
    return checkpoint.save(folder, state(number), number=number, keep=2, disk=disk)


def is_good(found):
    number = found.manifest["number"]
    weight = found.state["policy"]["weight"]
    return found.state["loop"] == state(number)["loop"] and torch.equal(weight, state(number)["policy"]["weight"])


def latest(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return checkpoint.load_latest(folder)


def before(folder):
    """Two checkpoints, so that a third one also takes an old one away."""
    for number in (1, 2):
        save(folder, number)


@pytest.fixture
def calls(tmp_path):
    before(tmp_path / "counted")
    disk = CountingDisk()
    save(tmp_path / "counted", 3, disk)
    kinds = [call for call, _ in disk.calls]
    assert kinds.index("rename") > max(i for i, (_, name) in enumerate(disk.calls) if name == "manifest.json")
    assert kinds[kinds.index("rename") - 1] == "sync_folder" and kinds[kinds.index("rename") + 1] == "sync_folder"
    return disk.calls


# one torn file stands by default for all pieces that it may be torn at
PIECES = pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])


@PIECES
def test_killed_before_every_single_call(tmp_path, calls, every):
    for n in places(calls, every):
        folder = tmp_path / str(n)
        before(folder)
        code, _ = run_and_die(lambda report, n=n, folder=folder: save(folder, 3, DyingDisk(n)))
        text = f"killed before call {n}: {calls[n - 1]}"
        assert code == 77, text
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a kill leaves nothing that must be passed over
            found = checkpoint.load_latest(folder)
        renamed = n > [call for call, _ in calls].index("rename") + 1
        assert found.manifest["number"] == (3 if renamed else 2) and is_good(found), text
        save(folder, 4)
        assert latest(folder).manifest["number"] == 4, text
        assert sorted(folder.iterdir()) == checkpoint.FOLDERS.paths(folder), f"{text}: something is left over"
        shutil.rmtree(folder)


@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_power_cut_before_every_single_call(tmp_path, calls, seed):
    rng = np.random.default_rng(seed)
    for n in range(1, len(calls) + 1):
        folder, disk = tmp_path / f"{n}", LosingDisk(10**9)
        for number in (1, 2):
            save(folder, number, disk)
        disk.n, disk.calls = n, []
        with pytest.raises(PowerCut):
            save(folder, 3, disk)
        disk.after_the_cut(folder, tmp_path / f"{n} after", rng)
        found = latest(tmp_path / f"{n} after")
        assert found.manifest["number"] >= 2 and is_good(found), f"seed {seed}, cut before {n}: {calls[n - 1]}"


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO])
@PIECES
def test_every_call_may_be_refused_and_the_old_one_stays(tmp_path, calls, error, every):
    for n in places(calls, every):
        folder = tmp_path / str(n)
        before(folder)
        with pytest.raises(ResourceError) as caught:
            save(folder, 3, RefusingDisk(n, error))
        assert caught.value.exit_code == 5 and str(folder) in str(caught.value)
        if error == errno.ENOSPC and calls[n - 1][0] in ("reserve", "write"):
            assert "bytes are needed" in str(caught.value)
        found = latest(folder)
        assert found.manifest["number"] >= 2 and found.skipped == [] and is_good(found)
        save(folder, 4)
        assert sorted(folder.iterdir()) == checkpoint.FOLDERS.paths(folder)


def test_a_really_full_disk_keeps_the_old_checkpoint(tmp_path):
    """On a file system of 1 MB, where this process may mount one."""
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", small], capture_output=True).returncode:
        pytest.skip("a file system of 1 MB cannot be mounted here")
    try:
        save(small, 1)
        with refused(ResourceError, "needed"):
            checkpoint.save(small, {"policy": {"weight": torch.zeros(10**6)}}, number=2)
        (small / "ballast").write_bytes(bytes(900_000))
        with refused(ResourceError, "needed"):
            checkpoint.save(small, {"policy": {"weight": torch.zeros(40_000)}}, number=2)
        assert is_good(checkpoint.load_latest(small))
        assert len(list(small.iterdir())) == 2
    finally:
        subprocess.run(["umount", small], check=True)


def is_passed_over(folder, path, text):
    assert checkpoint.FOLDERS.verify(path.parent), text
    refused(DamagedDataError, path.name, lambda: checkpoint.load(path.parent))
    with pytest.warns(UserWarning, match=path.name):
        found = checkpoint.load_latest(folder)
    assert found.manifest["number"] == 1 and is_good(found), text
    assert len(found.skipped) == 1 and str(path) in found.skipped[0]


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_flip_of_any_byte_in_any_file_is_found_and_the_one_before_is_taken(tmp_path, step):
    before(tmp_path)
    rng = np.random.default_rng(0)
    newest = checkpoint.FOLDERS.paths(tmp_path)[-1]
    for path in sorted(newest.iterdir()):
        content = path.read_bytes()
        for at in range(int(rng.integers(step)), len(content), step):
            path.write_bytes(content[:at] + bytes([content[at] ^ (1 << int(rng.integers(8)))]) + content[at + 1 :])
            is_passed_over(tmp_path, path, f"seed 0, byte {at} of {path.name}")
        path.write_bytes(content)
    assert latest(tmp_path).manifest["number"] == 2


def test_a_file_cut_anywhere_grown_or_missing_is_found(tmp_path):
    before(tmp_path)
    newest = checkpoint.FOLDERS.paths(tmp_path)[-1]
    for path in sorted(newest.iterdir()):
        content = path.read_bytes()
        for end in range(0, len(content), 7):
            path.write_bytes(content[:end])
            is_passed_over(tmp_path, path, f"{path.name} cut at {end}")
        for more in (b"\0", b" ", b"\n", content):
            path.write_bytes(content + more)
            is_passed_over(tmp_path, path, f"{path.name} grown by {len(more)}")
        path.unlink()
        is_passed_over(tmp_path, path, f"{path.name} missing")
        path.write_bytes(content)


@pytest.mark.parametrize(
    "payload",
    [
        b"\x80\x04\x95cposix\nsystem\n(S'touch owned'\ntR.",
        b"cposix\nsystem\n(S'touch owned'\ntR.",
        b"{\"$code\": \"open('owned', 'w')\"}",
        b'{"_target_": "os.system", "_args_": ["touch owned"]}',
        b'{"a": {"$pairs": [[["$tensor"], 1]]}}',
        b'{"a": {"$float": "__import__(\'os\').system(\'touch owned\')"}}',
        b"[" * 100_000,
        b"",
    ],
)
def test_nothing_in_a_checkpoint_runs(tmp_path, monkeypatch, payload):
    """With checksums that fit, as an attacker would write them."""
    from rlcli.data.files.disk import digest_of

    monkeypatch.chdir(tmp_path)
    path = save(tmp_path / "c", 1)
    for name in ("state.json", "tensors.safetensors"):
        manifest, old = checkpoint.read_manifest(path), (path / name).read_bytes()
        files = {**manifest["files"], name: {"size": len(payload), "digest": digest_of(payload)}}
        (path / name).write_bytes(payload)
        (path / "manifest.json").write_bytes(sealed_folder.sealed({**manifest, "files": files}))
        try:
            loaded = checkpoint.load(path).state
        except DamagedDataError:
            loaded = None
        assert loaded is None or "_target_" in loaded  # plain words, which nobody obeys
        (path / name).write_bytes(old)
        (path / "manifest.json").write_bytes(sealed_folder.sealed(manifest))
    assert not (tmp_path / "owned").exists()
