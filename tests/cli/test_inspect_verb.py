"""`rlcli inspect` as it is typed."""

import json

import pytest

import rlcli as api


@pytest.fixture
def run(tmp_path):
    words = ["recipe=collect_random", "env.num=2", "total_frames=200", "collector.frames_per_batch=100"]
    return api.collect([*words, "console=off", "logger=none", f"run.dir={tmp_path / 'frames'}"]).path


def test_keys_and_trajectories_are_printed(rlcli, run):
    code, out, _ = rlcli(f"inspect {run} --trajectory 0")
    assert code == 0 and "200 frames" in out and "observation" in out and "trajectories" in out and "#" in out
    assert "trajectory id 0" in out and "% saved" in out


def test_json(rlcli, run):
    code, out, _ = rlcli(f"inspect {run} --json")
    (data,) = json.loads(out)
    assert code == 0 and data["frames"] == 200 and data["trajectories"]["count"] > 0 and data["saved"] > 0


def test_mistakes_are_sentences(rlcli, run, tmp_path):
    assert rlcli("inspect --help")[0] == 0
    code, _, err = rlcli("inspect")
    assert code == 2 and "needs a run folder" in err
    code, _, err = rlcli(f"inspect {tmp_path}/gone")
    assert code == 2 and "no run folder" in err
    code, _, err = rlcli(f"inspect {run} --trajectory 12345")
    assert code == 2 and "no trajectory 12345" in err
    (run / "data" / "00000000.safetensors").write_bytes(b"x")
    code, _, err = rlcli(f"inspect {run}")
    assert code == 4 and "damaged" in err
