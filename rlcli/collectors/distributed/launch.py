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
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlcli import arguments
from rlcli.arguments import refuse
from rlcli.errors import ArgumentError, ResourceError, in_words
from rlcli.processes.channel import Channel
from rlcli.processes.worker import USUAL_METHOD, Worker, end

LAUNCHERS = ("mp", "torchrun", "submitit", "submitit_delayed")
BACKENDS = ("gloo", "nccl", "mpi")
KEY_FILE, MEETING = "RLCLI_KEY_FILE", "RLCLIMEETING"
_KEY = 32  # bytes
_GRACE = 2.0  # seconds for processes to end in
_EVERY = 0.05  # seconds between two looks at who has come
FOR_EVER = datetime.timedelta(days=30)  # an order may take as long as it likes
_HERE = "peer {}"


@dataclass(frozen=True)
class Peer:
    """Join a group as one of its ranks; rank 0 is the process of the collector, all others `serve` it."""

    serve: str  # `module:name` of what a peer does, once it has joined
    target: str  # of its `RemoteWorker`
    size: int
    backend: str
    timeout: float  # seconds for all to come
    key: bytes = field(repr=False)
    file: str | None = None  # that all see; None: what torchrun set up
    loopback: bool = True  # all are on this machine
    settings: Any = None  # of the backend
    rank: int = 0
    path: tuple[str, ...] = ()

    def store(self) -> Any:
        """Return the store in which the ranks find each other, after this one said that it is here."""
        if self.loopback:
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["TP_SOCKET_IFNAME"] = "lo"
        wait = datetime.timedelta(seconds=self.timeout)
        if self.file is None:
            store, _, _ = next(dist.rendezvous("env://", timeout=wait))
            store = dist.PrefixStore("rlcli", store)
        else:
            store = dist.FileStore(self.file, self.size)
        store.set_timeout(wait)
        store.set(_HERE.format(self.rank), b"")
        return store

    def run(self) -> None:
        """Serve rank 0 until it ends, or closes the group."""
        sys.path += [folder for folder in self.path if folder not in sys.path]
        module, _, name = self.serve.partition(":")
        getattr(importlib.import_module(module), name)(self)


def work(channel: Channel) -> None:
    """Serve as the peer that comes by the channel."""
    _, _, body = channel.receive()
    peer: Peer = pickle.loads(body)
    peer.run()


class Launcher:
    """Start the peers of rank 1 and above, and know what became of them: here, those that are there anyway."""

    def __init__(self, launcher: str, asked: str) -> None:
        self.launcher, self.asked = launcher, asked

    def launch(self, peers: Sequence[Peer]) -> None:
        """Start them."""

    def how_it_ended(self, rank: int) -> str:
        return "closed its connection"

    def ended(self, rank: int) -> bool:
        """Say whether a peer is known to have ended."""
        return False

    def kill(self, rank: int) -> None:
        """End a peer at once, where that can be done."""

    def close(self) -> None:
        """End all that are left."""

    def wait(self, store: Any, peer: Peer) -> None:
        """Wait until all peers have come; ResourceError names those that have not."""
        missing, deadline = list(range(1, peer.size)), time.monotonic() + peer.timeout
        while missing := [rank for rank in missing if not store.check([_HERE.format(rank)])]:
            gone = [rank for rank in missing if self.ended(rank)]
            if gone or time.monotonic() > deadline:
                raise ResourceError(
                    f"{len(missing)} of {peer.size - 1} workers did not join the collector",
                    where=f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}",
                    why=self.how_it_ended(gone[0]) if gone else f"{self.asked} after {peer.timeout:g} s",
                    fix="Look at their output." if gone else "Start all of them, or allow more time: timeout=SECONDS.",
                )  # fmt: skip
            time.sleep(_EVERY)


class Processes(Launcher):
    """Run peers in worker processes of this machine."""

    def __init__(self) -> None:
        super().__init__("mp", "launcher='mp'")
        self.workers: list[Worker] = []

    def launch(self, peers: Sequence[Peer]) -> None:
        for peer in peers:
            worker = Worker(f"{__name__}:work", start_method=USUAL_METHOD, preload=[__name__])
            self.workers.append(worker)
            worker.channel.send(0, 0, pickle.dumps(peer))

    def how_it_ended(self, rank: int) -> str:
        return self.workers[rank - 1].how_it_ended()

    def ended(self, rank: int) -> bool:
        return self.workers[rank - 1].exit_code() is not None

    def kill(self, rank: int) -> None:
        self.workers[rank - 1].kill()

    def close(self) -> None:
        end(self.workers, _GRACE)


class Jobs(Launcher):
    """Run peers as jobs of submitit."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        super().__init__("submitit", f"launcher='submitit', slurm_kwargs={dict(settings)}")
        self._executor, self._jobs = executor_of(folder, settings), []  # type: ignore[var-annotated]

    def launch(self, peers: Sequence[Peer]) -> None:
        self._jobs = self._executor.map_array(Peer.run, peers)

    def how_it_ended(self, rank: int) -> str:
        return f"its job {self._jobs[rank - 1].job_id} ended"

    def ended(self, rank: int) -> bool:
        return self._jobs[rank - 1].done()

    def kill(self, rank: int) -> None:
        self._jobs[rank - 1].cancel()

    def close(self) -> None:
        for job in self._jobs:
            job.cancel()


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


class Meeting:
    """Know who meets, where, and by whom they were started: the recipe of rank 0, and its launcher.

    Parameters
    ----------
    launcher : {"mp", "torchrun", "submitit", "submitit_delayed"}
    count : int
        Workers.
    serve, target : str
        See `Peer`.
    backend : str
    timeout : float
        Seconds for all to come.
    settings : optional
        Of the backend.
    slurm_kwargs : mapping, optional
        Options of `sbatch`, as submitit names them; ``folder``: where the jobs' files are.

    Raises
    ------
    ArgumentError
        What the launcher needs is not there, or does not fit.
    """

    def __init__(
        self, launcher: str, count: int, *, serve: str, target: str, backend: str, timeout: float,
        settings: Any = None, slurm_kwargs: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        arguments.choice("launcher", launcher, LAUNCHERS)
        self._folder: Path | None = None
        peer = Peer(serve, target, count + 1, backend, timeout, b"", settings=settings, path=tuple(sys.path))
        if launcher == "torchrun":
            self.launcher = Launcher(launcher, "launcher='torchrun'")
            self.own = replace(peer, key=shared_key(), rank=_rank(count + 1), loopback=_one_node())
            return
        if launcher == "submitit_delayed":
            self.launcher = Launcher(launcher, "launcher='submitit_delayed'")
            self.own = replace(peer, loopback=False, **_delayed(count + 1))
            return
        options = dict(slurm_kwargs or {})
        self._folder = own_folder(options.pop("folder", None))
        self.launcher = Processes() if launcher == "mp" else Jobs(self._folder, options)
        self.own = replace(
            peer, key=secrets.token_bytes(_KEY), file=str(self._folder / "meet"),
            loopback=launcher == "mp" or options.get("cluster") == "local",
        )  # fmt: skip

    def begin(self) -> Any:
        """Start the peers and wait until they have come; return the store."""
        try:
            try:
                store = self.own.store()
            except dist.DistError as error:
                raise ResourceError(
                    "the workers cannot be met", where=self.launcher.asked, why=in_words(error),
                    fix="Start all ranks, or allow more time: timeout=SECONDS.",
                ) from error  # fmt: skip
            self.launcher.launch([replace(self.own, rank=rank) for rank in range(1, self.own.size)])
            self.launcher.wait(store, self.own)
            return store
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the peers, and remove what they met by."""
        self.launcher.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _rank(size: int) -> int:
    there = os.environ.get("WORLD_SIZE")
    refuse(there is None, "launcher='torchrun' needs the ranks that torchrun starts", why="WORLD_SIZE is not set",
           fix=f"torchrun --nproc-per-node {size} ...")  # fmt: skip
    refuse(int(there or 0) != size, f"{size - 1} workers need a world of {size} ranks",
           why=f"torchrun started {there}", fix=f"torchrun --nproc-per-node {size} ...")  # fmt: skip
    return int(os.environ["RANK"])


def _one_node() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")


# ---- jobs beside the one that learns -----------------------------------------------------------------------------
def _delayed(size: int) -> dict[str, Any]:
    name = os.environ.get(MEETING)
    if name is None:
        raise ArgumentError(
            "launcher='submitit_delayed' is of a job that submitit_delayed_launcher submitted",
            why=f"{MEETING} is not set", fix="Decorate the main function with it.",
        )  # fmt: skip
    folder = Path(name)
    _check_own(folder)
    jobs = int((folder / "jobs").read_text())
    refuse(jobs != size - 1, f"the collector has {size - 1} workers",
           why=f"{jobs} jobs were submitted for them", fix=f"Use num_jobs={size - 1}.")  # fmt: skip
    return {"file": str(folder / "meet"), "key": (folder / "key").read_bytes()}


class submitit_delayed_launcher:
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

    def __init__(
        self, num_jobs: int, framework: str = "distributed", backend: str = "gloo", tcpport: Any = None,
        submitit_main_conf: Mapping[str, Any] | None = None, submitit_collection_conf: Mapping[str, Any] | None = None,
        folder: str | os.PathLike[str] | None = None, timeout: float = 3600.0,
    ) -> None:  # fmt: skip
        arguments.choice("framework", framework, ("distributed", "rpc"))
        arguments.choice("backend", backend, BACKENDS)
        self._count, self._framework, self._backend = arguments.count("num_jobs", num_jobs), framework, backend
        self._main, self._collection = dict(submitit_main_conf or {}), dict(submitit_collection_conf or {})
        self._parent, self._timeout = folder or os.getcwd(), timeout

    def __call__(self, main: Callable[..., Any]) -> Callable[..., Any]:
        def submit(*args: Any, **kwargs: Any) -> Any:
            folder = own_folder(self._parent)
            main_jobs = executor_of(folder, self._main)
            others = executor_of(folder, self._collection)
            key = secrets.token_bytes(_KEY)
            (folder / "key").write_bytes(key)
            (folder / "jobs").write_text(str(self._count))
            from rlcli.collectors.distributed import group_remote, rpc
            from rlcli.collectors.workers.worker import REMOTE

            serve = group_remote.SERVE if self._framework == "distributed" else rpc.SERVE
            peer = Peer(
                serve, REMOTE, self._count + 1, self._backend, self._timeout, key, str(folder / "meet"),
                loopback=self._collection.get("cluster") == "local", path=tuple(sys.path),
            )  # fmt: skip
            job = main_jobs.submit(_main, str(folder), main, args, kwargs)
            others.map_array(Peer.run, [replace(peer, rank=rank) for rank in range(1, peer.size)])
            return job

        return submit


def _main(folder: str, main: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    os.environ[MEETING] = folder
    try:
        return main(*args, **kwargs)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(folder, "key"))
