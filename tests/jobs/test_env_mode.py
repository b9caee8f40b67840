"""`env.mode=auto` says what it chose and why, keeps to it, and changes no frame; processes that fail are replaced."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from face import Reporter, build_env, configure, refused
from gymnasium import spaces

from rlcli.build import env_mode, resume, train
from rlcli.build.env_mode import settled
from rlcli.envs import GymEnv
from rlcli.errors import ConfigError, EnvError
from rlcli.runs import checkpoint
from rlcli.runs.folder import CHECKPOINTS
from rlcli.runs.signals import BeforeTheRun
from rlcli.vec_envs.gym_vec_env import GymVecEnv
from tests.bench.bare_processes import busy


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


class Choosy(Busy):
    """One of five actions is allowed, another one each time, and episodes are of one step; keeps count of its likes."""

    action_space = spaces.Discrete(5, start=2)
    made = closed = 0

    def __init__(self, seconds=0.0) -> None:
        super().__init__(seconds)
        type(self).made += 1

    def _info(self):
        self.allowed = int(self.np_random.integers(5))
        return {"action_mask": np.arange(5) == self.allowed}

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], self._info()

    def step(self, action):
        assert action == 2 + self.allowed, "not allowed"
        self.t = 9
        return *super().step(action)[:4], self._info()

    def close(self):
        type(self).closed += 1


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
    gym.register("Choosy-v0", Choosy)
    gym.register("Served-v0", Served)
    Choosy.made = Choosy.closed = 0
    monkeypatch.setattr(env_mode, "cores", lambda: 2)
    yield
    gym.registry.pop("Busy-v0")
    gym.registry.pop("Choosy-v0")
    gym.registry.pop("Served-v0")


def tried(*words: str) -> tuple[str, str]:
    cfg, lines, first = settled(configure("train", list(words)))
    first.close()
    return cfg.env.mode, " ".join(lines)


def never(*_):
    raise AssertionError("this is not to be measured")


def takes(monkeypatch, wall: float, cpu: float | None = None) -> None:
    """Have steps be measured as this."""
    monkeypatch.setattr(GymVecEnv, "pace", lambda *_: (wall, wall if cpu is None else cpu))


@pytest.mark.parametrize(
    ("num", "wall", "cpu", "cores", "processes", "said"),
    [
        (8, 1e-3, 1e-3, 2, 2, "parallel: 8 envs take 4.0 ms a step in 2 processes, 8.0 ms in one"),
        (8, 2e-5, 2e-5, 2, 1, "serial: 8 envs take 160 us a step in one process, 130 us in 2 (too little gained: "),
        (8, 1e-3, 1e-3, 1, 1, "serial: 8 envs take 8.0 ms a step in one process"),
        (8, 5e-3, 1e-4, 2, 8, "parallel: 8 envs take 5.3 ms a step in 8 processes, 40.0 ms in one; a step waits for"),
        (8, 5e-3, 1e-4, 1, 8, "in 8 processes"),
        (64, 5e-3, 1e-4, 2, 32, "in 32 processes"),
        (8, 5e-3, 4.5e-3, 2, 2, "in 2 processes"),  # computes, most of the time
    ],
)
def test_a_step_of_all_envs_is_reckoned_from_what_one_computes_and_waits(
    monkeypatch, num, wall, cpu, cores, processes, said
):
    monkeypatch.setattr(env_mode, "cores", lambda: cores)
    count, line = env_mode.chosen(num, wall, cpu)
    assert count == processes and line.startswith("env.mode=auto -> ") and said in line


@pytest.mark.parametrize(
    ("words", "mode", "said"),
    [
        (["env.id=Busy-v0", "env.num=1"], "serial", "env.mode=auto -> serial: there is only one env"),
        (["env.num=4"], "auto", ""),  # decided by the id, whatever the machine
        (["env.num=64"], "auto", "native: CartPole-v1 has an engine that is faster from 64 envs on"),
        (["env.id=Busy-v0", "env.mode=serial"], "serial", ""),
        (["env.id=Busy-v0", "env.mode=parallel"], "parallel", ""),
        (["env.id=Busy-v0", "env.workers=2"], "auto", ""),
        (["env.id=Busy-v0", "collector=multi_sync"], "auto", ""),
    ],
)
def test_what_is_said_already_is_not_measured(monkeypatch, words, mode, said):
    monkeypatch.setattr(env_mode, "make_single", never)
    found, line = tried(*words)
    assert found == mode and said in line and bool(said) == bool(line)


def test_an_env_that_waits_gets_a_process_of_its_own(monkeypatch):
    takes(monkeypatch, 5e-3, 1e-4)
    cfg, _, first = settled(configure("train", ["env.id=Busy-v0"]))
    first.close()
    assert (cfg.env.mode, cfg.env.workers, cfg.env.caller_steps) == ("parallel", 7, "true")


def test_waiting_is_told_from_computing():
    lanes = GymEnv(Busy(0.002)).vec_env
    wall, cpu = lanes.pace(6, 1.0)
    assert wall >= 0.002 and wall - cpu >= 0.0018
    count = busy(2000).make()
    wall, cpu = GymEnv(count).vec_env.pace(6, 1.0)
    assert cpu >= 0.5 * wall


@pytest.mark.parametrize("wall", [None, 1e-3])
def test_the_env_that_is_tried_is_the_first_of_the_run_and_gets_what_it_allows(monkeypatch, wall):
    if wall is not None:
        GymEnv(Choosy()).vec_env.pace(32, 1.0)
        takes(monkeypatch, wall)
    Choosy.made = Choosy.closed = 0
    cfg, _, first = settled(configure("train", ["env.id=Choosy-v0", "env.num=4"]))
    env = build_env(dataclasses.replace(cfg.env, start_method="fork"), first=first.take())
    assert cfg.env.mode == ("serial" if wall is None else "parallel")
    env.set_seed(0)
    assert env.vec_env.is_replayable() and Choosy.made == (4 if wall is None else 2)  # the others are elsewhere
    env.close()
    first.close()
    assert Choosy.closed == Choosy.made


def test_an_env_that_fails_says_so_itself_and_is_closed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EnvError, match=r"raised in step \(Busy-v0, env 0, step 1 of a trial run.*no arm"):
        train(configure("train", ["env.id=Busy-v0", "env.kwargs={seconds: -1}"]))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("becomes", [None, OSError])
def test_a_stop_while_an_env_is_tried_is_no_fault_of_the_env(monkeypatch, number, becomes):
    def stopped(self, action):
        try:
            signal.raise_signal(number)
        except BaseException as error:
            raise error if becomes is None else becomes("what code of others makes of it") from error

    monkeypatch.setattr(Busy, "step", stopped)
    ends = KeyboardInterrupt if number == signal.SIGINT else SystemExit
    with pytest.raises(ends), BeforeTheRun():
        tried("env.id=Busy-v0", "env.num=2")


def test_trying_draws_nothing_from_the_global_streams():
    torch.manual_seed(0), np.random.seed(0)
    expected = torch.rand(1), np.random.rand()
    torch.manual_seed(0), np.random.seed(0)
    tried("env.id=Busy-v0")
    assert (torch.rand(1), np.random.rand()) == expected


def test_a_run_says_what_was_chosen_keeps_it_and_is_the_run_of_one_process(short_run, monkeypatch, capsys):
    takes(monkeypatch, 1e-3)
    auto = short_run("env.id=Busy-v0", "total_frames=1024", "run.dir=auto", "console=plain")
    assert "env.mode=auto -> parallel: 8 envs take 4.0 ms a step" in capsys.readouterr().out
    assert json.loads((auto.path / "config.json").read_text())["env"]["mode"] == "parallel"
    serial = short_run("env.id=Busy-v0", "total_frames=1024", "env.mode=serial", "run.dir=serial")
    one, other = (checkpoint.load_latest(run.path / CHECKPOINTS).state["policy"] for run in (auto, serial))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    more = [resume(each, ["total_frames=1536", "console=plain", *words])
            for each, words in (("auto", []), ("serial", ["env.mode=parallel"]))]  # fmt: skip
    assert all(run.summary["frames"] == 1536 for run in more)
    assert "env.mode=auto" not in capsys.readouterr().out


def test_processes_that_fail_are_replaced_and_the_report_tells(short_run, tmp_path, monkeypatch):
    shown, snapshot = [], Reporter.snapshot
    monkeypatch.setattr(Reporter, "snapshot", lambda self: shown.append(found := snapshot(self)) or found)
    words = ["env.id=Busy-v0", "env.mode=parallel", "env.caller_steps=auto", "env.per_worker=4",
             f"env.kwargs={{marker: {tmp_path / 'ended'}}}", "env.step_timeout=60"]  # fmt: skip
    words += ["collector.on_worker_error=restart", "total_frames=1536"]
    run = short_run(*words, "run.dir=r", "console=plain")
    assert shown[-1].restarts == 1 and shown[0].restarts == 0
    assert run.summary["status"] == "done"
    found = run.summary["env_workers"]
    assert sum(each["restarts"] for each in found) == 1 and sum(each["lost_frames"] for each in found) == 4


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["collector.on_worker_error=restart"], "on_worker_error=restart is for worker processes, and there are none"),
        (["env.per_worker=2"], "env.per_worker needs worker processes"),
        (["env.workers=2", "env.per_worker=2"], "both say how many processes"),
        (["env.mode=parallel", "env.per_worker=9"], "use env.per_worker=8 at most"),
        (["env.mode=parallel", "collector=multi_sync"], "env.mode=parallel steps the envs of one process"),
        (
            ["env.mode=parallel", "env.caller_steps=true", "collector.on_worker_error=restart"],
            "cannot be replaced",
        ),
        (["env.workers=8", "env.caller_steps=true"], "use env.workers=7 at most"),
        (["env.id=ALE/Pong-v5", "env.mode=native"], "use env=atari, or env.mode=serial"),
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
    few = ["env.num=4", "total_frames=1024", "run.eval_episodes=2"]
    short_run("env.id=Served-v0", *few, *settings, "run.dir=served", *words)
    noted = [*map(int, Path(log).read_text().split())]
    assert {5005 + index for index in range(6)} <= {*noted}
    opened: set[int] = set()
    for port in noted:
        assert (port > 0) == (abs(port) not in opened)
        opened ^= {abs(port)}
    assert not opened


def test_a_native_engine_has_no_numbers(short_run):
    with refused(ConfigError, "native"):
        short_run("env.mode=native", "env.num=2", 'env.kwargs.x="{index}"', "run.dir=native")


def test_workers_are_counted_once_and_a_resume_on_other_cores_goes_on_with_as_many(short_run, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
    short_run("collector=multi_sync", "collector.num_workers=auto", "env.num=4", "run.dir=auto")
    assert json.loads(Path("auto/config.json").read_text())["collector"]["num_workers"] == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    more = resume("auto", ["total_frames=5120"])
    assert more.summary["frames"] == 5120 and len(more.summary["workers"]) == 3
