"""The run folder: named from the run, never written over, held by one process, readable again."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from face import open_run, refused

from rlcli.errors import ConfigError, DamagedDataError, ResourceError
from rlcli.runs import provenance
from rlcli.runs.folder import all_runs, create, locked, read_holder

CONFIG = {"seed": 1, "env": {"id": "CartPole-v1"}, "total_frames": 100}


def made(root, **options):
    return create(CONFIG, **({"verb": "train", "recipe": "ppo_exact", "seed": 1, "root": root} | options))


def test_the_path_says_verb_recipe_time_and_seed(tmp_path):
    path = made(tmp_path).path
    assert re.fullmatch(r"train/ppo_exact/\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_s1", str(path.relative_to(tmp_path)))


def test_without_a_recipe_the_path_says_the_env(tmp_path):
    config = {**CONFIG, "env": {"id": "ALE/Breakout-v5"}}
    path = create(config, verb="train", recipe=None, seed=1, root=tmp_path).path
    assert path.parent == tmp_path / "train" / "ALE-Breakout-v5"


def test_two_runs_of_one_second_get_two_folders(tmp_path):
    paths = {made(tmp_path).path for _ in range(5)}
    assert len(paths) == 5


def test_a_recipe_name_cannot_leave_the_root(tmp_path):
    path = made(tmp_path, recipe="../../etc/pass wd").path
    assert path.resolve().is_relative_to(tmp_path / "train")


def test_a_run_reads_back_what_it_was_made_with(tmp_path):
    run = open_run(made(tmp_path, overrides=["seed=1", "env.num=4"]).path)
    assert run.config == CONFIG
    assert run.info["overrides"] == ["seed=1", "env.num=4"] and run.info["env"] == "CartPole-v1"
    assert {"python", "platform", "torch", "numpy", "gymnasium"} <= set(run.info["versions"])
    assert run.metrics() == [] and run.summary == {} and run.checkpoints == []


def test_a_given_folder_must_be_new_or_empty(tmp_path):
    empty, taken = tmp_path / "empty", tmp_path / "taken"
    empty.mkdir()
    taken.mkdir()
    (taken / "thesis.tex").write_text("years of work")
    assert made(tmp_path, directory=empty).path == empty
    assert made(tmp_path, directory=tmp_path / "a" / "new").path.is_dir()
    with refused(ResourceError, "run.dir=") as caught:
        made(tmp_path, directory=taken)
    assert caught.value.exit_code == 5 and "rlcli resume" not in str(caught.value)
    with pytest.raises(ResourceError, match=r"run.dir=.*empty.*rlcli resume"):
        made(tmp_path, directory=empty)
    assert [path.name for path in taken.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("given", [False, True])
def test_a_folder_that_cannot_be_written_is_refused(tmp_path, given):
    (tmp_path / "file").write_text("")
    where = {"directory": tmp_path / "file" / "run"} if given else {"root": tmp_path / "file"}
    refused(ResourceError, "folder", lambda: made(**({"root": tmp_path} | where)))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ResourceError, match="Permission denied"):
        made(tmp_path)


def test_a_read_only_disk_is_refused(tmp_path, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    refused(ResourceError, "system", lambda: made(tmp_path))


def test_runs_are_found_newest_first(tmp_path):
    first = made(tmp_path)
    second = made(tmp_path, recipe="ppo_full")
    third = made(tmp_path, verb="collect", directory=tmp_path / "mine")
    for number, run in enumerate((first, second, third)):
        info = json.loads((run.path / "run.json").read_text())
        (run.path / "run.json").write_text(json.dumps(info | {"created": f"2031-01-0{number + 1}"}))
    (tmp_path / "train" / "junk").mkdir()
    (tmp_path / "train" / "junk" / "run.json").write_text("{torn")
    assert [run.path for run in all_runs(tmp_path)] == [third.path, second.path, first.path]
    assert all_runs(tmp_path / "nowhere") == []


def test_what_is_not_a_run_is_named(tmp_path):
    refused(ConfigError, "run.json", lambda: open_run(tmp_path))
    refused(ConfigError, "gone", lambda: open_run(tmp_path / "gone"))
    (tmp_path / "run.json").write_text("[1")
    refused(DamagedDataError, "run.json", lambda: open_run(tmp_path))


def test_a_file_that_is_gone_from_a_run_is_damage_and_no_other_folder(tmp_path):
    run = made(tmp_path)
    (run.path / "config.json").unlink()
    with refused(DamagedDataError, "config.json"):
        _ = open_run(run.path).config


def test_a_run_notes_the_version_of_every_package_that_it_could_compute_with(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "version_of", lambda name: f"of {name}")
    assert {"llvmlite", "opencv-python", "box2d", "box2d-py", "tensorboard"} <= made(tmp_path).info["versions"].keys()


def test_checkpoints_come_oldest_first_and_whole(tmp_path):
    run = made(tmp_path)
    names = ("checkpoint_000200", "checkpoint_000050", "checkpoint_1000000")
    for name in (*names, ".tmp_000201_4711", ".old_checkpoint_000049", "checkpoint_000300 copy"):
        (run.path / "checkpoints" / name).mkdir()
    (run.path / "checkpoints" / "latest.json").write_text("{}")
    assert [path.name for path in run.checkpoints] == [names[1], names[0], names[2]]


HOLD = """
import sys, time
from rlcli.runs.folder import locked
lock = locked(sys.argv[1])
lock.__enter__()
print("held", flush=True)
if len(sys.argv) > 2:  # a child that outlives its parent
    import os
    if not os.fork():
        print(os.getpid(), flush=True)
time.sleep(60)
"""


def holder(folder, *arguments: str) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder), *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_refused_with_the_firsts_pid(tmp_path):
    with holder(tmp_path) as process:
        try:
            refused(ResourceError, f"{process.pid} {process.pid}", lambda: locked(tmp_path).__enter__())
        finally:
            process.kill()


def test_a_lock_whose_holder_was_killed_can_be_taken(tmp_path):
    with holder(tmp_path) as process:
        process.kill()
    dead = read_holder(tmp_path)
    assert dead.pid == process.pid and not dead.alive
    with locked(tmp_path):
        assert read_holder(tmp_path).pid == os.getpid() and read_holder(tmp_path).alive
    assert read_holder(tmp_path) is None


def test_a_forked_child_does_not_hold_on_after_its_parent(tmp_path):
    with holder(tmp_path, "fork") as process:
        child = int(process.stdout.readline())
        process.kill()
    try:
        os.kill(child, 0)  # it lives
        with locked(tmp_path):
            pass
    finally:
        os.kill(child, 9)


def test_a_lock_can_be_taken_again_after_release(tmp_path):
    for _ in range(2):
        with locked(tmp_path):
            assert read_holder(tmp_path).alive


def test_two_locks_of_one_process_exclude_each_other(tmp_path):
    with locked(tmp_path), refused(ResourceError, f"{os.getpid()}"):
        locked(tmp_path).__enter__()


def test_a_later_process_with_the_same_pid_is_not_the_holder(tmp_path):
    with locked(tmp_path):
        me = json.loads((tmp_path / "lock").read_text())
    (tmp_path / "lock").write_text(json.dumps(me | {"started": me["started"] - 1000}))
    assert not read_holder(tmp_path).alive


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', "\x00" * 50])
def test_a_damaged_lock_text_is_nobody(tmp_path, text):
    (tmp_path / "lock").write_text(text)
    assert read_holder(tmp_path) is None
    with locked(tmp_path):
        pass


def test_a_folder_that_is_gone_cannot_be_locked(tmp_path):
    refused(ResourceError, "gone", lambda: locked(tmp_path / "gone").__enter__())


def test_status_follows_the_lock_and_the_summary(tmp_path):
    run = made(tmp_path)
    assert run.status == "interrupted"
    with locked(run.path):
        assert run.status == "running"
    (run.path / "summary.json").write_text('{"status": "done"}')
    assert run.status == "done"
    with holder(run.path) as process:
        process.kill()
    assert run.status == "interrupted"  # resumed after it was done, and killed


def test_listing_runs_imports_no_torch(tmp_path):
    made(tmp_path)
    code = (
        "import sys; from rlcli.runs.folder import all_runs;"
        f"assert len(all_runs({str(tmp_path)!r})) == 1; print('torch' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"
