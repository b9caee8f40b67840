"""`DistributedCollector`: the collectors of `rlcli.collectors.workers`, with ranks of torch.distributed as workers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rlcli import arguments
from rlcli.arguments import refuse
from rlcli.collectors.distributed.group_remote import GroupRemote
from rlcli.collectors.distributed.launch import LAUNCHERS, SERVE, Launcher, Peer, check_backend
from rlcli.collectors.workers.asynchronous import MultiCollector
from rlcli.collectors.workers.sync import MultiSyncCollector
from rlcli.collectors.workers.worker import REMOTE
from rlcli.processes.remote_group import Remote


class DistributedCollector(MultiCollector):
    """Collect by workers that are ranks of a torch.distributed group, this process being rank 0.

    ``sync=True`` is `MultiSyncCollector`, without it `MultiAsyncCollector`: batches, seeds and ids are those of the
    local ones to the bit. Weights go to each worker once a version, with its next order.

    Parameters
    ----------
    create_env_fn : env maker, or a sequence of them
        One a worker.
    policy, **options
        As the local collectors take them, but for `start_method` and `preemptive_threshold`; and the ranks of a group
        are fixed, so `on_worker_error` is ``"raise"``.
    sync : bool
        Whether a batch is put together from all workers, or each worker's is delivered when it is there.
    num_workers : int, optional
        With a single `create_env_fn`: how many make it.
    backend : {"gloo", "nccl", "mpi"}
        That this torch has.
    launcher : {"mp", "torchrun", "submitit", "submitit_delayed"}
        Who starts the workers (`rlcli.collectors.distributed.launch`). Under torchrun all ranks make the collector:
        those above 0 serve it, and exit.
    tcp_port : optional
        Taken for the sake of older scripts: no port is agreed on.
    slurm_kwargs : mapping, optional
        With ``launcher="submitit"``: options of `sbatch`, as submitit names them, and ``folder``, which all nodes see.
    timeout : float
        Seconds for all workers to come.

    Raises
    ------
    ArgumentError
        Options that do not fit together; this torch lacks the backend; what the launcher needs is not there.
    ResourceError
        Not all workers came.
    EnvError
        A worker ended; and whatever an env raises in one.
    """

    _serve = SERVE["distributed"]
    _remote: Callable[[Launcher], Remote] = GroupRemote
    _settings: Any = None

    def __init__(
        self, create_env_fn: Any, policy: Any = None, *, sync: bool = False, backend: str = "gloo",
        launcher: str = "mp", tcp_port: Any = None, slurm_kwargs: Mapping[str, Any] | None = None,
        timeout: float = 120.0, **options: Any,
    ) -> None:  # fmt: skip
        name = type(self).__name__
        check_backend(backend)
        refuse(options.get("on_worker_error", "raise") != "raise", f"a {name} cannot replace a worker",
               why="the ranks of a group are fixed", fix="Use a RayCollector, or on_worker_error='raise'.")  # fmt: skip
        arguments.choice("launcher", launcher, LAUNCHERS)
        self._launcher = partial(LAUNCHERS[launcher], slurm_kwargs=slurm_kwargs or {})
        self._shared: dict[str, Any] = {"backend": backend, "timeout": timeout, "path": tuple(sys.path)}
        super().__init__(create_env_fn, policy, sync=sync, transport=self._transport, **options)

    def _transport(self, count: int) -> Remote:
        launcher = self._launcher(Peer(self._serve, REMOTE, count + 1, settings=self._settings, **self._shared))
        if launcher.own.rank:
            launcher.own.run()
            sys.exit(0)
        return self._remote(launcher)


class DistributedSyncCollector(DistributedCollector, MultiSyncCollector):
    """`DistributedCollector` with ``sync=True``: one batch of all workers."""


# older spellings
DistributedDataCollector = DistributedCollector
DistributedSyncDataCollector = DistributedSyncCollector
