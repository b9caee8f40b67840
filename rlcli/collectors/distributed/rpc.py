"""`RPCCollector`: `DistributedCollector` over torch.distributed.rpc, an order being a call."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import torch
from torch.distributed import rpc

from rlcli.collectors.distributed.distributed import DistributedCollector
from rlcli.collectors.distributed.launch import SERVE, Launcher, Peer
from rlcli.processes.messages import flat, split
from rlcli.processes.remote_group import Answer, Gone, RemoteWorker

_EVERY = 1.0  # seconds between two looks at whether rank 0 is there
_worker: RemoteWorker  # of this process, where it serves
_ended = threading.Event()


class RPCRemote:
    """Run workers as peers of an RPC group: a `Remote`. Arrays go as one flat tensor, which RPC sends as it lies."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        try:
            launcher.begin()
            _join(launcher.own)
        except BaseException:
            launcher.close()
            raise

    def start(self, index: int) -> int:
        """Return the rank of a worker."""
        return index + 1

    def submit(self, worker: int, turn: int, kind: int, body: bytes, carried: Mapping[str, Any]) -> Future[Answer]:
        """Have a worker carry out an order; see `Remote.submit`."""
        answer: Future[Answer] = Future()
        there = rpc.rpc_async(_name(worker), _carry_out, (turn, kind, body, dict(carried)), timeout=0)

        def come(done: Any) -> None:
            try:
                how, given, sizes, piece = done.value()
            except RuntimeError:
                answer.set_exception(Gone(self._launcher.how_it_ended(worker)))
                return
            answer.set_result((how, given, split(piece.numpy(), sizes)))

        there.add_done_callback(come)
        return answer

    def carry(self, message: bytes) -> torch.Tensor:
        """Return a message as orders take it."""
        return torch.frombuffer(bytearray(message), dtype=torch.uint8)

    def kill(self, worker: int) -> None:
        """End a worker at once, where its launcher can."""
        self._launcher.kill(worker)

    def close(self) -> None:
        """End all workers, and leave the group."""
        for rank in range(1, self._launcher.own.size):
            with contextlib.suppress(RuntimeError):  # it has ended
                rpc.rpc_async(_name(rank), _end, timeout=0)
        self._launcher.close()
        with contextlib.suppress(RuntimeError):  # peers that have ended
            rpc.shutdown(graceful=False)


def _name(rank: int) -> str:
    return f"rank{rank}"


def _join(peer: Peer) -> None:
    where = "env://" if peer.file is None else f"file://{peer.file}.rpc"
    options = rpc.TensorPipeRpcBackendOptions(init_method=where, rpc_timeout=peer.timeout, **peer.settings)
    rpc.init_rpc(_name(peer.rank), rank=peer.rank, world_size=peer.size, rpc_backend_options=options)


def serve(peer: Peer) -> None:
    """Carry out the orders of rank 0 until it says that there are no more, or ends."""
    global _worker
    peer.store()
    _worker = RemoteWorker(peer.target)
    _join(peer)
    try:
        while not _ended.wait(_EVERY):
            rpc.rpc_sync(_name(0), int, timeout=peer.timeout)
    except RuntimeError:  # rank 0 has ended
        pass
    finally:
        _worker.close()
        rpc.shutdown(graceful=False)


def _end() -> None:
    _ended.set()


def _carry_out(turn: int, kind: int, body: bytes, carried: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
    messages: dict[str, Any] = {name: x.numpy().data for name, x in carried.items()}
    how, answer, arrays = _worker.carry_out(turn, kind, body, messages)
    return how, answer, [array.nbytes for array in arrays], torch.from_numpy(flat(arrays))


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
