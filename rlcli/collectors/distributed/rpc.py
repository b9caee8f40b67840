"""`RPCCollector`: `DistributedCollector` over torch.distributed.rpc, an order being a call."""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed import rpc
from torch.futures import Future

from rlcli.collectors.distributed.distributed import DistributedCollector
from rlcli.collectors.distributed.group_remote import END, GroupRemote, Message, answer
from rlcli.collectors.distributed.launch import SERVE, Peer
from rlcli.processes.messages import flat, split
from rlcli.processes.remote_group import RemoteWorker

_EVERY = 1.0  # seconds between two looks at whether rank 0 is there
_orders: queue.SimpleQueue[tuple[Message, Future[Any]]] = queue.SimpleQueue()  # of this process, where it serves


class RPCRemote(GroupRemote):
    """Run workers as peers of an RPC group: a `Remote`. Arrays go as one flat tensor, which RPC sends as it lies."""

    framework = "torch.distributed.rpc"

    @staticmethod
    def _is_in_group() -> bool:
        try:
            return bool(rpc.get_worker_info())
        except RuntimeError:
            return False

    @staticmethod
    def _join(peer: Peer, store: Any) -> None:
        where = "env://" if peer.file is None else f"file://{peer.file}.rpc"
        options = rpc.TensorPipeRpcBackendOptions(init_method=where, rpc_timeout=peer.timeout, **peer.settings)
        # of groups so far, which RPC supposes to be the same in all processes: new ones would wait for ever
        rpc._init_counter = 0
        rpc.api._all_gather_sequence_id.clear()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You are using a Backend")  # which RPC does itself
            rpc.init_rpc(_name(peer.rank), rank=peer.rank, world_size=peer.size, rpc_backend_options=options)

    @staticmethod
    def _leave() -> None:
        rpc.shutdown(graceful=False)

    def _link(self, rank: int) -> Any:
        return _CallLink(_name(rank))


class _CallLink:
    """Send messages to one peer, as calls, and receive what they return."""

    def __init__(self, name: str) -> None:
        self._name = name

    def send(self, message: Message) -> None:
        self._answer: Any = rpc.rpc_async(self._name, _carry_out, (_sent(message),), timeout=0)

    def receive(self) -> Message:
        return _received(self._answer.wait())


def _name(rank: int) -> str:
    return f"rank{rank}"


def _sent(message: Message) -> tuple[Any, ...]:
    return *message[:3], [array.nbytes for array in message.arrays], torch.from_numpy(flat(message.arrays))


def _received(sent: tuple[Any, ...]) -> Message:
    kind, turn, body, sizes, piece = sent
    return Message(kind, turn, body, split(piece.numpy(), sizes))


@rpc.functions.async_execution
def _carry_out(sent: tuple[Any, ...]) -> Future[Any]:
    come = Future[Any]()
    _orders.put((_received(sent), come))
    return come


def serve(peer: Peer) -> None:
    """Carry out the orders of rank 0 until it says that there are no more, or ends.

    Calls come on threads of RPC's, several at once; they are carried out here, one after the other.
    """
    peer.meet(RPCRemote._join)
    worker, over = RemoteWorker(peer.target), threading.Event()
    threading.Thread(target=_look_at_learner, args=(peer, over), daemon=True).start()
    try:
        while True:
            order, come = _orders.get()
            if order.kind == END:
                break
            come.set_result(_sent(answer(worker, order)))
    finally:
        worker.close()
        over.set()
        rpc.shutdown(graceful=False)


def _look_at_learner(peer: Peer, over: threading.Event) -> None:
    try:
        while not over.wait(_EVERY):
            rpc.rpc_sync(_name(0), int, timeout=0)
    except RuntimeError:  # it has ended
        _orders.put((Message(END, 0, b""), Future[Any]()))
        peer.leave(over)


class RPCCollector(DistributedCollector):
    """Collect by workers that are called over `torch.distributed.rpc`; see `DistributedCollector`.

    Parameters
    ----------
    tensorpipe_options : mapping, optional
        Of `TensorPipeRpcBackendOptions`.
    """

    _serve, _remote = SERVE["rpc"], RPCRemote

    def __init__(
        self, create_env_fn: Any, policy: Any = None, *, tensorpipe_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        self._settings = dict(tensorpipe_options or {})
        super().__init__(create_env_fn, policy, **options)


RPCDataCollector = RPCCollector  # an older spelling
