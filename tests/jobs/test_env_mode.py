"""`env.mode=auto` says what it chose and why, keeps to it, and changes no frame; processes that fail are replaced."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlcli.config.compose import configure
from rlcli.errors import ConfigError
from rlcli.jobs import env_mode, resume
from rlcli.jobs.env_mode import settled
from rlcli.report.reporter import Reporter
from rlcli.runs import checkpoint
from rlcli.runs.folder import CHECKPOINTS
from rlcli.runs.signals import BeforeTheRun


class Busy(gym.Env):
    """Takes `seconds` a step; with `marker`, its process ends where that file is not there yet, and makes it."""

    observation_space = spaces.Box(-1, 1, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, seconds=0.0, marker=None) -> None:
        self.seconds, self.marker, self.taken = seconds, marker, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._show(), {}

    def _show(self):
        return self.np_random.uniform(-1, 1, 3).astype(np.float32)

    def step(self, action):
        self.t, self.taken = self.t + 1, self.taken + 1
        if self.seconds > 0:
            time.sleep(self.seconds)
        if self.seconds < 0:
            raise OSError("no arm")
        if self.marker is not None and self.taken == 100:
            with contextlib.suppress(FileExistsError), open(self.marker, "x"):  # one of several
                os._exit(9)
        return self._show(), float(action), False, self.t >= 10, {}


class Deaf(Busy):
    """Goes on with a step of half a minute whatever is raised there, or whatever exception is; but only once."""

    def __init__(self, to_all: bool) -> None:
        super().__init__()
        self.caught = BaseException if to_all else Exception

    def step(self, action):
        for _ in range(300):
            try:
                time.sleep(0.1)
            except self.caught:
                self.caught = Exception
        return super().step(action)


class Served(Busy):
    """Writes down when it opens its port, and when it closes it; no two may be open at a time."""

    def __init__(self, port, log, name="") -> None:
        super().__init__()
        assert isinstance(port, int) and name in ("", f"arm-{port - 5005}")
        self.port, self.log = port, log
        self.note("+")

    def note(self, sign):
        if self.port:
            with open(self.log, "a") as file:
                file.write(f"{sign}{self.port} ")
        self.port *= sign == "+"

    def close(self):
        self.note("-")


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    gym.register("Busy-v0", Busy)
    gym.register("Deaf-v0", Deaf)
    gym.register("Served-v0", Served)
    monkeypatch.setattr(env_mode, "cores", lambda: 2)
    yield
    gym.registry.pop("Busy-v0")
    gym.registry.pop("Deaf-v0")
    gym.registry.pop("Served-v0")


def chosen(*words: str) -> tuple[str, str]:
    cfg, lines = settled(configure("train", list(words)))
    return cfg.env.mode, " ".join(lines)


def never(*_):
    raise AssertionError("this is not to be measured")


@pytest.mark.parametrize(
    ("step", "crossing", "mode", "said"),
    [
        (1e-3, 2e-5, "parallel", "a step takes 1.0 ms, an order to a process 20 us: 8 envs on 2 cores 4.0 ms in place"),
        (2e-5, None, "serial", "a step takes 20 us: too little for processes"),
        (1e-4, 3e-4, "serial", "an order to a process 300 us: 8 envs on 2 cores 700 us in place of 800 us"),
    ],
)
def test_it_weighs_a_step_against_a_crossing(monkeypatch, step, crossing, mode, said):
    monkeypatch.setattr(env_mode, "_seconds_a_step", lambda cfg: step)
    monkeypatch.setattr(env_mode, "_seconds_a_crossing", never if crossing is None else lambda cfg: crossing)
    found, line = chosen("env.id=Pendulum-v1")
    assert found == mode and line.startswith(f"env.mode auto: {mode}, since ") and said in line


@pytest.mark.parametrize(
    ("words", "mode", "said"),
    [
        (["env.id=Busy-v0", "env.num=1"], "serial", "there is one env"),
        (["env.num=4"], "auto", ""),  # decided by the id, whatever the machine
        (["env.num=64"], "auto", "native, since CartPole-v1 has an engine that is faster from 64 envs on"),
        (["env.id=Busy-v0", "env.mode=serial"], "serial", ""),
        (["env.id=Busy-v0", "env.mode=parallel"], "parallel", ""),
        (["env.id=Busy-v0", "env.workers=2"], "auto", ""),
        (["env.id=Busy-v0", "collector=multi_sync"], "auto", ""),
    ],
)
def test_what_is_said_already_is_not_measured(monkeypatch, words, mode, said):
    monkeypatch.setattr(env_mode, "_seconds_a_step", never)
    found, line = chosen(*words)
    assert found == mode and said in line and bool(said) == bool(line)


def test_one_core_steps_one_by_one(monkeypatch):
    monkeypatch.setattr(env_mode, "cores", lambda: 1)
    assert chosen("env.id=Busy-v0") == ("serial", "env.mode auto: serial, since there is one core")


def test_a_slow_env_is_found_to_be_slow_and_a_quick_one_quick():
    assert chosen("env.id=Busy-v0", "env.kwargs={seconds: 0.02}")[0] == "parallel"
    assert chosen("env.id=Busy-v0", "env.num=2")[0] == "serial"


def test_an_env_is_tried_once_a_process(monkeypatch):
    words = ["env.id=Busy-v0", "env.kwargs={seconds: 0.011}"]
    first = chosen(*words)
    monkeypatch.setattr(env_mode, "configured", never)
    assert chosen(*words) == first and "could not" not in first[1]


def test_an_env_that_fails_or_hangs_is_left_to_the_run(monkeypatch):
    assert chosen("env.id=Busy-v0", "env.kwargs={seconds: -1}") == (
        "serial", "env.mode auto: serial, since a first try of the env failed",
    )  # fmt: skip
    monkeypatch.setattr(env_mode, "LIMIT", 0.2)
    began = time.monotonic()
    mode, line = chosen("env.id=Busy-v0", "env.kwargs={seconds: 30}")
    assert mode == "serial" and "longer than 0.2 s" in line and time.monotonic() - began < 20


@pytest.mark.parametrize("to_all", ["true", "false"])
def test_a_try_is_given_up_though_the_env_catches_what_is_raised(monkeypatch, to_all):
    monkeypatch.setattr(env_mode, "LIMIT", 0.2)
    before, began = signal.getsignal(signal.SIGALRM), time.monotonic()
    mode, line = chosen("env.id=Deaf-v0", f"env.kwargs={{to_all: {to_all}}}")
    assert mode == "serial" and "longer than 0.2 s" in line and time.monotonic() - began < 20
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL) == (0, 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("where", ["_seconds_a_step", "_seconds_a_crossing"])
@pytest.mark.parametrize("becomes", [None, OSError])
def test_a_stop_while_an_env_is_tried_is_no_fault_of_the_env(monkeypatch, number, where, becomes):
    def stopped(cfg):
        try:
            signal.raise_signal(number)
        except BaseException as error:
            raise error if becomes is None else becomes("what code of others makes of it") from error

    monkeypatch.setattr(env_mode, "_seconds_a_step", lambda cfg: 0.01)
    monkeypatch.setattr(env_mode, where, stopped)
    ends = KeyboardInterrupt if number == signal.SIGINT else SystemExit
    with pytest.raises(ends), BeforeTheRun():
        chosen("env.id=Busy-v0", "env.num=2")


def test_a_worker_that_cannot_be_tried_says_why(monkeypatch):
    def cannot(cfg):
        raise OSError("no more processes")

    monkeypatch.setattr(env_mode, "_seconds_a_step", lambda cfg: 0.01)
    monkeypatch.setattr(env_mode, "_seconds_a_crossing", cannot)
    monkeypatch.setattr(env_mode, "cores", lambda: 2)
    mode, why = env_mode._measured(configure("train", ["env.id=Acrobot-v1", "env.num=4"]).env)
    assert (mode, why.partition("tried: ")[2]) == ("serial", "OSError: no more processes")


def test_trying_draws_nothing_from_the_global_streams():
    torch.manual_seed(0), np.random.seed(0)
    expected = torch.rand(1), np.random.rand()
    torch.manual_seed(0), np.random.seed(0)
    chosen("env.id=Busy-v0")
    assert (torch.rand(1), np.random.rand()) == expected


def test_a_run_says_what_was_chosen_keeps_it_and_is_the_run_of_one_process(short_run, monkeypatch, capsys):
    monkeypatch.setattr(env_mode, "_seconds_a_step", lambda cfg: 1e-3)
    monkeypatch.setattr(env_mode, "_seconds_a_crossing", lambda cfg: 1e-5)
    auto = short_run("env.id=Busy-v0", "run.dir=auto", "console=plain")
    assert "env.mode auto: parallel, since a step takes 1.0 ms" in capsys.readouterr().out
    assert json.loads((auto.path / "config.json").read_text())["env"]["mode"] == "parallel"
    monkeypatch.setattr(env_mode, "_seconds_a_step", never)
    serial = short_run("env.id=Busy-v0", "env.mode=serial", "run.dir=serial")
    one, other = (checkpoint.load_latest(run.path / CHECKPOINTS).state["policy"] for run in (auto, serial))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    more = [resume(each, ["total_frames=5120", "console=plain", *words])
            for each, words in (("auto", []), ("serial", ["env.mode=parallel"]))]  # fmt: skip
    assert all(run.summary["frames"] == 5120 for run in more)
    assert "env.mode auto" not in capsys.readouterr().out


@pytest.mark.parametrize("caller_steps", ["auto", "false"])
def test_processes_that_fail_are_replaced_and_the_report_tells(short_run, tmp_path, monkeypatch, caller_steps):
    shown, snapshot = [], Reporter.snapshot
    monkeypatch.setattr(Reporter, "snapshot", lambda self: shown.append(found := snapshot(self)) or found)
    words = ["env.id=Busy-v0", "env.mode=parallel", f"env.caller_steps={caller_steps}", "env.per_worker=4",
             f"env.kwargs={{marker: {tmp_path / 'ended'}}}", "env.step_timeout=60"]  # fmt: skip
    run = short_run(*words, "collector.on_worker_error=restart", "run.dir=r", "console=plain")
    assert shown[-1].restarts == 1 and shown[0].restarts == 0
    assert run.summary["status"] == "done"
    found = run.summary["env_workers"]
    assert sum(each["restarts"] for each in found) == 1 and sum(each["lost_frames"] for each in found) == 4


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["collector.on_worker_error=restart"], "on_worker_error=restart is for worker processes, and there are none"),
        (["env.per_worker=2"], "env.per_worker is of worker processes"),
        (["env.workers=2", "env.per_worker=2"], "both say how many processes"),
        (["env.mode=parallel", "env.per_worker=9"], "use env.per_worker=8 at most"),
        (["env.mode=parallel", "collector=multi_sync"], "env.mode=parallel steps envs for one process"),
        (
            ["env.mode=parallel", "env.caller_steps=true", "collector.on_worker_error=restart"],
            "cannot be replaced",
        ),
        (["env.workers=8", "env.caller_steps=true"], "use env.workers=7 at most"),
    ],
)
def test_what_does_not_go_together_is_refused(words, sentence):
    with pytest.raises(ConfigError, match=sentence):
        configure("train", words)


@pytest.mark.parametrize(
    "words",
    [
        ["collector=multi_sync", "collector.num_workers=2"],
        ["collector=async"],
        ["env.mode=serial"],
        ["env.mode=parallel", "env.workers=1", "env.caller_steps=true"],
    ],
)
def test_each_env_has_a_number_of_its_own_and_is_closed(short_run, tmp_path, words):
    """Also beside those of an evaluation, and those that are made to be looked at: no two have one at a time."""
    log = str(tmp_path / "log")
    settings = ['env.kwargs.port="{5005+index}"', 'env.kwargs.name="arm-{index}"', f"env.kwargs.log={log}"]
    short_run("env.id=Served-v0", "env.num=4", *settings, "run.eval_episodes=2", "run.dir=served", *words)
    noted = [*map(int, Path(log).read_text().split())]
    assert {5005 + index for index in range(6)} <= {*noted}
    opened: set[int] = set()
    for port in noted:
        assert (port > 0) == (abs(port) not in opened)
        opened ^= {abs(port)}
    assert not opened


def test_a_native_engine_has_no_numbers(short_run):
    with pytest.raises(ConfigError, match=r"a native engine's envs have no \{index\}"):
        short_run("env.mode=native", "env.num=2", 'env.kwargs.x="{index}"', "run.dir=native")


def test_workers_are_counted_once_and_a_resume_on_other_cores_goes_on_with_as_many(short_run, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
    short_run("collector=multi_sync", "collector.num_workers=auto", "env.num=4", "run.dir=auto")
    assert json.loads(Path("auto/config.json").read_text())["collector"]["num_workers"] == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    more = resume("auto", ["total_frames=5120"])
    assert more.summary["frames"] == 5120 and len(more.summary["workers"]) == 3
