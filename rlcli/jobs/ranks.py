"""The ranks of a learner as processes: rank 0, the command's own, starts the others, and they end with it.

They are started as workers are, and meet by a file in the run folder, over loopback: no port is open to anybody else.
Or torchrun has started them all, on one machine or several, and they meet as it has arranged. Whichever fails first
tells rank 0 why; that is the run's error.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from rlcli.arguments import refuse
from rlcli.errors import ConfigError, ResourceError, RlcliError, StoppedSafely, in_words
from rlcli.learning.ranks import Ranks
from rlcli.processes import process
from rlcli.processes.channel import Channel, packed, unpacked
from rlcli.processes.fork_server import leave
from rlcli.processes.line import Traceback
from rlcli.processes.worker import Worker, end
from rlcli.vec_envs.workers import told

MEETING = "ranks.meeting"
_ORDER, _HERE, _ENDED = "order", "joins {}", "ended {}"  # what ranks say in their store
_EVERY = 0.05  # seconds between two looks at who has come
_CAUSE, _GRACE, _SAVING = 1.5, 1.0, 10.0  # seconds: to find who failed; to end in, after an error, or after a stop
_LONG = timedelta(days=7)  # rank 0 evaluates while the others wait


class RankLost(ResourceError):
    """A rank was left alone: another has ended, and rank 0 says why."""


class Others:
    """The other ranks, as rank 0 sees them: each says in their `store` how it ended; `workers`: those started here."""

    def __init__(self, size: int, workers: Sequence[Worker] = ()) -> None:
        self.size, self.workers = size, workers
        self.store: Any = None

    def cause(self) -> RlcliError | None:
        """Return the error of one that has failed."""
        failed = [rank for rank, worker in enumerate(self.workers, 1) if worker.exit_code()]  # they have said why
        for rank in range(1, self.size):
            if text := self._said(rank):
                return _raised(rank, text)
        for rank in failed:
            return ResourceError(
                f"rank {rank} of the learner {self.workers[rank - 1].how_it_ended()}", where="learner.world_size",
                why="the others cannot go on without it", fix="Where it ran out of memory, the system log says so",
            )  # fmt: skip
        return None

    def look(self) -> None:
        """Raise the error of one that has failed."""
        if (cause := self.cause()) is not None:
            raise cause

    def lost(self, error: Exception) -> Exception:
        """Return the error to raise where a collective failed: why the first of them has ended."""
        why = in_words(error)
        return _awaited(self.cause, _CAUSE) or ResourceError("the ranks of the learner lost their connection", why=why)

    def end(self) -> None:
        """End them, and wait until they have saved what is theirs, where they can."""
        end(self.workers, _SAVING)
        self.store.set(_ENDED.format(0), "")
        if not self.workers and _here("WORLD_SIZE", self.size, self.size) == self.size:
            _awaited(lambda: self.store.check([_ENDED.format(rank) for rank in range(1, self.size)]), _SAVING)

    def _said(self, rank: int) -> str | None:
        return self.store.get(key).decode() if self.store.check([key := _ENDED.format(rank)]) else None


def _awaited(what: Callable[[], Any], seconds: float) -> Any:
    """Return the first true answer within so many seconds, or the last."""
    deadline = time.monotonic() + seconds
    while not (answer := what()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return answer


@contextlib.contextmanager
def started(size: int, backend: str, folder: Path, target: str, order: Mapping[str, Any]) -> Iterator[Ranks]:
    """Start the other ranks, unless torchrun has; yield rank 0's side. They run `target` of themselves and `order`."""
    for left in folder.glob(f"{MEETING}*"):  # by a crash
        left.unlink()
    # no name twice: a FileStore that is let go of late opens its file again, and would read another's for ever
    meeting = folder / f"{MEETING}_{time.time_ns()}"
    grace, ranks, theirs = _SAVING, None, rank_here(size) is not None
    others = Others(size, workers := list[Worker]())
    try:
        for rank in range(1, size) if not theirs else ():
            workers.append(Worker(f"{__name__}:serve_started", preload=[target.partition(":")[0]]))
            workers[-1].channel.send(0, 0, packed((told(), str(meeting), rank, size, target)))
        process.ranks_beside = size - 1
        others.store = _torchrun_store() if theirs else distributed.FileStore(str(meeting), size)
        others.store.set(_ORDER, json.dumps({**order, "backend": backend}))
        while not others.store.check([_HERE.format(rank) for rank in range(1, size)]):
            others.look()
            time.sleep(_EVERY)
        ranks = _met(others.store, 0, size, backend)
        ranks.lost, ranks.look, ranks.end = others.lost, others.look, others.end
        yield ranks
    except BaseException as error:
        grace = _SAVING if isinstance(error, StoppedSafely) else _GRACE
        raise
    finally:
        process.ranks_beside = 0
        end(workers, grace)
        if ranks is not None:  # a collective that was broken off goes on until they have ended
            ranks.close()
        meeting.unlink(missing_ok=True)


def serve_started(channel: Channel) -> None:
    """Join the other ranks, and do what rank 0 orders, in a process that it started."""
    _, _, body = channel.receive()
    facts, meeting, rank, size, target = unpacked(body)
    store, closed = distributed.FileStore(meeting, size), partial(select.select, [channel.end], [], [], 0)
    _serve(store, rank, size, target, lambda: any(closed()), facts.learn)


def serve_torchrun(size: int, target: str) -> None:
    """Join the other ranks, do what rank 0 orders, and exit, where torchrun started this process for that."""
    if rank := rank_here(size):
        store = _torchrun_store()
        _serve(store, rank, size, target, lambda: store.check([_ENDED.format(0)]))


def _serve(
    store: Any, rank: int, size: int, target: str, ended: Callable[[], bool],
    begin: Callable[[], object] = lambda: None,
) -> None:  # fmt: skip
    """Work as a rank above 0 until rank 0 has `ended` at the latest, say in the store how that went, and exit."""

    def look() -> None:
        if ended():
            raise RankLost("rank 0 has ended", why="it has said so, or its connection is closed")

    code, text = 0, ""
    try:
        begin()
        store.set(_HERE.format(rank), "")
        order = json.loads(store.get(_ORDER))
        ranks = _met(store, rank, size, order["backend"])
        ranks.look = look
        module, _, name = target.partition(":")
        getattr(importlib.import_module(module), name)(ranks, order)
    except RankLost:
        pass
    except Exception as error:
        if not isinstance(said := error, RlcliError):
            said = ResourceError(f"rank {rank} of the learner failed", why=in_words(error))
        code = said.exit_code
        text = json.dumps([type(said).__name__, said.what, said.where, said.why, said.fix, traceback.format_exc()])
    with contextlib.suppress(RuntimeError):  # nobody is there any more who would read it
        store.set(_ENDED.format(rank), text)
    leave(code)  # at an ordinary end, a collective that was broken off would be waited for


def _raised(rank: int, text: str) -> RlcliError:
    """Return the error that a rank has said it ended with."""
    name, what, where, why, fix, trace = json.loads(text)
    kind = {kind.__name__: kind for kind in RlcliError.__subclasses__()}.get(name, ResourceError)
    error = kind(what, where=f"rank {rank}" + (f", {where}" if where else ""), why=why, fix=fix)
    error.__cause__ = Traceback(trace)
    return error


# ---- how they meet --------------------------------------------------------------------------------------------------
def rank_here(size: int) -> int | None:
    """Return which of so many ranks of a learner torchrun started this process as; None where it did not."""
    there = os.environ.get("RANK") if os.environ.get("WORLD_SIZE") == str(size) > "1" else None
    return None if there is None else int(there)


def _here(name: str, otherwise: int, size: int) -> int:
    """Return a number of this machine, as torchrun says it."""
    return otherwise if rank_here(size) is None else int(os.environ.get(f"LOCAL_{name}", otherwise))


def _torchrun_store() -> Any:
    store, _, _ = next(distributed.rendezvous("env://"))
    return distributed.PrefixStore("rlcli", store)


def backend_of(asked: str, size: int, on_gpu: bool) -> str:
    """Return what adds up the gradients of ranks that learn `on_gpu`: nccl where each has one of its own, else gloo."""
    size = _here("WORLD_SIZE", size, size)
    gpus = torch.cuda.device_count() if on_gpu and distributed.is_nccl_available() else 0
    refuse(asked == "nccl" and gpus < size, f"learner.backend=nccl needs a GPU for each of {size} ranks",
           why=f"those that learn with it here are {gpus}", fix="Use learner.backend=auto, or device=cuda with fewer "
           "ranks.", error=ConfigError)  # fmt: skip
    return "nccl" if asked != "gloo" and gpus >= size else "gloo"


def _met(store: Any, rank: int, size: int, backend: str) -> Ranks:
    """Connect all ranks, over loopback where all are here; each takes its GPU, where several are there."""
    here = _here("WORLD_SIZE", size, size)
    kinds: Any = distributed  # which are written in C++
    gloo = kinds.ProcessGroupGloo
    options = gloo._Options()
    device = gloo.create_device(hostname="127.0.0.1") if here == size else gloo.create_default_device()
    options._devices, options._timeout = [device], _LONG
    groups = {"cpu": gloo(distributed.PrefixStore("cpu", store), rank, size, options)}
    if (gpus := torch.cuda.device_count()) > 1:
        torch.cuda.set_device(_here("RANK", rank, size) % gpus)
    if backend == "nccl":
        groups["cuda"] = kinds.ProcessGroupNCCL(distributed.PrefixStore("cuda", store), rank, size)
    ranks = Ranks(rank, size, groups, store, here == size)
    ranks.lost = lambda error: RankLost("another rank has ended", why=in_words(error))
    return ranks
