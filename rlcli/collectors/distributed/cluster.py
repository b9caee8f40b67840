"""A Ray cluster: a new one on this machine, or the one at an address; looked after while collectors use it.

| what Ray does unless it is told | what is done here |
|---|---|
| listens on every interface | loopback alone, as it does on macOS |
| writes its token to the home folder, for all to read | a new one, in the environment of its processes alone |
| makes its folder 0777 | inside one that nobody else enters |
| takes SIGTERM and `sys.excepthook` | both are put back |
| ends with a SIGTERM to all processes of a terminal or job | it is a session of its own |
| ends this process a minute after its head | a thread looks at the head, and has the run saved |
| prints what happens to its workers | who waits for a worker says what happened to it |
| leaves processes when this one is killed | a `Reaper` ends them |
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from rlcli.arguments import refuse
from rlcli.errors import ArgumentError, ResourceError, in_words
from rlcli.processes.process import environment
from rlcli.processes.reaper import MARK, Reaper
from rlcli.processes.watchdog import say

_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_OUTLIVES_HEAD = {"RAY_gcs_rpc_server_reconnect_timeout_s": str(86_400)}
_LOCAL = _OUTLIVES_HEAD | {_LOOPBACK: "0", "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
_EVERY, _FAILURES = 2.0, 5  # seconds between two looks at the head; so many in vain and it is gone
_ANSWERS = 5.0  # seconds that a head has to take a connection
_cluster: Cluster | None = None  # of this process: Ray knows one at a time


def cluster_of(cpus: float, config: Mapping[str, Any] | None = None) -> Cluster:
    """Return the cluster that this process uses from now on; `leave` it as often.

    It is at the address of `config`, for `ray.init`, or at `RAY_ADDRESS`; or a new one here, with so many `cpus`.
    """
    global _cluster
    config = dict(config or {})
    address = config.pop("address", None) or os.environ.get("RAY_ADDRESS")
    address = None if address == "local" else address
    if _cluster is None or not _cluster.close.alive:
        _cluster = Cluster(address, cpus, config)
    refuse(address not in (None, _cluster.address), "this process uses a Ray cluster already", where=_cluster.address,
           why=f"another is asked for at {address}", fix="Shut its collectors down first.")  # fmt: skip
    _cluster.users += 1
    return _cluster


class Cluster:
    """Start a cluster, or join one; see `cluster_of`."""

    def __init__(self, address: str | None, cpus: float, config: dict[str, Any]) -> None:
        self.ray, self.users, self._over = _imported(), 0, threading.Event()
        reaper, theirs = None, self.ray.is_initialized()
        if theirs:
            warnings.warn("Ray is initialised already: its cluster is used, and goes on afterwards", stacklevel=5)
        elif address is not None:
            self._init(_joined(address), config, address=address)
        else:
            reaper = Reaper()
            settings = _LOCAL | {"RAY_AUTH_TOKEN": secrets.token_hex(32), MARK: reaper.mark,
                                 "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # fmt: skip
            try:
                usual = {"include_dashboard": False, "num_cpus": cpus}
                self._init(settings, usual | config, address="local", _temp_dir=f"{reaper.folder}/r")
            except BaseException:
                reaper.clear_up()
                raise
        self.address: str = self.ray.get_runtime_context().gcs_address
        self.close = weakref.finalize(self, _close, os.getpid(), self._over, None if theirs else self.ray, reaper)
        threading.Thread(target=_look_at_head, args=(self.address, self._over), daemon=True).start()

    def _init(self, settings: Mapping[str, str], config: Mapping[str, Any], **given: Any) -> None:
        from ray._private import ray_constants, services
        from ray._raylet import AuthenticationTokenLoader, Config

        start, services.ConsolePopen = services.ConsolePopen, partial(services.ConsolePopen, start_new_session=True)
        with environment(settings), _handler_kept(), _silent():
            Config.initialize("")  # it read the environment when Ray was imported
            AuthenticationTokenLoader.instance().reset_cache()
            ray_constants.ENABLE_RAY_CLUSTER = _LOOPBACK not in settings
            try:
                self.ray.init(**{**config, **given, "log_to_driver": False, "configure_logging": False})
            except Exception as error:
                self.ray.shutdown()
                raise ResourceError(
                    "Ray does not start, or does not let this process in", where=given["address"],
                    why=in_words(error.__cause__ or error.__context__ or error, 140),
                    fix="A cluster that is there wants its token (RAY_AUTH_TOKEN), and its version of Ray and Python.",
                ) from error  # fmt: skip
            finally:
                services.ConsolePopen = start

    def answers(self) -> bool:
        """Return whether its head takes a connection: without it Ray waits a minute for all that ends something."""
        return self.ray.is_initialized() and _answers(self.address, _EVERY)

    def leave(self) -> None:
        """Use it no more: who is last ends it, or leaves it."""
        self.users -= 1
        if not self.users:
            self.close()


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


def _joined(address: str) -> dict[str, str]:
    """Return the settings for the cluster at an address; refuse one where none is: Ray would look for a minute."""
    host, _, port = address.rpartition(":")
    refuse(address == "auto" or not host or not port.isdigit(), f"'{address}' is no address of a Ray cluster",
           why="auto may be another user's" if address == "auto" else None,
           fix="Give host:port, as `ray start --head` shows it.")  # fmt: skip
    if not _answers(address):
        raise ArgumentError(
            f"no Ray cluster answers at {address}",
            fix="Start one with `ray start --head`, or leave the address out for a new one on this machine.",
        )
    from ray.util import get_node_ip_address

    # Ray takes the loopback address for the machine's other one
    loopback = host in ("localhost", "127.0.0.1") and not _answers(f"{get_node_ip_address()}:{port}")
    has_token = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
    return _OUTLIVES_HEAD | ({_LOOPBACK: "0"} if loopback else {}) | ({"RAY_AUTH_MODE": "token"} if has_token else {})


def _answers(address: str, seconds: float = _ANSWERS) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), seconds).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _handler_kept() -> Iterator[None]:
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
    stream = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stream, 2)
        os.close(stream)


# ---- how it ends -----------------------------------------------------------------------------------------------------
def _look_at_head(address: str, over: threading.Event) -> None:
    """Ask the run to stop, as SIGTERM does, once the head has not answered several times."""
    failures = 0
    while failures < _FAILURES:
        if over.wait(_EVERY):
            return
        failures = 0 if _answers(address, _EVERY) else failures + 1
    say(f"the Ray cluster's head at {address} is gone: its workers cannot be replaced any more")
    if callable(signal.getsignal(signal.SIGTERM)):
        os.kill(os.getpid(), signal.SIGTERM)


def _close(owner: int, over: threading.Event, ray: Any, reaper: Reaper | None) -> None:
    over.set()
    if ray is None or os.getpid() != owner:  # the user's own cluster, or a fork
        return
    with _handler_kept(), _silent():
        ray.shutdown()
    if reaper is not None:
        reaper.clear_up()
