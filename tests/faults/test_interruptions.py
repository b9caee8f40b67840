"""Stopped or killed at any moment, a run goes on and ends with the weights it would have had, bit for bit."""

from __future__ import annotations

import os
import pty
import random
import re
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from answers import SHORT, is_a_sentence
from disks import run_and_die
from face import main, open_run

from rlcli.collectors import BaseCollector
from rlcli.data import open_segments
from rlcli.learning.optimizer import Step
from rlcli.runs import checkpoint, signals
from tests.preloaded import forked

CHECKOUT = Path(__file__).parents[2]
STOPS = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}
SEED = 20_310_506  # of the moments; printed where a test fails, as part of its assertion


def learned(folder) -> bytes:
    """Weights, optimizer, carriers, histories and random states of the newest checkpoint, as they lie on the disk."""
    (newest,) = checkpoint.FOLDERS.paths(Path(folder) / "checkpoints")[-1:]
    assert checkpoint.FOLDERS.verify(newest) is None
    return (newest / "tensors.safetensors").read_bytes()


def statuses(folder) -> tuple[str, int]:
    run = open_run(folder)
    return run.summary["status"], run.summary["frames"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What the run of these tests ends with when nobody disturbs it, and how long that takes."""
    folder = tmp_path_factory.mktemp("undisturbed") / "r"
    main(["train", f"run.dir={folder}_warm", *SHORT])  # imports and compiles
    began = time.monotonic()
    assert main(["train", f"run.dir={folder}", *SHORT]) == 0
    return learned(folder), time.monotonic() - began


# ---- at a chosen place -------------------------------------------------------------------------------------------
PLACES = {
    "in the first batch": ("rlcli.collectors.loop.BoundBatch", "step_envs", 1),
    "between two steps of an update": (Step, "__call__", 20),
    "while a checkpoint is written": ("rlcli.runs.checkpoint", "save", 2),
    "in a first step": ("gymnasium.envs.classic_control.CartPoleEnv", "step", 100),
    "in a step": ("gymnasium.envs.classic_control.CartPoleEnv", "step", 300),
    "while workers collect": ("rlcli.processes.group.WorkerGroup", "_ready", 5),
}


def raise_within(monkeypatch, place: str, number: int) -> None:
    """Have the k-th call at a place interrupted by a signal, once."""
    owner, name, count = PLACES[place]
    if isinstance(owner, str):
        from pkgutil import resolve_name

        owner = resolve_name(owner)
    original, calls = getattr(owner, name), []

    def call(*args, **options):
        calls.append(1)
        if len(calls) == count:
            os.kill(os.getpid(), number)
        return original(*args, **options)

    monkeypatch.setattr(owner, name, call)


# every place with one of the signals; with the other one in the long form, since one handler answers both
PLACE_AND_SIGNAL = [
    pytest.param(place, number, id=f"{place}-{STOPS[number]}", marks=[pytest.mark.slow] * (k % 2 != n))
    for k, place in enumerate(list(PLACES)[:3])
    for n, number in enumerate(STOPS)
]


@pytest.mark.parametrize(("place", "number"), PLACE_AND_SIGNAL)
def test_a_signal_at_any_stage_saves_and_the_printed_command_goes_on(rlcli, monkeypatch, whole, place, number):
    with monkeypatch.context() as patch:
        raise_within(patch, place, number)
        answer = rlcli("train", "run.dir=r")
    assert answer.code == 75
    notice, sentence = answer.err.strip().splitlines()[-2:]
    assert notice.startswith("stopping after this batch") and f"stopped by {STOPS[number]} at " in sentence
    command = re.search(r"Resume with: rlcli (resume r)$", sentence)
    assert command, sentence
    assert statuses("r")[0] == "stopped"
    answer = rlcli(*command[1].split())
    assert answer.code == 0, answer.err
    assert statuses("r") == ("done", 1024) and learned("r") == whole[0]


@pytest.mark.parametrize("number", STOPS, ids=STOPS.values())
@pytest.mark.parametrize("verb", ["train", "collect"])
def test_a_signal_between_two_envs_that_are_made_ends_the_run_and_leaves_nothing(rlcli, monkeypatch, verb, number):
    from rlcli.build import env

    paced = env.paced

    def asked(made, make):
        if made == 2:
            os.kill(os.getpid(), number)
        assert made < 3
        return make()

    with monkeypatch.context() as patch:
        patch.setattr(env, "paced", lambda *args: [partial(asked, i, make) for i, make in enumerate(paced(*args))])
        answer = rlcli(verb, "run.dir=r", "env.num=1000", "env.mode=serial")
    assert answer.code == 75 and not Path("r").exists()
    assert f"stopped by {STOPS[number]} before it began; nothing was lost" in answer.err
    assert f"Start it with: rlcli {verb} " in answer.err and "after this batch" not in answer.err


DQN = ["train", "recipe=dqn_cartpole"]
MULTI = ["collector=multi_sync", "collector.num_workers=2", "collector.on_worker_error=restart"]


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("in a step", ["train"]),
        ("in a step", ["collect"]),
        ("in a first step", ["collect"]),
        ("in a first step", DQN),
        ("while workers collect", ["train", *MULTI]),
    ],
)
def test_a_batch_that_takes_too_long_after_a_signal_is_given_up(rlcli, monkeypatch, tmp_path, place, words):
    assert rlcli(*words, "run.dir=whole", "env.mode=serial").code == 0
    original, calls = BaseCollector._advance, []

    def advance(*args, **options):
        calls.append(1)
        return original(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(BaseCollector, "_advance", advance)
        patch.setattr("rlcli.runs.signals.PATIENCE", -1.0)
        raise_within(patch, place, signal.SIGTERM)
        answer = rlcli(*words, "run.dir=r", "env.mode=serial")
    frames = 128 * (len(calls) - 1)
    assert answer.code == 75 and f"stopped by SIGTERM at {frames} frames" in answer.err
    assert bool(frames) == (place != "in a first step")
    assert statuses("r") == ("stopped", frames) and rlcli("resume", "r").code == 0
    if words == ["collect"]:
        one, other = (open_segments(Path(name, "data")) for name in ("whole", "r"))
        assert all(torch.equal(a[key], b[key]) for a, b in zip(one, other, strict=True) for key in a.keys(True, True))
    else:
        assert learned("r") == learned("whole")


def test_a_signal_while_the_parts_of_a_resumed_run_are_made_leaves_it_as_it_was(rlcli, monkeypatch, whole):
    raise_within(monkeypatch, "in the first batch", signal.SIGTERM)
    assert rlcli("train", "run.dir=r").code == 75
    saved = learned("r")
    with monkeypatch.context() as patch:
        patch.setattr("rlcli.build.training.env_of_run", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
        answer = rlcli("resume", "r")
    assert answer.code == 75 and "Resume with: rlcli resume r" in answer.err
    assert learned("r") == saved and rlcli("resume", "r").code == 0 and learned("r") == whole[0]


def test_an_env_that_swallows_a_stop_while_it_is_made_does_not_lose_it(hostile):
    # with env.mode=auto the first one is made before there is a run, and the stop ends all there
    answer = hostile("train", "env.id=swallows_stops", "env.mode=serial", "run.dir=r")
    assert answer.code == 75 and "Resume with: rlcli resume r" in answer.err
    assert statuses("r") == ("stopped", 0)


def test_a_signal_in_the_last_checkpoint_of_a_run_finds_it_done(rlcli, monkeypatch, whole):
    monkeypatch.setitem(PLACES, "the last", ("rlcli.runs.checkpoint", "save", 5))
    raise_within(monkeypatch, "the last", signal.SIGTERM)
    assert rlcli("train", "run.dir=r").code == 0
    assert statuses("r") == ("done", 1024) and learned("r") == whole[0]


def test_a_signal_in_the_last_evaluation_ends_it_and_resuming_plays_it(rlcli, monkeypatch):
    from rlcli.learning import evaluation

    stepped = evaluation.Collector._stepped

    def interrupted(self, *args, **options):
        if self.frames and self.vec_env.n == 1:  # the evaluation's
            os.kill(os.getpid(), signal.SIGTERM)
        return stepped(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(evaluation.Collector, "_stepped", interrupted)
        patch.setattr(evaluation, "STEPS_A_BATCH", 2)
        assert rlcli("train", "run.dir=r", "run.eval_episodes=5", "run.eval_envs=1").code == 75
    assert statuses("r") == ("stopped", 1024)
    assert "evaluation  return" in rlcli("resume", "r").out
    assert statuses("r") == ("done", 1024)


def test_sigterm_before_there_is_a_run_ends_at_once(rlcli, monkeypatch, tmp_path):
    from rlcli.config import compose

    monkeypatch.setattr(compose, "plan", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM) or time.sleep(5))
    before = signal.getsignal(signal.SIGTERM)
    answer = rlcli("train", "run.dir=r")
    is_a_sentence(answer, 75, "stopped by SIGTERM while no run was going on")
    assert not (tmp_path / "r").exists() and signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
@pytest.mark.parametrize("swallowed", [True, False])
def test_a_library_that_swallows_an_early_signal_does_not_lose_it(rlcli, monkeypatch, number, code, swallowed):
    from rlcli.config import compose

    plan = compose.plan

    def careless(*args, **options):
        try:
            os.kill(os.getpid(), number)
            time.sleep(5)
        except BaseException as error:
            if not swallowed:
                raise ValueError("the library's own") from error
        return plan(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(compose, "plan", careless)
        answer = rlcli("train", "run.dir=r")
    assert answer.code == (75 if swallowed else code) and "Traceback" not in answer.err
    if swallowed:
        assert statuses("r") == ("stopped", 0)
        assert rlcli("resume", "r").code == 0


def test_an_env_may_send_the_signal_itself(hostile):
    assert hostile("train", "env.id=interrupts", "run.dir=r").code == 75
    assert "--import hostile_package" in hostile("train", "env.id=interrupts", "run.dir=s").err


@pytest.mark.parametrize(
    "workers",
    [
        ["collector=multi_sync", "collector.num_workers=2", "collector.on_worker_error=restart"],
        ["env.mode=parallel", "env.workers=2"],
    ],
)
def test_a_worker_that_hangs_does_not_keep_a_run_from_stopping(hostile, monkeypatch, impatient, workers):
    monkeypatch.setattr(signals, "PATIENCE", 0.0)
    Path("parent").write_text(str(os.getpid()))
    answer = hostile("train", "env.id=stops_the_run_and_hangs", "run.dir=r", "env.num=2", *workers)
    assert answer.code == 75 and "stopped by SIGTERM at 128 frames and saved" in answer.err, answer.err
    assert statuses("r")[0] == "stopped"
    assert checkpoint.load_latest(Path("r/checkpoints")).manifest["number"] == 128


def test_a_second_ctrl_c_stops_now_and_the_checkpoint_before_is_good(hostile, whole):
    answer = hostile(
        "train", "env.id=interrupts_twice", "run.dir=r", "collector.frames_per_batch=64", "run.checkpoint_every=64"
    )
    assert answer.code == 130 and "Traceback" not in answer.err
    run = open_run("r")
    assert run.status == "interrupted" and run.summary["frames"] >= 64 and learned("r")


def test_a_second_ctrl_c_within_a_checkpoint_leaves_the_one_before(rlcli, monkeypatch, whole):
    from rlcli.data.files.disk import Disk

    with monkeypatch.context() as patch:
        raised = []

        def at(self, call, path):
            if path.name == "manifest.json" and call == "sync" and "000002" in str(path) and not raised:
                raised.extend([signal.raise_signal(signal.SIGINT), signal.raise_signal(signal.SIGINT)])

        patch.setattr(Disk, "at", at)
        assert rlcli("train", "run.dir=r").code == 130
    assert [path.name for path in checkpoint.FOLDERS.paths(Path("r/checkpoints"))] == ["checkpoint_000001"]
    assert rlcli("resume", "r").code == 0 and learned("r") == whole[0]


# ---- at any moment -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("count", [5, pytest.param(10, marks=pytest.mark.slow)])
def test_stopped_at_random_moments_runs_end_with_the_same_weights(rlcli, monkeypatch, whole, count):
    """Moments are drawn as "the k-th batch, update step or checkpoint": a clock would hit another place under load."""
    moments = random.Random(SEED)
    often = {"in the first batch": 8, "between two steps of an update": 32, "while a checkpoint is written": 4}
    stopped = []
    for k in range(count):
        place = moments.choice(list(often))
        owner, name, _ = PLACES[place]
        monkeypatch.setitem(PLACES, place, (owner, name, moments.randint(1, often[place])))
        with monkeypatch.context() as patch:
            raise_within(patch, place, moments.choice(list(STOPS)))
            code = rlcli("train", f"run.dir=r{k}").code
        stopped.append(statuses(f"r{k}")[1])
        assert statuses(f"r{k}")[0] == {75: "stopped"}.get(code, "done"), f"moment {k} of seed {SEED}: {code}"
        assert rlcli("resume", f"r{k}").code == 0
        assert learned(f"r{k}") == whole[0], f"moment {k} of seed {SEED}, stopped at {stopped[-1]} frames"
    assert len(set(stopped)) >= min(4, count // 2 + 1), f"the moments must differ: {stopped}"


def test_one_run_stopped_again_and_again_ends_with_the_same_weights(rlcli, monkeypatch, whole):
    moments, code, stops = random.Random(SEED + 1), 75, 0
    while code == 75:
        place = ("in the first batch", "between two steps of an update")[moments.randrange(2)]
        owner, name, _ = PLACES[place]
        monkeypatch.setitem(PLACES, place, (owner, name, moments.randint(1, 2 if "batch" in place else 8)))
        with monkeypatch.context() as patch:
            raise_within(patch, place, signal.SIGTERM)
            code = rlcli(*(["resume", "r"] if Path("r/config.json").exists() else ["train", "run.dir=r"])).code
        stops += code == 75
        assert code in (0, 75) and stops <= 8
    assert learned("r") == whole[0] and stops >= 3
    assert [record["frames"] for record in open_run("r").metrics()] == [128 * k for k in range(1, 9)]


def train_in_a_child(words: list[str]) -> int:
    """The child of a fork: its own group of signals, its output nowhere."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1), os.dup2(null, 2)
    torch.set_num_threads(1)
    return main(words)


@pytest.mark.parametrize("count", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_killed_at_random_moments_a_run_goes_on_from_its_last_checkpoint(rlcli, whole, count):
    expected, seconds = whole
    moments = random.Random(SEED + 2)
    for k in range(count):
        folder = f"r{k}"
        words = ["train", f"run.dir={folder}", *SHORT]
        pid = os.fork()
        if pid == 0:
            try:
                os._exit(train_in_a_child(words))
            finally:
                os._exit(1)
        time.sleep(seconds * moments.uniform(0.3, 1.1))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if not (Path(folder) / "run.json").exists() or not checkpoint.FOLDERS.paths(Path(folder) / "checkpoints"):
            continue  # nothing was acknowledged yet
        assert open_run(folder).status in ("interrupted", "done")
        answer = rlcli("resume", folder)
        assert answer.code == 0, f"moment {k} of seed {SEED + 2}: {answer.err}"
        assert learned(folder) == expected, f"moment {k} of seed {SEED + 2}"
        assert [record["frames"] for record in open_run(folder).metrics()] == [128 * n for n in range(1, 9)]


def test_killed_before_every_call_of_a_disk_a_run_goes_on(rlcli, whole, monkeypatch):
    """Some of them, here, the last two included; each call by itself is tested with checkpoints and segments."""
    from disks import StepsDisk

    save = checkpoint.save

    def run_with(disk, folder):
        monkeypatch.setattr(checkpoint, "save", lambda *a, **o: save(*a, disk=disk, **o))
        return train_in_a_child(["train", f"run.dir={folder}", *SHORT])

    def count(report):
        disk = StepsDisk()
        run_with(disk, "counted")
        report(disk.steps)

    _, (steps,) = run_and_die(count)
    last = steps if steps % 2 else steps - 1  # the process goes in an even one once there is another call
    for n in {*range(1, last, max(1, steps // 2)), last - 1, last}:
        code, _ = run_and_die(lambda report, n=n: run_with(StepsDisk(n), f"r{n}"))
        assert code == 77, f"step {n} of {steps}"
        if checkpoint.FOLDERS.paths(Path(f"r{n}/checkpoints")):
            assert rlcli("resume", f"r{n}").code == 0 and learned(f"r{n}") == whole[0], f"step {n} of {steps}"


# ---- collecting --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("number", STOPS, ids=STOPS.values())
def test_a_stopped_collection_has_whole_frames_on_the_disk(hostile, monkeypatch, number):
    monkeypatch.setattr("rlcli.jobs.collection.COMMIT_EVERY", 0.1)
    journal = Path.cwd() / "r" / "data" / "journal.jsonl"

    def stop_once_frames_are_there() -> None:
        while not (journal.exists() and b'"segment"' in journal.read_bytes()):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    watcher = threading.Thread(target=stop_once_frames_are_there, daemon=True)
    watcher.start()
    answer = hostile("collect", "env.id=slow", "run.dir=r", "total_frames=100000", "collector.frames_per_batch=32")
    watcher.join(10)
    assert answer.code == 75 and f"stopped by {STOPS[number]}" in answer.err and "all of them are on disk" in answer.err
    found = open_segments(Path("r/data"))
    frames = sum(batch.numel() for batch in found)
    assert statuses("r") == ("stopped", frames) and frames % 32 == 0 and frames > 0
    assert f"at {frames:,} frames" in answer.err


def test_a_killed_collection_keeps_every_acknowledged_frame(hostile, monkeypatch, tmp_path):
    monkeypatch.setattr("rlcli.jobs.collection.COMMIT_EVERY", 0.1)
    words = ["env.id=slow", "run.dir=r", "total_frames=100000", "collector.frames_per_batch=32"]
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(int(hostile("collect", *words).code))
        finally:
            os._exit(1)
    journal = tmp_path / "r" / "data" / "journal.jsonl"
    deadline = time.monotonic() + 100
    while not (journal.exists() and journal.read_bytes().count(b'"segment"') > 3) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    acknowledged = journal.read_bytes().count(b'"segment"')
    assert acknowledged > 3
    with warnings.catch_warnings(action="ignore"):  # of segments that were written and not acknowledged
        found = open_segments(tmp_path / "r" / "data")
        assert len(found) >= acknowledged and all(batch.numel() == 32 for batch in found)


# ---- real processes ----------------------------------------------------------------------------------------------
def command(tmp_path: Path, *words: str, **options) -> subprocess.Popen:
    here = {"PYTHONPATH": f"{CHECKOUT}:{os.environ.get('PYTHONPATH', '')}", "PYTHONUNBUFFERED": "1"}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen(
        [sys.executable, "-m", "rlcli", *words], cwd=tmp_path, env={**os.environ, **here}, **options
    )


def wait_for(path: Path, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.01)


def test_a_real_process_stops_on_sigterm_and_the_printed_command_ends_as_if_nothing_had_been(rlcli, tmp_path, whole):
    words = ["train", "run.dir=r", *SHORT]
    process = command(tmp_path, *words)
    wait_for(tmp_path / "r" / "checkpoints" / "checkpoint_000001")
    process.send_signal(signal.SIGTERM)
    asked = time.monotonic()
    _, err = process.communicate(timeout=300)
    assert process.returncode in (75, 0) and time.monotonic() - asked < 100
    if process.returncode == 75:
        typed = re.search(r"Resume with: rlcli (.+)$", err.strip().splitlines()[-1])
        answer = rlcli(*typed[1].split())  # in another process than the one that was stopped: this one
        assert "Traceback" not in answer.err and answer.code == 0
    assert learned(tmp_path / "r") == whole[0]


def test_a_real_process_that_is_still_importing_stops_at_once(tmp_path):
    process = command(tmp_path, "train", "run.dir=r", *SHORT)
    time.sleep(0.6)  # inside the imports of hydra or torch, which take seconds
    process.send_signal(signal.SIGTERM)
    asked = time.monotonic()
    _, err = process.communicate(timeout=300)
    assert process.returncode == 75 and time.monotonic() - asked < 50 and "Traceback" not in err
    assert ("no run was going on" in err) != (tmp_path / "r").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_no_module_can_swallow_a_signal_that_comes_while_it_is_imported(tmp_path, number, code):
    (tmp_path / "stubborn.py").write_text(
        f"import os\ntry:\n    os.kill(os.getpid(), {int(number)})\nexcept BaseException:\n    print('went on')\n"
    )
    words = ["train", "--import", "stubborn", "run.dir=r", *SHORT]
    ended, out, err = forked(f"import sys\nfrom rlcli.cli.main import main\nsys.exit(main({words}))", tmp_path)
    assert (ended, out) == (code, "") and "Traceback" not in err and not (tmp_path / "r").exists()


def test_ctrl_c_twice_on_a_terminal_ends_with_130_at_once(tmp_path):
    words = [
        "train",
        "run.dir=r",
        *SHORT,
        "total_frames=10000000",
        "collector.frames_per_batch=1024",
        "optim.epochs=5000",
    ]
    pid, ours = pty.fork()  # the child leads a session whose terminal this is, and need not import anything again
    if pid == 0:
        try:
            os.chdir(tmp_path)
            sys.stdin, sys.stdout, sys.stderr = (open(fd, "rww"[fd], closefd=False) for fd in range(3))  # noqa: SIM115
            torch.set_num_threads(1)
            os._exit(main(words))
        finally:
            os._exit(1)
    written, ended = bytearray(), []  # what it said, and its status

    def is_over() -> bool:
        gone, status = os.waitpid(pid, os.WNOHANG) if not ended else (0, 0)
        ended.extend([status] if gone else [])
        return bool(ended)

    def read_until(enough, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not enough():
            assert time.monotonic() < deadline, bytes(written[-2000:])
            if select.select([ours], [], [], 0.05)[0]:
                try:
                    written.extend(os.read(ours, 4096))
                except OSError:  # the other side is closed
                    return

    read_until(lambda: b"threads 1" in written, 300)
    time.sleep(0.3)  # into the first update, which would take minutes
    os.write(ours, b"\x03")
    read_until(lambda: b"stopping after this batch" in written, 100)
    asked = time.monotonic()
    os.write(ours, b"\x03")
    read_until(is_over, 100)
    while not is_over() and time.monotonic() - asked < 100:
        time.sleep(0.02)
    assert ended and os.waitstatus_to_exitcode(ended[0]) == 130, "the update would have taken minutes"
    os.close(ours)
    assert b"Traceback" not in written and open_run(tmp_path / "r").status == "interrupted"


@pytest.mark.slow
@pytest.mark.parametrize("k", range(10))
def test_ten_real_processes_stopped_at_random_moments(tmp_path, whole, k):
    moments = random.Random(SEED + 100 + k)
    words = ["train", "run.dir=r", *SHORT]
    process = command(tmp_path, *words)
    time.sleep(moments.uniform(0.2, 6.0))
    process.send_signal(moments.choice([signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGKILL]))
    process.communicate(timeout=300)
    saved = checkpoint.FOLDERS.paths(tmp_path / "r" / "checkpoints")
    if not saved:
        return
    again = command(tmp_path, "resume", "r")
    _, err = again.communicate(timeout=300)
    assert again.returncode == 0, err
    assert learned(tmp_path / "r") == whole[0], f"seed {SEED + 100 + k}"
