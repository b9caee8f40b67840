"""Stopping on request: once is safe, Ctrl-C twice is now, and handlers are put back."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading

import gymnasium as gym
import numpy as np
import pytest
from face import refused

from rlcli.envs import GymEnv, SerialEnv
from rlcli.errors import EnvError, StoppedSafely
from rlcli.runs.signals import BeforeTheRun, StopSignals

ALL = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGHUP"), (signal.SIGINT, "Ctrl-C")]
)
def test_the_first_signal_only_raises_the_flag(number, reason, capfd):
    with StopSignals() as stop:
        assert not stop.requested
        signal.raise_signal(number)
        assert stop.requested and stop.reason == reason
    assert capfd.readouterr().err.count("stopping after this batch") == 1


def test_a_second_ctrl_c_stops_now():
    with pytest.raises(KeyboardInterrupt), StopSignals("") as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
        signal.raise_signal(signal.SIGINT)


def test_sigterm_may_be_repeated_and_does_not_count_as_a_ctrl_c(capfd):
    with StopSignals() as stop:
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert stop.reason == "SIGTERM"
    assert capfd.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("make", [OSError, EnvError])
def test_what_other_code_makes_of_a_stop_before_a_run_is_that_stop(make):
    with refused(StoppedSafely, "stopped began"), StopSignals("") as stop:
        with pytest.raises(make, match="of its own"), stop.at_once(lambda: "type this"):
            raise make("of its own")  # nobody asked for a stop
        with stop.at_once(lambda: "type this"):
            try:
                signal.raise_signal(signal.SIGINT)
            except StoppedSafely as error:
                raise make("another") from error


@pytest.mark.parametrize("replayed", [False, True])
def test_a_stop_in_a_first_try_or_a_replay_of_an_env_is_no_fault_of_the_env(replayed):
    class Interrupted(gym.Wrapper):
        left = 10**6

        def step(self, action):
            Interrupted.left -= 1
            if Interrupted.left == 0:
                signal.raise_signal(signal.SIGINT)
            return self.env.step(action)

    lanes = SerialEnv(1, lambda: GymEnv("CartPole-v1", wrappers=[Interrupted])).vec_env
    lanes.seed(0)
    with pytest.raises(StoppedSafely), StopSignals("") as stop, stop.at_once(lambda: "again"):
        Interrupted.left = 3
        if replayed:
            rows = {"observation": [np.zeros((1, 4), np.float32)] * 2}
            lanes.restart({"observation": rows["observation"][0]}, [0])
            lanes.history += [np.zeros(1, np.int64)] * 5
            lanes.replay({0: 5})
        else:
            lanes.is_replayable()
    assert Interrupted.left == 0


def test_the_handlers_before_are_put_back():
    before = [signal.getsignal(number) for number in ALL]
    with pytest.raises(RuntimeError), StopSignals(""):
        assert [signal.getsignal(number) for number in ALL] != before
        raise RuntimeError
    assert [signal.getsignal(number) for number in ALL] == before


@pytest.mark.parametrize("number", ALL)
def test_a_signal_that_was_ignored_stays_ignored(number):
    before = signal.signal(number, signal.SIG_IGN)  # as a background job has Ctrl-C, and nohup SIGHUP
    try:
        with BeforeTheRun(), StopSignals("") as stop:
            signal.raise_signal(number)
            assert not stop.requested
    finally:
        signal.signal(number, before)


def in_a_terminal_that_closes(code):
    """The exit code of a program that prints "up", and whose terminal is then closed."""
    ours, theirs = pty.openpty()

    def take_the_terminal():
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=take_the_terminal
    )
    os.close(theirs)
    try:
        assert os.read(ours, 10).startswith(b"up")
        os.close(ours)
        return process.wait(20)
    finally:
        process.kill()


def test_a_closed_terminal_is_a_safe_stop_that_may_go_on_writing():
    code = (
        "import time; from rlcli.runs.signals import StopSignals\n"
        "with StopSignals() as stop:\n"
        "    print('up', flush=True)\n"
        "    while not stop.requested: time.sleep(0.01)\n"
        "    print('saving', flush=True)\n"
        "raise SystemExit(75 if stop.reason == 'SIGHUP' else 1)"
    )
    assert in_a_terminal_that_closes(code) == 75


def test_a_terminal_closed_before_the_run_ends_the_process_safely():
    code = (
        "import time; from rlcli.runs.signals import BeforeTheRun\n"
        "with BeforeTheRun():\n"
        "    print('up', flush=True)\n"
        "    while True: time.sleep(0.05)\n"
    )
    assert in_a_terminal_that_closes(code) == 75


def test_outside_the_main_thread_nothing_is_installed():
    seen = []

    def work() -> None:
        with StopSignals("") as stop:
            seen.append((stop.requested, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, signal.getsignal(signal.SIGINT))]


def test_a_sleeping_process_stops_safely_on_sigterm():
    code = (
        "import time; from rlcli.runs.signals import StopSignals\n"
        "with StopSignals('') as stop:\n"
        "    print('up', flush=True)\n"
        "    while not stop.requested: time.sleep(0.01)\n"
        "raise SystemExit(75)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"up\n"
        process.terminate()
        assert process.wait(10) == 75


def test_over_a_live_view_the_notice_takes_its_last_line():
    code = (
        "import signal; from rlcli.runs.signals import StopSignals\n"
        "with StopSignals('wait ' * 40) as stop:\n"
        "    stop.in_place = True\n"
        "    signal.raise_signal(signal.SIGTERM)"
    )
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    subprocess.run([sys.executable, "-c", code], stderr=theirs, check=True)
    written = os.read(ours, 1000).decode()
    os.close(ours)
    os.close(theirs)
    assert written.startswith("\r\x1b[2Kwait") and "\n" not in written
    assert len(written.removeprefix("\r\x1b[2K")) == 59
