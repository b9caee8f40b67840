"""A Ray cluster: a new one on this machine, or the one at an address; looked after while collectors use it.

| what Ray does unless it is told | what is done here |
|---|---|
| listens on every interface | loopback alone, as it does on macOS |
| writes its token to the home folder, for all to read | a new token, in the environment of its processes alone |
| makes its folder 0777 | inside one that nobody else enters |
| takes SIGTERM and `sys.excepthook` | both are put back |
| ends this process 60 s after the head is gone | a thread looks at the head, and stops the run safely |
| prints what happens to its workers | whoever waits for a worker says what happened to it |
| leaves processes when this one is killed | they are cleared up: `rlcli.processes.leftovers` |
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from rlcli.arguments import refuse
from rlcli.errors import ArgumentError, ResourceError, in_words
from rlcli.processes.leftovers import MARK, clear_up, watch_over
from rlcli.processes.watchdog import say

_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_OUTLIVES_HEAD = {"RAY_gcs_rpc_server_reconnect_timeout_s": str(86_400)}
_EVERY, _FAILURES = 2.0, 5  # seconds between two looks at the head; so many in vain and it is gone
_ANSWERS = 5.0  # seconds that the head has to take a connection
_LONGEST = 25  # of a folder's path: a socket's in it has at most 107 bytes
_cluster: Cluster | None = None  # of this process: Ray knows one at a time


def cluster_of(address: str | None, cpus: float, config: Mapping[str, Any] | None = None) -> Cluster:
    """Return the cluster that this process uses from now on; `close` it as often.

    Parameters
    ----------
    address : str, optional
        ``host:port`` of a head; by default `RAY_ADDRESS`, and without that a new cluster on this machine.
    cpus : float
        Of a new cluster.
    config : mapping, optional
        More for `ray.init`.

    Raises
    ------
    ArgumentError
        Ray is not installed, or nothing answers at the address.
    ResourceError
        Ray refuses to start, or to let this process in.
    """
    global _cluster
    config = dict(config or {})
    address = config.pop("address", None) if address is None else address
    address = os.environ.get("RAY_ADDRESS") if address is None else address
    address = None if address == "local" else address
    if _cluster is not None and _cluster.close.alive:
        refuse(address not in (None, _cluster.address), "this process uses a Ray cluster already",
               where=_cluster.address, why=f"another is asked for at {address}",
               fix="Shut its collectors down first.")  # fmt: skip
    else:
        _cluster = Cluster(address, cpus, config)
    _cluster.users += 1
    return _cluster


class Cluster:
    """Start a cluster, or join one; see `cluster_of`."""

    def __init__(self, address: str | None, cpus: float, config: Mapping[str, Any]) -> None:
        self.ray, self.users, self._over = _imported(), 0, threading.Event()
        self.started, foreign = address is None, self.ray.is_initialized()
        mark = folder = ""
        if foreign:
            warnings.warn("Ray is initialised already: its cluster is used, and goes on afterwards", stacklevel=5)
        elif address is None:
            mark, folder = secrets.token_hex(8), _folder()
            watcher = watch_over(mark, folder)
            try:
                self._init(_local(mark), config, address="local", num_cpus=cpus, _temp_dir=f"{folder}/r")
            except BaseException:
                _end(os.getpid(), mark, folder, watcher)
                raise
        else:
            self._init(_joined(address), config, address=address)
        self.address: str = self.ray.get_runtime_context().gcs_address
        self.close = weakref.finalize(
            self, _leave, os.getpid(), self._over, None if foreign else self.ray, mark, folder,
            watcher if mark else None,
        )  # fmt: skip
        threading.Thread(target=_look_at_head, args=(self.address, self._over), daemon=True).start()

    def leave(self) -> None:
        """Use it no more: whoever is last ends it, or leaves it."""
        self.users -= 1
        if not self.users:
            self.close()

    def _init(self, settings: Mapping[str, str], config: Mapping[str, Any], **given: Any) -> None:
        from ray._private import ray_constants
        from ray._raylet import AuthenticationTokenLoader, Config

        usual = {"include_dashboard": False} if self.started else {}
        with _environment(settings), _handlers_kept(), _silent():
            Config.initialize("")  # it was read when Ray was imported
            AuthenticationTokenLoader.instance().reset_cache()
            ray_constants.ENABLE_RAY_CLUSTER = _LOOPBACK not in settings
            try:
                self.ray.init(**usual | dict(config) | given | {"log_to_driver": False, "configure_logging": False})
            except Exception as error:
                if self.ray.is_initialized():
                    self.ray.shutdown()
                raise ResourceError(
                    "Ray could not start" if self.started else "Ray did not let this process into the cluster",
                    where=given["address"], why=in_words(error.__cause__ or error.__context__ or error, 140),
                    fix=None if self.started else "Set RAY_AUTH_TOKEN to its token, and use its Ray and Python.",
                ) from error  # fmt: skip


# ---- how it begins ---------------------------------------------------------------------------------------------------
def _imported() -> Any:
    hook = sys.excepthook
    try:
        import ray
        from ray._private import worker
    except ImportError as error:
        raise ArgumentError("Ray is not installed", why=in_words(error), fix='pip install "rlcli[ray]".') from None
    finally:
        sys.excepthook = hook
    worker.print_to_stdstream = lambda *_, **__: None
    return ray


def _folder() -> str:
    """Make the folder of a new cluster, short and for nobody else."""
    place = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="rlcli-", dir=place if len(place) <= _LONGEST else "/tmp")


def _local(mark: str) -> dict[str, str]:
    return _OUTLIVES_HEAD | {
        _LOOPBACK: "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), MARK: mark,
        "RAY_USAGE_STATS_ENABLED": "0",
    }  # fmt: skip


def _joined(address: str) -> dict[str, str]:
    """Return the settings for a cluster that is there; refuse an address at which none is: Ray looks for a minute."""
    host, _, port = address.rpartition(":")
    refuse(address == "auto" or not host or not port.isdigit(), f"'{address}' is no address of a Ray cluster",
           why="auto may be another user's" if address == "auto" else None,
           fix="Give host:port, as `ray start --head` shows it.")  # fmt: skip
    settings = dict(_OUTLIVES_HEAD)
    try:
        socket.create_connection((host, int(port)), _ANSWERS).close()
    except OSError as error:
        raise ArgumentError(
            f"no Ray cluster answers at {address}", why=in_words(error),
            fix="Start one with `ray start --head`, or leave the address out for a new one on this machine.",
        ) from None  # fmt: skip
    if host in ("localhost", "127.0.0.1"):  # Ray takes that for the machine's other address
        from ray.util import get_node_ip_address

        try:
            socket.create_connection((get_node_ip_address(), int(port)), _ANSWERS).close()
        except OSError:
            settings[_LOOPBACK] = "0"
    if {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        settings["RAY_AUTH_MODE"] = "token"
    return settings


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Put SIGTERM's handler back, Python's and the system's."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keep from the terminal what native code writes to it."""
    try:
        stream = os.dup(2)
    except OSError:  # there is none
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        yield
    finally:
        os.dup2(stream, 2)
        os.close(stream)


# ---- how it ends -----------------------------------------------------------------------------------------------------
def _look_at_head(address: str, over: threading.Event) -> None:
    """Ask the run to stop, as SIGTERM does, once the head has not answered several times."""
    host, _, port = address.rpartition(":")
    failures = 0
    while failures < _FAILURES:
        if over.wait(_EVERY):
            return
        try:
            socket.create_connection((host, int(port)), _EVERY).close()
            failures = 0
        except OSError:
            failures += 1
    say(f"the Ray cluster's head at {address} is gone: its workers cannot be replaced any more")
    if callable(signal.getsignal(signal.SIGTERM)):
        os.kill(os.getpid(), signal.SIGTERM)


def _leave(owner: int, over: threading.Event, ray: Any, mark: str, folder: str, watcher: Any) -> None:
    over.set()
    if ray is None or os.getpid() != owner:  # the user's own, or a fork's
        return
    with _handlers_kept(), _silent():
        ray.shutdown()
    if mark:
        _end(owner, mark, folder, watcher)


def _end(owner: int, mark: str, folder: str, watcher: Any) -> None:
    clear_up(mark, folder)
    watcher.kill()
    watcher.wait()
