"""Envs of a user's package that break every promise: exit 3 and a sentence with env, lane, step, seed, or no harm."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
from answers import is_a_sentence
from face import open_run

from rlcli.data import open_segments
from rlcli.processes import watchdog

# name -> words of the sentence
STEPS = {
    "raises": ["raised in step", "ValueError: the arm is stuck", "(action "],
    "unspeakable": ["raised in step", "Unspeakable, whose text cannot be had"],
    "exits": ["raised in step", "SystemExit: 0"],
    "no_exception": ["raised in step", "NoException: gone"],
    "endless_text": ["raised in step", "ValueError: a b xxx", "..."],
    "control_text": ["raised in step", r"ValueError: \x1b[2J\x00 \udce9 cleared"],
    "short": ["expected shape (3,), got shape (2,)", "after action"],
    "doubles": ["expected what float32 holds, got", "dtype float64"],
    "too_high": ["outside its declared bounds", "expected -10..10 at element [", "above", "env.out_of_bounds=count"],
    "nan": ["is not finite", "expected finite numbers, got NaN or infinity"],
    "no_reward": ["the reward is not a number", "expected a float, got None"],
    "huge_reward": ["the reward is too large", "expected what float32 can hold, got 1e+300"],
    "endless_reward": ["the reward is not finite"],
    "done_is_two": ["expected a bool as terminated, got 2 (int)"],
    "four_values": ["step returned a bad value", "got a tuple of 4"],
    "nothing": ["step returned a bad value", "got a NoneType"],
}


# in the first try of whether episodes repeat, and in the middle of a run: each fault at both places and with both
# verbs, and all four ways in the long form
WHERE = [
    pytest.param(verb, name, env, id=f"{verb}-{env}", marks=[pytest.mark.slow] * ((k + v + e) % 2))
    for k, name in enumerate(STEPS)
    for v, verb in enumerate(("train", "collect"))
    for e, env in enumerate((name, f"{name}_at_once"))
]


@pytest.mark.parametrize(("verb", "name", "env"), WHERE)
@pytest.mark.every(2)
def test_a_step_that_breaks_the_contract_is_named_wherever_it_happens(hostile, verb, name, env):
    answer = hostile(verb, f"env.id={env}", "run.dir=r", "env.out_of_bounds=refuse")
    is_a_sentence(answer, 3, f"{env}, env ", ", step ", ", seed ", *STEPS[name])
    if env == name or Path("r").exists():  # before the first batch nothing came of the run, and it leaves no folder
        assert open_run("r").summary.get("status", "failed") == "failed"


@pytest.mark.parametrize("name", ["raises", "exits", "no_reward"])
def test_a_worker_process_says_the_same(cold_workers, hostile, name):
    answer = hostile("train", f"env.id={name}", "run.dir=r", "env.workers=2")
    assert answer.code == 3 and "in every worker process" not in answer.err
    words = f"{name}, env ", ", step ", ", seed ", *STEPS[name]
    assert all(word in answer.err for word in words) and "Traceback" not in answer.err


def test_what_an_env_imports_in_its_worker_processes_is_said(cold_workers, hostile):
    answer = hostile("train", "env.id=imports_more", "run.dir=r", "env.workers=2")
    assert answer.code == 0 and "the code of imports_more imports hydra, rich in every worker process" in answer.err


def test_a_worker_process_that_hangs_ends_the_run_where_that_was_asked_for(hostile, impatient):
    answer = hostile("train", "env.id=hangs", "env.step_timeout=0.6", "env.workers=2", "env.num=4", "run.dir=r")
    assert answer.code == 3 and "no answer for 0.6 s (hangs, envs 0 to 1, step " in answer.err
    assert "step has not returned in its worker process" in answer.err


@pytest.mark.parametrize("name", ["other_dtype", "other_dtype_at_once"])
def test_an_env_that_changes_torchs_default_dtype_is_named_and_it_is_put_back(hostile, name):
    answer = hostile("train", f"env.id={name}", "run.dir=r")
    is_a_sentence(answer, 3, "default dtype was changed to float64", f"env {name}", "set_default_dtype")
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="lists its descriptors in /proc")
def test_an_env_that_closes_the_runs_files_is_named(hostile):
    answer = hostile("train", "env.id=closes_files", "run.dir=r")
    is_a_sentence(
        answer, 3, "a file opened by rlcli was closed by other code", "closed descriptors that are not its own"
    )


@pytest.mark.parametrize("name", ["hangs", "hangs_in_reset"])
def test_an_env_that_hangs_ends_the_run_where_that_was_asked_for(hostile, monkeypatch, name):
    monkeypatch.setattr(watchdog, "LOOK", 0.1)
    before = signal.getsignal(signal.SIGALRM)
    words = ["run.dir=r", "collector.frames_per_batch=32", "sampler.batch_size=32", "run.checkpoint_every=32"]
    answer = hostile("train", f"env.id={name}", "env.step_timeout=0.6", *words)
    during = "reset" if "reset" in name else "step"
    is_a_sentence(
        answer, 3, f"no answer for 0.6 s ({name}, env ", f"{during} has not returned at ", "hostile_package.py:"
    )
    assert open_run("r").checkpoints and signal.getsignal(signal.SIGALRM) == before


def test_an_env_that_takes_long_is_said_and_waited_for(hostile, monkeypatch):
    monkeypatch.setattr(watchdog, "SAY_AFTER", 0.4)
    monkeypatch.setattr(watchdog, "LOOK", 0.05)
    answer = hostile("train", "env.id=dawdles", "run.dir=r")
    assert answer.code == 0
    assert answer.err.count("step has not returned") == 2  # once for either env
    assert "dawdles, env 1, episode 4, step 10" in answer.err and "env.step_timeout" in answer.err


def test_a_reward_that_float32_rounds_is_said_once(hostile):
    answer = hostile("train", "env.id=vast_reward", "run.dir=r")
    assert answer.code == 0 and answer.err.count("which turns 16777217 into 16777216") == 1
    assert "float32" not in hostile("train", "env.id=good", "run.dir=s").err


def test_what_was_collected_before_a_fault_is_there_and_whole(hostile):
    # nothing is tried
    words = ["run.dir=r", "collector.frames_per_batch=32", "run.max_replay_steps=0", "env.mode=serial"]
    answer = hostile("collect", "env.id=raises", *words)
    assert answer.code == 3
    found = open_segments(Path("r/data"))
    assert [batch.numel() for batch in found] == [32] * 9  # 149 good steps of 2 envs: the tenth batch broke
    assert all(batch["observation"].isfinite().all() for batch in found)


def test_the_good_checkpoint_before_a_fault_stays(hostile):
    answer = hostile("train", "env.id=raises", "run.dir=r", "collector.frames_per_batch=64", "run.checkpoint_every=64")
    assert answer.code == 3
    run = open_run("r")
    assert run.summary["status"] == "failed" and run.summary["frames"] >= 64 and len(run.checkpoints) >= 1


@pytest.mark.parametrize("verb", ["train", "collect"])
def test_a_run_that_its_env_ended_goes_on_with_the_printed_command_to_the_same_end(hostile, verb, monkeypatch):
    """The env dies of old age, so every session ends in an error, a little later."""
    monkeypatch.setattr("rlcli.jobs.collection.COMMIT_EVERY", 0.0)
    size = ["collector.frames_per_batch=32"]
    size += ["run.checkpoint_every=32", "sampler.batch_size=32"] * (verb == "train")
    assert hostile(verb, "env.id=good", "run.dir=whole", *size).code == 0
    answer = hostile(verb, "env.id=raises", "run.dir=r", *size)
    sessions = 1
    while answer.code:
        is_a_sentence(answer, 3, "the arm is stuck", "resume r --import hostile_package")
        command = re.search(r"resume with: rlcli (resume r) --import", answer.err)
        assert command and sessions < 12, answer.err
        answer, sessions = hostile(*command[1].split()), sessions + 1
    assert sessions > 2
    if verb == "train":
        ends = [run.checkpoints[-1] / "tensors.safetensors" for run in (open_run("whole"), open_run("r"))]
        assert ends[0].read_bytes() == ends[1].read_bytes()
    else:
        files = sorted(path.name for path in Path("whole/data").glob("0*.safetensors"))
        assert files == sorted(path.name for path in Path("r/data").glob("0*.safetensors")) and len(files) == 16
        assert all(Path("whole/data", name).read_bytes() == Path("r/data", name).read_bytes() for name in files)


def test_a_run_refused_for_its_bounds_goes_on_counting_them(hostile):
    size = ["collector.frames_per_batch=64", "run.checkpoint_every=64"]
    answer = hostile("train", "env.id=too_high", "run.dir=r", "env.out_of_bounds=refuse", *size)
    is_a_sentence(answer, 3, "outside its declared bounds")
    run = open_run("r")
    saved = len(run.checkpoints)
    assert run.summary["status"] == "failed" and saved >= 1 and run.summary["out_of_bounds"] == {}
    assert hostile("resume", "r").code == 3  # its env does the same again
    answer = hostile("resume", "r", "env.out_of_bounds=count")
    assert answer.code == 0, answer.err
    run = open_run("r")
    found = run.summary["out_of_bounds"]["observation"]
    assert run.summary["status"] == "done" and run.summary["frames"] == 1024
    assert found["observations"] == 2 and 1.9 < found["worst"]["excess"] < 3.1  # one in either env
    text = "the env's observation was outside its declared bounds; the worst: 1"
    for told in (answer.out, (run.path / "report.md").read_text()):
        assert text in " ".join(told.split()) and "(2 times)" in told, told
    assert [warning["count"] for warning in run.summary["warnings"] if "bounds" in warning["kind"]] == [2]
    played = hostile("eval", "r", "--episodes", "2")
    assert played.code == 0


def test_bounds_are_counted_in_frames_on_the_disk_too(hostile):
    answer = hostile("collect", "env.id=too_high", "run.dir=r")
    assert answer.code == 0 and "2 times" in answer.out
    assert open_run("r").summary["out_of_bounds"]["observation"]["observations"] == 2
    seen = [float(batch["observation"].max()) for batch in open_segments(Path("r/data"))]
    assert max(seen) > 10
    assert hostile("collect", "env.id=too_high", "run.dir=i", "env.out_of_bounds=ignore").code == 0
    assert open_run("i").summary["out_of_bounds"] == {}


def test_an_evaluation_counts_instead_of_stopping(hostile):
    assert hostile("train", "env.id=obeys_a_file", "run.dir=r", "total_frames=256").code == 0
    Path("outside").touch()
    answer = hostile("eval", "r", "--episodes", "2")
    assert answer.code == 0, answer.err
    assert "the env's observation was outside its declared bounds; the worst: 12" in answer.out
    assert "(136 times)" in answer.out  # two envs, 64 steps and four resets each: an evaluation goes on until all ended


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("reset_raises", ["raised in reset", "RuntimeError: no licence", "env 0"]),
        ("reset_alone", ["env 0", "expected", "got"]),
        ("init_raises", ["could not be built (init_raises)", "RuntimeError: no port"]),
        ("init_exits", ["could not be built", "SystemExit"]),
        ("builder_raises", ["could not be built", "ZeroDivisionError"]),
        ("no_env", ["not a gymnasium env", "NoneType"]),
        ("no_spaces", ["has no observation_space"]),
        ("sees_tuple", ["Tuple cannot be used"]),
        ("sees_nested_tuple", ["Tuple cannot be used (a)"]),
        ("sees_text", ["Text cannot be used"]),
        ("sees_taken_name", ["cannot be called 'next'"]),
        ("sees_unsigned", ["dtype uint16 cannot be used", "DtypeObservation"]),
        ("acts_tuple", ["action space of type Tuple cannot be used"]),
    ],
)
@pytest.mark.parametrize("verb", ["train", "collect"])
def test_an_env_that_cannot_begin_is_named(hostile, verb, name, words):
    is_a_sentence(hostile(verb, f"env.id={name}", "run.dir=r"), 3, *words)


@pytest.mark.parametrize("words", [["plan", "train"], ["train", "run.dir=r"]])
def test_a_worker_that_dies_before_anything_is_saved_speaks_of_no_run(cold_workers, hostile, words):
    answer = hostile(*words, "env.id=dies_in_workers", "env.num=2", "env.workers=2")
    is_a_sentence(answer, 3, "SIGKILL", "env.num", "env.workers=null")
    assert "resume" not in answer.err


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("words", [["run.dir=r"], [], ["run.dir=r", "recipe=dqn_cartpole", "storage=memmap"]])
def test_what_an_env_wrote_into_a_run_folder_is_left_of_a_run_that_did_not_begin(hostile, words, there):
    if there:
        Path("r").mkdir()
    is_a_sentence(hostile("train", "env.id=leaves_notes", "env.mode=serial", *words), 3, "no licence")
    notes = sys.modules["hostile_package"].NOTES
    assert {path.name for path in Path.cwd().rglob("*") if path.is_file()} == {Path(name).name for name in notes}


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("words", [["run.dir=r"], ["run.dir=r", "recipe=dqn_cartpole", "storage=memmap"]])
def test_nothing_of_a_run_that_did_not_begin_is_left_but_a_folder_that_was_there(hostile, words, there):
    if there:
        Path("r").mkdir()
    is_a_sentence(hostile("train", "env.id=reset_raises", *words), 3, "no licence")
    assert not any(Path("r").rglob("*")) and Path("r").is_dir() == there


@pytest.mark.parametrize("name", ["ends_at_once", "never_ends", "chatters", "reuses", "unseeded"])
def test_a_strange_env_that_breaks_no_promise_is_trained_on(hostile, name):
    answer = hostile("train", f"env.id={name}", "run.dir=r")
    assert answer.code == 0, answer.err
    summary = open_run("r").summary
    assert (summary["status"], summary["frames"]) == ("done", 1024)
    assert ("cannot be replayed" in answer.out) == (name == "unseeded")


def test_an_episode_that_never_ends_is_cut_off_in_evaluations_and_counted(hostile):
    answer = hostile("train", "env.id=never_ends", "run.dir=r", "run.eval_episodes=3", "run.eval_max_steps=300")
    assert answer.code == 0 and "3 cut off at the step limit" in " ".join(answer.out.split())
    found = open_run("r").summary["evaluation"]
    assert (found["cut"], found["lengths"]) == (3, [300, 300, 300])


def test_an_env_that_reuses_its_buffer_is_resumed_exactly(hostile):
    assert hostile("train", "env.id=reuses", "run.dir=whole").code == 0
    assert hostile("train", "env.id=reuses", "run.dir=cut", "total_frames=512", "optim.anneal_lr=false").code == 0
    answer = hostile("resume", "cut", "total_frames=1024")
    assert answer.code == 0 and "could not be restored" not in answer.out


def test_a_missing_package_of_an_env_names_the_extra(rlcli, monkeypatch):
    from rlcli.config import installed

    monkeypatch.setattr(installed, "find_spec", lambda name: None)
    for env, package, extra in (
        ("LunarLander-v3", "Box2D", "box2d"),
        ("HalfCheetah-v5", "mujoco", "mujoco"),
        ("ALE/Pong-v5", "ale_py", "atari"),
    ):
        answer = rlcli("train", f"env.id={env}")
        assert answer.code == 2 and package in answer.err and f'pip install "rlcli[{extra}]"' in answer.err


def test_an_env_of_an_unimported_package_asks_for_it(hostile, rlcli):
    assert hostile("train", "env.id=good", "run.dir=r").code == 0
    from rlcli.config import registry

    registry._users["env"].clear()
    registry.imported.clear()
    for verb in ("resume", "eval"):
        answer = rlcli(verb, "r")
        is_a_sentence(answer, 2, "unknown env id 'good'", "--import")
    assert json.loads(Path("r/config.json").read_text())["env"]["id"] == "good"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import nothing_of_this_name", ["ModuleNotFoundError", "nothing_of_this_name"]),
        ("1/0", ["ZeroDivisionError"]),
        ("raise SystemExit(0)", ["SystemExit"]),
        ("def", ["SyntaxError"]),
        ("import rlcli; rlcli.register_env('two words')(None)", ["two words"]),
    ],
)
def test_a_package_that_cannot_be_imported_is_named(rlcli, tmp_path, text, words):
    (tmp_path / "bad_package_here.py").write_text(text)
    import sys

    sys.modules.pop("bad_package_here", None)
    answer = rlcli("train", "--import", "bad_package_here")
    is_a_sentence(answer, 2, "bad_package_here", "--import", *words)
