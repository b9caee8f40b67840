"""The ranks of a learner as processes: rank 0, the command's own, starts the others, and they end with it.

They are started as workers are, and meet by a file in the run folder, over loopback: no port is open to anybody else.
Or torchrun has started them all, on one machine or several, and they meet as it has arranged. Whichever fails first
tells rank 0 why; that is the run's error.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
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
from rlcli.processes.channel import Channel, packed, unpacked
from rlcli.processes.group import WorkerGroup
from rlcli.processes.line import Line, serve
from rlcli.processes.replacing import Lost
from rlcli.processes.worker import Worker, end
from rlcli.vec_envs.workers import told

MEETING = "ranks.meeting"
_LEARN, _WORK = 1, 2  # kinds of orders
_ORDER, _ENDED = "order", "ended {}"  # what ranks under torchrun say in their store
_CAUSE, _GRACE, _SAVING = 1.5, 1.0, 10.0  # seconds: to find who failed; to end in, after an error, or after a stop
_LONG = timedelta(days=7)  # rank 0 evaluates while the others wait


class RankLost(ResourceError):
    """A rank was left alone: another has ended, and rank 0 says why."""


class Others(WorkerGroup):
    """The other ranks, as rank 0 sees them."""

    def look(self) -> None:
        """Raise the error of one that has ended."""
        ends = [worker.channel.end for worker in self.workers]
        if select.select(ends, [], [], 0)[0] or any(worker.exit_code() is not None for worker in self.workers):
            self.hear(self.first)

    def hear(self, answers: Callable[[], object]) -> None:
        """Wait for answers; raise what went wrong in the words of rank 0."""
        try:
            answers()
        except Lost as lost:
            raise ResourceError(
                f"rank {lost.index + 1} of the learner {lost.how}", where="learner.world_size",
                why="the others cannot go on without it", fix="Where it ran out of memory, the system log says so",
            ) from None  # fmt: skip
        except RlcliError as error:
            error.where = f"rank {self.awaited + 1}" + (f", {error.where}" if error.where else "")
            raise
        except Exception as error:
            raise ResourceError(f"rank {self.awaited + 1} of the learner failed", why=in_words(error)) from error

    def lost(self, error: Exception) -> Exception:
        """Return the error to raise where a collective failed: why the first of them has ended."""
        deadline = time.monotonic() + _CAUSE
        while time.monotonic() < deadline:
            try:
                self.look()
            except RlcliError as cause:
                return cause
            time.sleep(0.01)
        return ResourceError("the ranks of the learner lost their connection", why=in_words(error))


@contextlib.contextmanager
def started(
    size: int, backend: str, folder: Path, target: str, order: Mapping[str, Any], preload: Sequence[str]
) -> Iterator[Ranks]:
    """Start ranks 1 to `size - 1`, which run `target` of a channel and are given an `order`; yield rank 0's side."""
    if (rank := rank_here(size)) is not None:
        with contextlib.closing(_joined(rank, size, backend, order)) as joined:
            yield joined
        return
    ranks: Ranks | None = None
    meeting, grace = folder / MEETING, _SAVING
    meeting.unlink(missing_ok=True)
    others = Others(partial(Worker, target, preload=preload), size - 1)
    try:
        of = [packed((told(), str(meeting), rank, size, backend, dict(order))) for rank in range(1, size)]
        others.hear(lambda: others.order(_LEARN, of))
        for index in range(size - 1):
            others.begin(index, _WORK)
        ranks = _met(distributed.FileStore(str(meeting), size), 0, size, backend)
        ranks.lost, ranks.look, ranks.end = others.lost, others.look, partial(end, others.workers, _SAVING)
        yield ranks
    except BaseException as error:
        grace = _SAVING if isinstance(error, StoppedSafely) else _GRACE
        raise
    finally:
        end(others.workers, grace)
        if ranks is not None:  # a collective that was broken off goes on until they have ended
            ranks.close()
        meeting.unlink(missing_ok=True)


def serve_as_rank(channel: Channel, work: Callable[[Ranks, dict[str, Any]], None]) -> None:
    """Join the other ranks, in a process of `started`, and `work` as rank 0 orders."""
    given: list[Any] = []

    def look() -> None:
        if select.select([channel.end], [], [], 0)[0]:
            raise RankLost("rank 0 has ended", why="its connection is closed")

    def carry_out(kind: int, body: bytes) -> None:
        if kind == _LEARN:
            facts, *given[:] = unpacked(body)
            return facts.learn()
        meeting, rank, size, backend, order = given
        ranks = _met(distributed.FileStore(meeting, size), rank, size, backend)
        ranks.look = look
        with contextlib.closing(ranks), contextlib.suppress(RankLost):
            work(ranks, order)

    serve(Line(channel), carry_out)


# ---- under torchrun -------------------------------------------------------------------------------------------------
def rank_here(size: int) -> int | None:
    """Return which of so many ranks of a learner torchrun started this process as; None where it did not."""
    there = os.environ.get("RANK") if os.environ.get("WORLD_SIZE") == str(size) > "1" else None
    return None if there is None else int(there)


def serve_torchrun(rank: int, size: int, backend: str, work: Callable[[Ranks, dict[str, Any]], None]) -> None:
    """Join the other ranks that torchrun started, `work` as rank 0 orders, and exit."""
    code = 0
    with contextlib.closing(_joined(rank, size, backend)) as ranks:
        why = ""
        try:
            work(ranks, json.loads(ranks.store.get(_ORDER)))
        except RlcliError as error:
            code, why = error.exit_code, "" if isinstance(error, RankLost) else str(error)
        except Exception as error:
            code, why = 1, in_words(error)
        finally:
            with contextlib.suppress(RuntimeError):  # nobody is there any more who would read it
                ranks.store.set(_ENDED.format(rank), why)
    sys.exit(code)


def _joined(rank: int, size: int, backend: str, order: Mapping[str, Any] | None = None) -> Ranks:
    """Connect the ranks that torchrun started; rank 0 gives the others an `order`."""
    store, _, _ = next(distributed.rendezvous("env://"))
    store = distributed.PrefixStore("rlcli", store)
    if order is not None:
        store.set(_ORDER, json.dumps(order))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    ranks = _met(store, rank, size, backend, int(os.environ.get("LOCAL_RANK", rank)), here == size)
    ended = [_ENDED.format(other) for other in range(1, size)]

    def wait(until: Callable[[], object], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not until():
            time.sleep(0.01)

    def causes() -> list[str]:
        return [f"rank {other}: {why}" for other, key in enumerate(ended, 1) if store.check([key])
                and (why := store.get(key).decode())]  # fmt: skip

    def lost(error: Exception) -> Exception:
        wait(causes, _CAUSE)
        return ResourceError("a rank of the learner failed", why="; ".join(causes()) or "its connection was closed")

    def end() -> None:
        ranks.close()
        wait(lambda: not ranks.together or store.check(ended), _SAVING)

    if order is not None:
        ranks.lost, ranks.end = lost, end
    return ranks


def backend_of(asked: str, size: int, on_gpu: bool) -> str:
    """Return what adds up the gradients of ranks that learn `on_gpu`: nccl where each has one of its own, else gloo."""
    size = size if rank_here(size) is None else int(os.environ.get("LOCAL_WORLD_SIZE", size))
    gpus = torch.cuda.device_count() if on_gpu and distributed.is_nccl_available() else 0
    refuse(asked == "nccl" and gpus < size, f"learner.backend=nccl needs a GPU for each of {size} ranks",
           why=f"those that learn with it here are {gpus}", fix="Use learner.backend=auto, or device=cuda with fewer "
           "ranks.", error=ConfigError)  # fmt: skip
    return "nccl" if asked != "gloo" and gpus >= size else "gloo"


def _met(store: Any, rank: int, size: int, backend: str, local: int | None = None, together: bool = True) -> Ranks:
    """Connect all ranks to each other; each takes its GPU, where several are there.

    `local`: which it is on its machine; `together`: all are on this one.
    """
    kinds: Any = distributed  # which are written in C++
    gloo = kinds.ProcessGroupGloo
    options = gloo._Options()
    device = gloo.create_device(hostname="127.0.0.1") if together else gloo.create_default_device()
    options._devices, options._timeout = [device], _LONG
    groups = {"cpu": gloo(distributed.PrefixStore("cpu", store), rank, size, options)}
    if (gpus := torch.cuda.device_count()) > 1:
        torch.cuda.set_device((rank if local is None else local) % gpus)
    if backend == "nccl":
        groups["cuda"] = kinds.ProcessGroupNCCL(distributed.PrefixStore("cuda", store), rank, size)
    ranks = Ranks(rank, size, groups, store, together)
    ranks.lost = lambda error: RankLost("another rank has ended", why=in_words(error))
    return ranks
