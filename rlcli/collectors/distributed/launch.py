"""How peers of a group come to be, and meet: one recipe, `Peer`, whoever carries it to them.

| launcher | peers are | they meet by | the key travels |
|---|---|---|---|
| `mp` | worker processes of this machine | a file in a folder of this user's, over loopback | with the recipe |
| `torchrun` | the ranks above 0 that torchrun started | the rendezvous in their environment | in `RLCLI_KEY_FILE` |
| `submitit` | jobs that this process submits | a file in the jobs' folder | with the recipe, in that folder |
| `submitit_delayed` | jobs that were submitted beside the one that learns | the same | the same |
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import os
import pickle
import secrets
import shutil
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlcli import arguments
from rlcli.arguments import refuse
from rlcli.collectors.workers.worker import REMOTE
from rlcli.errors import ArgumentError, ResourceError, in_words
from rlcli.processes.channel import Channel
from rlcli.processes.fork_server import ignore_terminal
from rlcli.processes.worker import USUAL_METHOD, Worker, end

BACKENDS = ("gloo", "nccl", "mpi")
# what serves over a framework
SERVE = {"distributed": f"{__package__}.group_remote:serve", "rpc": f"{__package__}.rpc:serve"}
KEY_FILE, MEETING = "RLCLI_KEY_FILE", "RLCLIMEETING"
_KEY = 32  # bytes
_GRACE = 2.0  # seconds for processes to end in
_EVERY = 0.05  # seconds between two looks at who has come
FOR_EVER = datetime.timedelta(days=30)  # an order may take as long as it likes
_HERE, _JOINED = "peer {}", "joined {}"
_LOOPBACK = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


@dataclass(frozen=True)
class Peer:
    """Join a group as one of its ranks; rank 0 is the process of the collector, all others `serve` it."""

    serve: str  # `module:name` of what a peer does, once it has joined
    target: str  # of its `RemoteWorker`
    size: int
    backend: str
    timeout: float  # seconds for all to come
    key: bytes = field(default=b"", repr=False)
    file: str | None = None  # that all see; None: what torchrun set up
    loopback: bool = True  # all are on this machine
    settings: Any = None  # of the backend
    rank: int = 0
    path: tuple[str, ...] = ()

    @property
    def interface(self) -> dict[str, str]:
        """Environment in which the group is made."""
        return dict.fromkeys(("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), _LOOPBACK) if self.loopback else {}

    def store(self) -> Any:
        """Return the store in which the ranks find each other, after this one said that it is here."""
        limit = datetime.timedelta(seconds=self.timeout)
        if self.file is None:
            store, _, _ = next(dist.rendezvous("env://", timeout=limit))
            store = dist.PrefixStore("rlcli", store)
        else:
            store = dist.FileStore(self.file, self.size)
        store.set_timeout(limit)
        store.set(_HERE.format(self.rank), b"")
        return store

    def meet(self, join: Callable[[Peer, Any], object]) -> None:
        """Say that this one is here, `join` the others, and say that, too."""
        theirs = self.file is None  # torchrun hands signals to all its ranks, and rank 0 says what to do then
        if theirs:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        join(self, store := self.store())
        store.set(_JOINED.format(self.rank), b"")
        if theirs:
            ignore_terminal()

    @staticmethod
    def leave(over: threading.Event) -> None:
        """End this process soon, whatever its env does, unless what it serves is `over`: rank 0 has gone."""
        if not over.wait(_GRACE):
            os._exit(0)

    def run(self) -> None:
        """Serve rank 0 until it ends, or closes the group."""
        os.environ.update(self.interface)
        sys.path += [folder for folder in self.path if folder not in sys.path]
        module, _, name = self.serve.partition(":")
        getattr(importlib.import_module(module), name)(self)


def work(channel: Channel) -> None:
    """Serve as the peer that comes by the channel."""
    _, _, body = channel.receive()
    peer: Peer = pickle.loads(body)
    peer.run()


class Launcher:
    """Have the peers of rank 1 and above started, like `own`, and know what became of them.

    `start` yields their workers, in the order of ranks, where this process has them; `folder` ends with the collector.
    """

    def __init__(
        self, name: str, own: Peer, start: Callable[[Sequence[Peer]], Iterable[Any]] = lambda _: (),
        folder: Path | None = None,
    ) -> None:  # fmt: skip
        self.name, self.own, self._start, self.folder = name, own, start, folder
        self.workers: list[Any] = []

    def how_it_ended(self, rank: int) -> str:
        return self.workers[rank - 1].how_it_ended() if self.workers else "closed its connection"

    def kill(self, rank: int) -> None:
        """End a peer at once, where that can be done."""
        if self.workers:
            self.workers[rank - 1].kill()

    def begin(self, join: Callable[[Peer, Any], object]) -> None:
        """Start the peers, wait until they have come, and `join` them; ResourceError names who has not."""
        deadline = time.monotonic() + self.own.timeout
        try:
            store = self.own.store()
        except dist.DistError as error:
            raise self._missing([], in_words(error)) from error
        ranks = list(range(1, self.own.size))
        self.workers.extend(self._start([replace(self.own, rank=rank) for rank in ranks]))
        self._await(store, _HERE, deadline)
        joined = Future[object]()  # by a thread: it may wait for ever, for one that ends before it is joined
        threading.Thread(target=_into, args=(joined, join, self.own, store), daemon=True).start()
        while not wait([joined], _EVERY).done:
            self._check_coming(ranks, deadline)
        joined.result()
        self._await(store, _JOINED, deadline)
        if self.name == "mp" and self.folder is not None:
            shutil.rmtree(self.folder)  # now: this process may be killed

    def _await(self, store: Any, key: str, deadline: float) -> None:
        missing = list(range(1, self.own.size))
        while missing := [rank for rank in missing if not store.check([key.format(rank)])]:
            self._check_coming(missing, deadline)
            time.sleep(_EVERY)

    def _check_coming(self, ranks: Sequence[int], deadline: float) -> None:
        if gone := [rank for rank in ranks if self.workers and self.workers[rank - 1].exit_code() is not None]:
            raise self._missing(gone, f"the worker of rank {gone[0]} {self.how_it_ended(gone[0])}")
        if time.monotonic() > deadline:
            raise self._missing(ranks, f"after {self.own.timeout:g} s")

    def _missing(self, ranks: Sequence[int], why: str) -> ResourceError:
        return ResourceError(
            f"{len(ranks) or 'some'} of {self.own.size - 1} workers of launcher='{self.name}' did not come",
            where=f"ranks {', '.join(map(str, ranks))}" if ranks else None, why=why,
            fix="Look at their output, start all of them, or allow more time: timeout=SECONDS.",
        )  # fmt: skip

    def close(self) -> None:
        """End the peers, and remove what they met by."""
        if self.name == "mp":
            end(self.workers, _GRACE)
        deadline = time.monotonic() + _GRACE
        while time.monotonic() < deadline and any(worker.exit_code() is None for worker in self.workers):
            time.sleep(_EVERY)
        for worker in self.workers:
            worker.kill()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def _into(result: Future[object], function: Callable[..., object], *args: Any) -> None:
    try:
        result.set_result(function(*args))
    except BaseException as error:
        result.set_exception(error)


# ---- launchers: of a peer that lacks what they give it, and options of jobs ------------------------------------------
def torchrun(peer: Peer, slurm_kwargs: Mapping[str, Any]) -> Launcher:
    """Wait for the ranks that torchrun started."""
    size, there = peer.size, os.environ.get("WORLD_SIZE")
    fix = f"torchrun --nproc-per-node {size} ..."
    refuse(there is None, "launcher='torchrun' needs the ranks that torchrun starts", why="WORLD_SIZE is not set",
           fix=fix)  # fmt: skip
    refuse(int(there or 0) != size, f"{size - 1} workers need a world of {size} ranks",
           why=f"torchrun started {there}", fix=fix)  # fmt: skip
    one_node = os.environ.get("LOCAL_WORLD_SIZE") == there
    return Launcher("torchrun", replace(peer, key=shared_key(), rank=int(os.environ["RANK"]), loopback=one_node))


def processes(peer: Peer, slurm_kwargs: Mapping[str, Any]) -> Launcher:
    """Run peers in worker processes of this machine."""
    refuse(slurm_kwargs, "slurm_kwargs are of jobs", why="launcher is 'mp'", fix="Use launcher='submitit'.")
    folder = own_folder()
    return Launcher("mp", _meeting_in(folder, peer), _workers, folder)


def _workers(peers: Sequence[Peer]) -> Iterator[Worker]:
    for peer in peers:
        yield (worker := Worker(f"{__name__}:work", start_method=USUAL_METHOD, preload=[__name__]))
        worker.channel.send(0, 0, pickle.dumps(peer))


def jobs(peer: Peer, slurm_kwargs: Mapping[str, Any]) -> Launcher:
    """Run peers as jobs of submitit."""
    options = dict(slurm_kwargs)
    folder = own_folder(options.pop("folder", os.getcwd()))
    try:
        executor = executor_of(folder, options)
    except BaseException:
        shutil.rmtree(folder)
        raise
    own = replace(_meeting_in(folder, peer), loopback=options.get("cluster") == "local")
    return Launcher("submitit", own, lambda peers: map(SlurmJob, executor.map_array(Peer.run, peers)), folder)


class SlurmJob:
    """A job of submitit as a worker."""

    def __init__(self, job: Any) -> None:
        self._job, self.kill = job, job.cancel

    def exit_code(self, timeout: float = 0.0) -> int | None:
        return 0 if self._job.done() else None

    def how_it_ended(self) -> str:
        return f"ended (job {self._job.job_id})"


def delayed(peer: Peer, slurm_kwargs: Mapping[str, Any]) -> Launcher:
    """Wait for jobs that `submitit_delayed_launcher` submitted beside this one."""
    if (name := os.environ.get(MEETING)) is None:
        raise ArgumentError(
            "launcher='submitit_delayed' is of a job that submitit_delayed_launcher submitted",
            why=f"{MEETING} is not set", fix="Decorate the main function with it.",
        )  # fmt: skip
    _check_own(folder := Path(name))
    jobs = int((folder / "jobs").read_text())
    refuse(jobs != peer.size - 1, f"the collector has {peer.size - 1} workers",
           why=f"{jobs} jobs were submitted for them", fix=f"Use num_jobs={peer.size - 1}.")  # fmt: skip
    key = (folder / "key").read_bytes()
    return Launcher("submitit_delayed", replace(peer, file=str(folder / "meet"), key=key, loopback=False))


LAUNCHERS = {"mp": processes, "torchrun": torchrun, "submitit": jobs, "submitit_delayed": delayed}


def _meeting_in(folder: Path, peer: Peer) -> Peer:
    return replace(peer, key=secrets.token_bytes(_KEY), file=str(folder / "meet"))


def executor_of(folder: Path, settings: Mapping[str, Any]) -> Any:
    """Return submitit's executor, with `sbatch`'s options; `cluster`: "slurm", "local" (processes here), ..."""
    try:
        import submitit
    except ModuleNotFoundError as error:
        raise ArgumentError(
            "launcher='submitit' needs the package submitit", why="it is not installed",
            fix='pip install "rlcli[slurm]"',
        ) from error  # fmt: skip
    options = dict(settings)
    cluster = options.pop("cluster", "slurm")
    refuse(cluster == "slurm" and shutil.which("sbatch") is None, "there is no sbatch here",
           why="jobs are submitted by it",
           fix='Submit from a node of a SLURM cluster, or use launcher="mp".')  # fmt: skip
    executor = submitit.AutoExecutor(folder, cluster=cluster)
    executor.update_parameters(**options)
    return executor


def own_folder(parent: str | os.PathLike[str] | None = None) -> Path:
    """Make a folder that nobody else may enter: what lies there is unpickled."""
    folder = Path(tempfile.mkdtemp(prefix="rlcli-", dir=parent))
    os.chmod(folder, stat.S_IRWXU)
    return folder


def _check_own(path: Path) -> None:
    about = path.stat()
    refuse(about.st_uid != os.getuid() or about.st_mode & (stat.S_IRWXG | stat.S_IRWXO),
           f"{path} is not this user's alone", why="whoever reads its key can run code in this process",
           fix=f"chmod go-rwx {path}, as its owner.")  # fmt: skip


def check_backend(backend: str) -> None:
    """Refuse a backend that this torch lacks."""
    arguments.choice("backend", backend, BACKENDS)
    refuse(not getattr(dist, f"is_{backend}_available")(), f"this torch has no {backend}",
           why="it was built without", fix="Use backend='gloo'.")  # fmt: skip


def shared_key() -> bytes:
    """Return the key in the file that `RLCLI_KEY_FILE` names."""
    name = os.environ.get(KEY_FILE)
    fix = f"head -c {_KEY} /dev/urandom > key; chmod 600 key; export {KEY_FILE}=$PWD/key (on every node)."
    if not name or not os.path.exists(name):
        raise ArgumentError("ranks of torchrun need a key in common", why=f"{KEY_FILE} names no file", fix=fix)
    _check_own(Path(name))
    key = Path(name).read_bytes()[:64]
    refuse(len(key) < 16, f"the key in {name} is too short", why=f"it has {len(key)} bytes", fix=fix)
    return key


# ---- jobs beside the one that learns -----------------------------------------------------------------------------
def submitit_delayed_launcher(
    num_jobs: int, framework: str = "distributed", backend: str = "gloo", tcpport: Any = None,
    submitit_main_conf: Mapping[str, Any] | None = None, submitit_collection_conf: Mapping[str, Any] | None = None,
    folder: str | os.PathLike[str] | None = None, timeout: float = 3600.0,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:  # fmt: skip
    """Submit a main function as a job, and beside it the jobs that its collector's workers are.

    The collector in it has ``launcher="submitit_delayed"``, and `num_jobs` workers. Jobs find each other by a file in
    their folder, which is on a file system that all nodes see.

    Parameters
    ----------
    num_jobs : int
        Workers.
    framework : {"distributed", "rpc"}
        `DistributedCollector` or `RPCCollector`.
    backend : {"gloo", "nccl", "mpi"}
    tcpport : optional
        Taken for the sake of older scripts: no port is agreed on.
    submitit_main_conf, submitit_collection_conf : mapping, optional
        Options of `sbatch` of the two kinds of jobs, as submitit names them.
    folder : path, optional
        Where a folder for the jobs is made, for this user alone; by default here.
    timeout : float
        Seconds for all jobs to have begun.

    Returns
    -------
    callable
        Decorates a function; what that makes submits the jobs and returns submitit's job of the main function.

    Raises
    ------
    ArgumentError
        There is no submitit, or no SLURM.
    """
    arguments.choice("framework", framework, SERVE)
    arguments.choice("backend", backend, BACKENDS)
    count, collection = arguments.count("num_jobs", num_jobs), dict(submitit_collection_conf or {})
    parent = folder or os.getcwd()

    def decorated(main: Callable[..., Any]) -> Callable[..., Any]:
        def submit(*args: Any, **kwargs: Any) -> Any:
            folder = own_folder(parent)
            main_jobs, others = (executor_of(folder, conf) for conf in (submitit_main_conf or {}, collection))
            key = secrets.token_bytes(_KEY)
            (folder / "key").write_bytes(key)
            (folder / "jobs").write_text(str(count))
            peer = Peer(
                SERVE[framework], REMOTE, count + 1, backend, timeout, key, file=str(folder / "meet"),
                loopback=collection.get("cluster") == "local", path=tuple(sys.path),
            )  # fmt: skip
            job = main_jobs.submit(_main, str(folder), main, args, kwargs)
            try:
                others.map_array(Peer.run, [replace(peer, rank=rank) for rank in range(1, peer.size)])
            except BaseException:  # of sbatch: nobody would come to it
                job.cancel()
                raise
            return job

        return submit

    return decorated


def _main(folder: str, main: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    os.environ[MEETING] = folder
    try:
        return main(*args, **kwargs)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(folder, "key"))
