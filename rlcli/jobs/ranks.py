"""The ranks of a learner as processes: rank 0, the command's own, starts the others, and they end with it.

They are started as workers are, and meet by a file in the run folder, over loopback: no port is open to anybody else.
Whichever fails first tells rank 0 why; that is the run's error.
"""

from __future__ import annotations

import contextlib
import select
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from rlcli.arguments import refuse
from rlcli.errors import ConfigError, ResourceError, RlcliError, StoppedSafely, in_words
from rlcli.learning.ranks import Ranks
from rlcli.processes.channel import Channel, Closed, packed, unpacked
from rlcli.processes.worker import Worker, end
from rlcli.vec_envs.workers import Told, told

MEETING = "ranks.meeting"
_ORDER, _READY, _FAILED = 1, 2, 3  # kinds of frames
_CAUSE, _GRACE, _SAVING = 1.5, 1.0, 10.0  # seconds: to find who failed; to end in, after an error, or after a stop
_LONG = timedelta(days=7)  # rank 0 evaluates while the others wait


class RankLost(ResourceError):
    """A rank was left alone: another has ended, and rank 0 says why."""


@dataclass(eq=False)
class Others:
    """The other ranks, as rank 0 sees them."""

    workers: list[Worker] = field(default_factory=list)

    def look(self) -> None:
        """Raise the error of one that has ended."""
        if (cause := self._cause()) is not None:
            raise cause

    def lost(self, error: Exception) -> Exception:
        """Return the error to raise where a collective failed: why the first of them has ended."""
        deadline = time.monotonic() + _CAUSE
        while (cause := self._cause()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return cause or ResourceError("the ranks of the learner lost their connection", why=in_words(error))

    def ready(self) -> None:
        """Wait until all of them have come up."""
        for worker in self.workers:
            while not _readable(worker.channel, 0.1):
                self.look()
            kind, _, body = worker.channel.receive()
            if kind == _FAILED:
                raise unpacked(body)

    def _cause(self) -> Exception | None:
        for rank, worker in enumerate(self.workers, 1):
            with contextlib.suppress(Closed):
                if _readable(worker.channel):
                    return unpacked(worker.channel.receive()[2])
            if worker.exit_code() not in (None, 0):
                return ResourceError(
                    f"rank {rank} of the learner {worker.how_it_ended()}", where="learner.world_size",
                    why="the others cannot go on without it", fix="Where it ran out of memory, the system log says so",
                )  # fmt: skip
        return None


@contextlib.contextmanager
def started(
    size: int, backend: str, folder: Path, target: str, order: Mapping[str, Any], preload: Sequence[str]
) -> Iterator[Ranks]:
    """Start ranks 1 to `size - 1`, which run `target` of a channel and are given an `order`; yield rank 0's side."""
    others, meeting = Others(), folder / MEETING
    meeting.unlink(missing_ok=True)
    grace = _SAVING
    ranks: Ranks | None = None
    try:
        facts = told()
        for rank in range(1, size):
            others.workers.append(worker := Worker(target, preload=preload))
            worker.channel.send(_ORDER, body=packed((facts, str(meeting), rank, size, backend, dict(order))))
        others.ready()
        ranks = _met(meeting, 0, size, backend)
        ranks.lost, ranks.look = others.lost, others.look
        yield ranks
    except BaseException as error:
        grace = _SAVING if isinstance(error, StoppedSafely) else _GRACE
        raise
    finally:
        if ranks is not None:
            ranks.close()
        _end(others.workers, grace)
        meeting.unlink(missing_ok=True)


@contextlib.contextmanager
def joined(channel: Channel) -> Iterator[tuple[Ranks, dict[str, Any]]]:
    """Join the other ranks, in a process of `started`; yield this rank's side and its order. Errors go to rank 0."""
    facts, meeting, rank, size, backend, order = unpacked(channel.receive()[2])
    assert isinstance(facts, Told)
    try:
        facts.learn()
        channel.send(_READY)
        ranks = _met(Path(meeting), rank, size, backend)
        ranks.lost = lambda error: RankLost("another rank has ended", why=in_words(error))
        yield ranks, order
    except RankLost:
        pass
    except BaseException as error:
        if not isinstance(error, RlcliError):
            sys.excepthook(type(error), error, error.__traceback__)
            error = ResourceError(f"rank {rank} of the learner failed", why=in_words(error))
        error.where = f"rank {rank}" + (f", {error.where}" if error.where else "")
        if isinstance(error, StoppedSafely):  # rank 0 has most often stopped, too, and does not hear it
            error.fix = order["resume"]
        with contextlib.suppress(Closed):
            channel.send(_FAILED, body=packed(error))
        raise SystemExit(error.exit_code) from error


def backend_of(asked: str, size: int, on_gpu: bool) -> str:
    """Return what adds up the gradients of ranks that learn `on_gpu`: nccl where each has one of its own, else gloo."""
    gpus = torch.cuda.device_count() if on_gpu and distributed.is_nccl_available() else 0
    refuse(asked == "nccl" and gpus < size, f"learner.backend=nccl needs a GPU for each of {size} ranks",
           why=f"those that learn with it here are {gpus}", fix="Use learner.backend=auto, or device=cuda with fewer "
           "ranks.", error=ConfigError)  # fmt: skip
    return "nccl" if asked != "gloo" and gpus >= size else "gloo"


def _met(meeting: Path, rank: int, size: int, backend: str) -> Ranks:
    """Connect all ranks to each other, on this machine alone; each takes the next GPU, where several are there."""
    kinds: Any = distributed  # which are written in C++
    store, gloo = distributed.FileStore(str(meeting), size), kinds.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._timeout = [gloo.create_device(hostname="127.0.0.1")], _LONG
    groups = {"cpu": gloo(distributed.PrefixStore("cpu", store), rank, size, options)}
    if (gpus := torch.cuda.device_count()) > 1:
        torch.cuda.set_device(rank % gpus)
    if backend == "nccl":
        groups["cuda"] = kinds.ProcessGroupNCCL(distributed.PrefixStore("cuda", store), rank, size)
    return Ranks(rank, size, groups)


def _end(workers: Sequence[Worker], grace: float) -> None:
    """Let them end by themselves, then kill them."""
    deadline = time.monotonic() + grace
    for worker in workers:
        worker.exit_code(max(0.0, deadline - time.monotonic()))
    end(workers, 0.0)


def _readable(channel: Channel, seconds: float = 0.0) -> bool:
    return bool(select.select([channel.end], [], [], seconds)[0])
