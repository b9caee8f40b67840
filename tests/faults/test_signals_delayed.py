"""Signals whose handlers raise, as those of clusters' schedulers do, while rows are written: rows and files agree."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from disks import CountingDisk
from rings import batch, begin, equal, live, wrong

from rlcli.processes.process import DELAYED, uninterrupted


class SignallingDisk(CountingDisk):
    """The process gets a signal before call number `n`."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.n = number, 0

    def at(self, call, path):
        super().at(call, path)
        if len(self.calls) == self.n:
            os.kill(os.getpid(), self.number)


def ends(number, frame):
    raise SystemExit(128 + number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGALRM, signal.SIGINT])
def test_a_signal_within_a_write_comes_after_it(tmp_path, number):
    before = signal.signal(number, ends)
    try:
        n, goes_on = 0, True
        while goes_on:
            n += 1
            ring = begin(tmp_path / str(n), disk := SignallingDisk(number))
            for i in range(7):
                ring.extend(batch(i))
            disk.n = len(disk.calls) + n
            try:
                ring.extend(batch(7))
                goes_on = False
            except SystemExit:
                assert signal.getsignal(number) is ends
            stored, said = live(ring), disk.calls[disk.n - 1 :][:1]
            disk.n = 0
            ring.storage.close(ring.content)
            again = begin(tmp_path / str(n))
            assert equal(live(again), stored), said
            again.storage.close(again.content)
            assert wrong(tmp_path / str(n)) == [], said
        assert n > 5
    finally:
        signal.signal(number, before)


def test_each_handler_is_called_once_in_turn_and_back_in_its_place():
    came = []
    before = {number: signal.signal(number, lambda got, frame: came.append(got)) for number in DELAYED}
    handlers = [signal.getsignal(number) for number in DELAYED]
    try:
        with uninterrupted():
            with uninterrupted():
                for number in DELAYED:
                    signal.raise_signal(number)
            assert came == []
        assert came == [*DELAYED] and [signal.getsignal(number) for number in DELAYED] == handlers
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_what_nobody_handles_is_left_as_it_is():
    before = {number: signal.signal(number, signal.SIG_IGN) for number in DELAYED}
    try:
        with uninterrupted():
            assert {signal.getsignal(number) for number in DELAYED} == {signal.SIG_IGN}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_another_thread_leaves_the_handlers_alone():
    seen = []

    def write():
        with uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    handler = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert seen == [handler]
