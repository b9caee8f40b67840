"""A transport of the tests: our own worker processes, to and from which everything goes as sealed messages."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
from concurrent.futures import Future

import numpy as np
from face import Channel, Worker

from rlcli.processes.channel import Closed
from rlcli.processes.messages import Seal
from rlcli.processes.remote_group import Gone, RemoteWorker
from rlcli.processes.worker import end

PRELOAD = ["loopback", "test_remote", "rlcli.collectors.workers.worker"]


def work(channel: Channel) -> None:
    """What the workers of this transport run."""
    _, _, key = channel.receive()
    mine, theirs = Seal(key, b"worker"), Seal(key, b"parent")
    worker = RemoteWorker("rlcli.collectors.workers.worker:remote")
    try:
        while True:
            kind, turn, message = channel.receive()
            body, carried = pickle.loads(theirs.opened(turn, message))
            how, answer, arrays = worker.carry_out(turn, kind, body, carried)
            message = pickle.dumps((answer, [array.tobytes() for array in arrays]))
            channel.send(how, turn, mine.sealed(turn, message))
    finally:
        worker.close()


class _Process:
    """A worker process, and a thread that waits for its answers."""

    def __init__(self, start_method: str) -> None:
        self.process = Worker("loopback:work", start_method=start_method, preload=PRELOAD)
        key = os.urandom(32)
        self.process.channel.send(1, 1, key)
        self.mine, self._theirs = Seal(key, b"parent"), Seal(key, b"worker")
        self._futures: dict[int, Future] = {}
        self._lock, self._gone = threading.Lock(), ""
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def answer_to(self, turn: int) -> Future:
        future: Future = Future()
        with self._lock:
            if self._gone:
                raise Gone(self._gone)
            self._futures.setdefault(turn, future)
            return self._futures[turn]

    def _run(self) -> None:
        try:
            while True:
                how, turn, message = self.process.channel.receive()
                answer, arrays = pickle.loads(self._theirs.opened(turn, message))
                with self._lock:
                    future = self._futures.pop(turn, None)
                if future is not None:
                    future.set_result((how, answer, [np.frombuffer(each, np.uint8) for each in arrays]))
        except Closed:
            with self._lock:
                self._gone = self.process.how_it_ended()
            for future in self._futures.values():
                future.set_exception(Gone(self._gone))


class Loopback:
    """See the top of this file; `count` workers will be asked for."""

    def __init__(self, count: int, start_method: str = "fork") -> None:
        self.count, self.start_method = count, start_method
        self.workers: list[_Process] = []
        self.carried = 0
        self.is_closed = False

    def start(self, index: int) -> _Process:
        self.workers.append(_Process(self.start_method))
        return self.workers[-1]

    def submit(self, worker, turn, kind, body, carried) -> Future:
        future = worker.answer_to(turn)
        message = worker.mine.sealed(turn, pickle.dumps((body, dict(carried))))
        with contextlib.suppress(Closed):  # the future will say so
            worker.process.channel.send(kind, turn, message)
        return future

    def carry(self, message: bytes) -> bytes:
        self.carried += 1
        return message

    def kill(self, worker: _Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.is_closed = True
        for worker in self.workers:
            worker.process.channel.end_both()
        for worker in self.workers:
            worker.thread.join()
        end([worker.process for worker in self.workers], 2.0)
