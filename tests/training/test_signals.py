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

import pytest

from rlcli.training.signals import StopSignals

BOTH = (signal.SIGTERM, signal.SIGINT)


@pytest.mark.parametrize(("number", "reason"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")])
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


def test_the_handlers_before_are_put_back():
    before = [signal.getsignal(number) for number in BOTH]
    with pytest.raises(RuntimeError), StopSignals(""):
        assert [signal.getsignal(number) for number in BOTH] != before
        raise RuntimeError
    assert [signal.getsignal(number) for number in BOTH] == before


def test_a_signal_that_was_ignored_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopSignals("") as stop:
            signal.raise_signal(signal.SIGINT)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGINT, before)


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
        "import time; from rlcli.training.signals import StopSignals\n"
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
        "import signal; from rlcli.training.signals import StopSignals\n"
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
