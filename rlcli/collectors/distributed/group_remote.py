"""Workers as ranks of a torch.distributed group: orders and answers are sent from point to point.

A message is its sizes, then one flat piece: a sealed body, and behind it the bytes of its arrays. A thread for each
worker sends an order and waits for the answer: gloo tells of a peer's end only to who receives from that very peer.
"""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from rlcli.arguments import refuse
from rlcli.collectors.distributed.launch import FOR_EVER, Launcher, Peer
from rlcli.errors import DamagedDataError, in_words
from rlcli.processes.messages import Seal, flat, split
from rlcli.processes.process import environment
from rlcli.processes.remote_group import Answer, Gone, RemoteWorker

_SIZES = 4  # of a message: kind, turn, bytes of the body, bytes in all
END = -1  # kind of the last order
_JOIN = 5.0  # seconds for a thread to end in, whose peer cannot be killed


class Message(NamedTuple):
    kind: int
    turn: int
    body: bytes
    arrays: Sequence[np.ndarray] = ()


class Link:
    """Send messages to one rank of the group, and receive what it sends."""

    def __init__(self, rank: int, peer: Peer, *, learner: bool) -> None:
        ways = [b"learner", b"worker %d" % (rank if learner else peer.rank)]
        mine, theirs = ways if learner else reversed(ways)
        self._rank, self._mine, self._theirs = rank, Seal(peer.key, mine), Seal(peer.key, theirs)
        self._device = "cuda" if peer.backend == "nccl" else "cpu"

    def send(self, message: Message) -> None:
        sizes = [array.nbytes for array in message.arrays]
        body = self._mine.sealed(message.turn, pickle.dumps((message.kind, message.body, sizes)))
        piece = flat([np.frombuffer(body, np.uint8), *message.arrays])
        self._send(torch.tensor([message.turn, len(body), len(piece)]))
        self._send(torch.from_numpy(piece))

    def receive(self) -> Message:
        """Return the next message; its arrays are views of memory of its own."""
        turn, length, total = self._received(torch.empty(_SIZES - 1, dtype=torch.int64)).tolist()
        if not 0 <= length <= total:
            raise DamagedDataError("a message does not come from this run", why="its sizes do not fit")
        piece = self._received(torch.empty(total, dtype=torch.uint8)).numpy()
        kind, body, sizes = pickle.loads(self._theirs.opened(turn, piece[:length].tobytes()))
        return Message(kind, turn, body, split(piece[length:], sizes))

    def _send(self, tensor: torch.Tensor) -> None:
        dist.send(tensor.to(self._device), self._rank)

    def _received(self, tensor: torch.Tensor) -> torch.Tensor:
        there = tensor.to(self._device)
        dist.recv(there, self._rank)
        return there.cpu()


class _Rank:
    """One worker, and the thread that waits for its answers."""

    def __init__(self, rank: int, link: Link, launcher: Launcher) -> None:
        self.rank, self._link, self._launcher = rank, link, launcher
        self._orders: queue.SimpleQueue[tuple[Message, Future[Answer]]] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=f"rlcli rank {rank}", daemon=True)
        self.thread.start()

    def order(self, message: Message) -> Future[Answer]:
        future: Future[Answer] = Future()
        self._orders.put((message, future))
        return future

    def _run(self) -> None:
        gone = ""
        while True:
            message, future = self._orders.get()
            if not gone:
                try:
                    self._link.send(message)
                    if message.kind != END:
                        answer = self._link.receive()
                        future.set_result((answer.kind, answer.body, answer.arrays))
                except RuntimeError:
                    gone = self._launcher.how_it_ended(self.rank)
                except DamagedDataError as error:
                    gone = f"sent what is not of this run ({error})"
                except Exception as error:  # who waits would wait for ever
                    gone = f"was lost ({in_words(error)})"
            if message.kind == END:
                return
            if gone:
                future.set_exception(Gone(gone))


class GroupRemote:
    """Run workers as the ranks above 0 of the process's group: a `Remote`; ResourceError where not all of them come."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher, self._ranks = launcher, list[_Rank]()
        try:
            refuse(self._is_in_group(), f"this process is in a {self.framework} group already",
                   why="the collector makes one of its own",
                   fix="Shut down the other one first, or use a RayCollector.")  # fmt: skip
            with environment(launcher.own.interface):
                launcher.begin(self._join)
        except BaseException:
            launcher.close()
            raise

    def start(self, index: int) -> _Rank:
        """Return the rank of a worker; there is one for each index, and never another."""
        self._ranks.append(_Rank(index + 1, self._link(index + 1), self._launcher))
        return self._ranks[-1]

    def submit(self, worker: _Rank, turn: int, kind: int, body: bytes, carried: Mapping[str, Any]) -> Future[Answer]:
        """Have a worker carry out an order; see `Remote.submit`."""
        return worker.order(Message(kind, turn, pickle.dumps((body, [*carried])), [*carried.values()]))

    def carry(self, message: bytes) -> np.ndarray:
        """Return a message as orders take it; it goes to each worker once, with its next one."""
        return np.frombuffer(message, np.uint8)

    def kill(self, worker: _Rank) -> None:
        """End a worker at once, where its launcher can."""
        self._launcher.kill(worker.rank)

    def close(self) -> None:
        """End all workers, and leave the group."""
        for worker in self._ranks:
            worker.order(Message(END, 1 << 62, b""))
        self._launcher.close()
        for worker in self._ranks:
            worker.thread.join(_JOIN)
        if self._is_in_group() and not any(worker.thread.is_alive() for worker in self._ranks):
            self._leave()

    # ---- by framework --------------------------------------------------------------------------------------------
    framework = "torch.distributed"
    _is_in_group = staticmethod(dist.is_initialized)

    @staticmethod
    def _join(peer: Peer, store: Any) -> None:
        dist.distributed_c10d._world.group_count = 0  # else one that was not joined counts, here and nowhere else
        dist.init_process_group(peer.backend, store=store, rank=peer.rank, world_size=peer.size, timeout=FOR_EVER)

    @staticmethod
    def _leave() -> None:
        dist.destroy_process_group()

    def _link(self, rank: int) -> Any:
        return Link(rank, self._launcher.own, learner=True)


def serve(peer: Peer) -> None:
    """Carry out the orders of rank 0 until it says that there are no more, or ends: a thread sees that at once."""
    peer.meet(GroupRemote._join)
    link, worker = Link(0, peer, learner=False), RemoteWorker(peer.target)
    orders, over = queue.Queue[Message | Exception | None](), threading.Event()
    threading.Thread(target=_receive, args=(peer, link, orders, over), daemon=True).start()
    try:
        while isinstance(order := orders.get(), Message):
            link.send(answer(worker, order))
            orders.task_done()
        if order is not None:
            raise order
    except RuntimeError:  # rank 0 has ended
        pass
    finally:
        worker.close()
        over.set()


def _receive(peer: Peer, link: Link, orders: queue.Queue[Message | Exception | None], over: threading.Event) -> None:
    end: Exception | None = None
    try:
        while (order := link.receive()).kind != END:
            orders.put(order)
            if peer.backend != "gloo":  # others send nothing while they receive
                orders.join()
    except Exception as error:
        end = error
    orders.put(end)
    peer.leave(over)


def answer(worker: RemoteWorker, order: Message) -> Message:
    """Have a worker carry out an order."""
    body, names = pickle.loads(order.body)
    carried: dict[str, Any] = {name: array.data for name, array in zip(names, order.arrays, strict=True)}
    how, given, arrays = worker.carry_out(order.turn, order.kind, body, carried)
    return Message(how, order.turn, given, arrays)
