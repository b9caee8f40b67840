"""What is saved comes back as it was; the newest checkpoint that verifies is the latest; nothing is executed."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import torch
from face import refused

from rlcli.data.files import sealed_folder
from rlcli.errors import ArgumentError, DamagedDataError, NumericsError, ResourceError
from rlcli.runs import checkpoint
from rlcli.runs.folder import Run


def state(value=1.0):
    return {
        "policy": {"net.0.weight": torch.full((3, 2), value), "net.0.bias": torch.zeros(0)},
        "update": {"state": {0: {"exp_avg": torch.full((6,), value), "step": torch.tensor(3.0)}}, "lr": 1e-3},
        "loop": {"frames": 512, "best": float("-inf"), "seeds": (1, 2**100)},
    }


def test_state_comes_back_as_it_was_saved(tmp_path):
    path = checkpoint.save(tmp_path, state(), number=512, config={"a": {"b": 1}}, versions={"torch": "2"})
    found = checkpoint.load_latest(tmp_path)
    assert found.path == path and found.skipped == []
    assert found.manifest["number"] == 512 and found.manifest["config"] == {"a": {"b": 1}}
    assert found.manifest["versions"] == {"torch": "2"}
    back = found.state
    assert torch.equal(back["policy"]["net.0.weight"], state()["policy"]["net.0.weight"])
    assert back["policy"]["net.0.bias"].shape == (0,)
    assert back["update"]["state"][0]["step"] == 3 and back["update"]["lr"] == 1e-3
    assert back["loop"] == state()["loop"]
    assert checkpoint.FOLDERS.verify(path) is None
    assert {p.name for p in path.iterdir()} == {"tensors.safetensors", "state.json", "manifest.json"}


def test_newest_are_kept_and_older_taken_away(tmp_path):
    for i in range(5):
        checkpoint.save(tmp_path, state(i), number=100 * i, keep=3)
    assert [p.name for p in checkpoint.FOLDERS.paths(tmp_path)] == [f"checkpoint_{i:06d}" for i in (3, 4, 5)]
    assert checkpoint.load_latest(tmp_path).manifest["number"] == 400
    assert sorted(tmp_path.iterdir()) == checkpoint.FOLDERS.paths(tmp_path)


def test_the_run_folder_lists_them_in_the_same_order(tmp_path):
    for i in range(3):
        checkpoint.save(tmp_path / "checkpoints", state(), number=1000 - i)
    assert Run(tmp_path).checkpoints == checkpoint.FOLDERS.paths(tmp_path / "checkpoints")


def test_a_damaged_checkpoint_is_passed_over_loudly_and_never_pushes_a_good_one_out(tmp_path):
    for i in range(3):
        checkpoint.save(tmp_path, state(i), number=i, keep=3)
    for path in checkpoint.FOLDERS.paths(tmp_path)[1:]:
        file = path / "tensors.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.warns(UserWarning, match=r"tensors\.safetensors.*bytes"):
        found = checkpoint.load_latest(tmp_path)
    assert found.manifest["number"] == 0 and len(found.skipped) == 2
    checkpoint.save(tmp_path, state(9), number=9, keep=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checkpoint.load_latest(tmp_path).manifest["number"] == 9
    good = [p for p in checkpoint.FOLDERS.paths(tmp_path) if checkpoint.FOLDERS.verify(p) is None]
    assert len(good) == 2


def test_the_same_frames_can_be_saved_again_after_a_fallback(tmp_path):
    first = checkpoint.save(tmp_path, state(1), number=512)
    again = checkpoint.save(tmp_path, state(2), number=512)
    assert first != again and checkpoint.load_latest(tmp_path).path == again


def test_a_non_finite_weight_is_not_written_and_the_last_checkpoint_stays(tmp_path):
    kept = checkpoint.save(tmp_path, state(), number=1)
    refused(NumericsError, "policy/net.0.weight", lambda: checkpoint.save(tmp_path, state(float("nan")), number=2))
    assert list(tmp_path.iterdir()) == [kept]
    stats = {**state(), "stats": {"low": torch.tensor([-float("inf")])}}
    refused(NumericsError, "stats/low", lambda: checkpoint.save(tmp_path, stats, number=2))
    checkpoint.save(tmp_path, stats, number=2, may_be_infinite=("stats",))


def test_no_checkpoint_and_no_good_checkpoint_are_different_errors(tmp_path):
    for empty in (tmp_path, tmp_path / "nowhere"):
        with refused(ResourceError, "checkpoint"):
            checkpoint.load_latest(empty)
    path = checkpoint.save(tmp_path, state(), number=1)
    (path / "manifest.json").unlink()
    with pytest.warns(UserWarning), refused(DamagedDataError, "manifest.json"):
        checkpoint.load_latest(tmp_path)


@pytest.mark.parametrize("keep", [1, 0, -3])
def test_fewer_than_two_are_never_kept(tmp_path, keep):
    with pytest.raises(ArgumentError, match="at least 2"):
        checkpoint.save(tmp_path, state(), number=1, keep=keep)


def test_what_has_no_place_in_a_file_is_refused_by_its_place(tmp_path):
    with refused(ArgumentError, "collector/env"):
        checkpoint.save(tmp_path, {"collector": {"env": object()}}, number=1)
    assert list(tmp_path.iterdir()) == []


def test_a_manifest_of_another_version_is_named(tmp_path):
    path = checkpoint.save(tmp_path, state(), number=1)
    manifest = checkpoint.read_manifest(path)
    (path / "manifest.json").write_bytes(sealed_folder.sealed({**manifest, "version": 99}))
    assert "99" in checkpoint.FOLDERS.verify(path)


def test_a_file_name_that_leaves_the_folder_is_never_opened(tmp_path):
    """A manifest that seals itself can still be made by hand: only the two known files are read."""
    path = checkpoint.save(tmp_path / "c", state(), number=1)
    manifest = checkpoint.read_manifest(path)
    secret = tmp_path / "secret"
    secret.write_text("x")
    manifest["files"]["../../secret"] = {"size": 1, "digest": "0" * 32}
    (path / "manifest.json").write_bytes(sealed_folder.sealed(manifest))
    refused(DamagedDataError, "files", lambda: checkpoint.load(path))


def test_reformatted_manifest_is_found_even_if_it_means_the_same(tmp_path):
    path = checkpoint.save(tmp_path, state(), number=1)
    file = path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text())))
    assert "altered" in checkpoint.FOLDERS.verify(path)


def test_arrays_and_random_states_keep_their_kind(tmp_path):
    rng = np.random.Generator(np.random.MT19937(3))
    tree = {
        "rng": rng.bit_generator.state,
        "array": np.arange(6, dtype=np.uint32).reshape(2, 3)[:, ::2],
        "scalar": np.float32(0.1),
        "flag": np.bool_(True),
    }
    checkpoint.save(tmp_path, tree, number=1)
    back = checkpoint.load_latest(tmp_path).state
    assert back["rng"]["bit_generator"] == "MT19937"
    np.testing.assert_array_equal(back["rng"]["state"]["key"], tree["rng"]["state"]["key"])
    assert back["rng"]["state"]["key"].dtype == np.uint32
    np.testing.assert_array_equal(back["array"], tree["array"])
    assert back["scalar"] == np.float32(0.1) and isinstance(back["scalar"], np.float32)
    assert back["flag"] == np.bool_(True) and isinstance(back["flag"], np.bool_)
