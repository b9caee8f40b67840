"""Workers as actors of a Ray cluster.

Ray places them, carries orders, batches and weights, and tells who died. It never restarts one nor repeats an order: an
order that is carried out twice would step envs twice.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import torch

import rlcli
from rlcli.arguments import refuse
from rlcli.collectors.distributed.cluster import Cluster
from rlcli.errors import ArgumentError, ResourceError, in_words
from rlcli.processes.line import FAILED
from rlcli.processes.process import become_worker
from rlcli.processes.remote_group import Answer, Gone, RemoteWorker

_SHOWN = ("CPU", "GPU", "memory")
_LOOK = 1.0  # seconds between two looks at a placement group


class RayRemote:
    """Run workers as actors of a cluster: a `Remote`.

    Parameters
    ----------
    cluster : Cluster
        Left when this is closed.
    target : str
        ``module:name`` of what serves their orders, see `RemoteWorker`.
    resources : sequence of mappings
        What the actors of each bundle ask for, as `ray.remote` takes it: ``{"num_cpus": 1}``.
    together : int
        Actors of one bundle, which share a node; bundles are spread over nodes.
    timeout : float
        Seconds for the cluster to have room for all of them.

    Raises
    ------
    ResourceError
        It has not.
    """

    def __init__(
        self, cluster: Cluster, target: str, resources: Sequence[Mapping[str, Any]], together: int, timeout: float
    ) -> None:
        from ray.util import placement_group, remove_placement_group

        self.cluster, self.target, self.resources, self.together = cluster, target, resources, together
        self._ray, self._workers = cluster.ray, set[Any]()
        bundles = [{name: together * amount for name, amount in _amounts(each).items()} for each in resources]
        self._place = placement_group(bundles, strategy="SPREAD")
        self._remove = partial(remove_placement_group, self._place)
        left = timeout
        while not self._place.wait(min(_LOOK, left)):
            left -= _LOOK
            if left <= 0:
                free = self._ray.available_resources()
                self._remove()
                raise ResourceError(
                    f"the Ray cluster has no room for {len(bundles)} x {_listed(bundles[0])}", where=cluster.address,
                    why=f"after {timeout:g} s it has {_listed(free)} free",
                    fix="Use fewer workers, ask for less for each, or add nodes.",
                )  # fmt: skip

    def start(self, index: int) -> Any:
        """Start an actor; what is wrong with its node is told by its first answer."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = index // self.together
        place = PlacementGroupSchedulingStrategy(self._place, placement_group_bundle_index=bundle)
        kind = self._ray.remote(max_restarts=0, max_task_retries=0, **self.resources[bundle])(RayWorker)
        worker = kind.options(scheduling_strategy=place).remote(self.target, versions())
        self._workers.add(worker)
        return worker

    def submit(self, worker: Any, turn: int, kind: int, body: bytes, carried: Mapping[str, Any]) -> Future[Answer]:
        """Have a worker carry out an order; see `Remote.submit`."""
        answer: Future[Answer] = Future()
        reference = worker.carry_out.remote(turn, kind, body, [*carried], *carried.values())
        reference.future().add_done_callback(partial(_come, answer))
        return answer

    def carry(self, message: bytes) -> Any:
        """Put a message into the object store, once for all workers; each node fetches it once."""
        return self._ray.put(np.frombuffer(message, np.uint8))

    def kill(self, worker: Any) -> None:
        """End an actor at once."""
        self._workers.discard(worker)
        self._ray.kill(worker)

    def close(self) -> None:
        """End all actors, and leave the cluster."""
        if self._ray.is_initialized():
            for worker in list(self._workers):
                self.kill(worker)
            self._remove()
        self.cluster.leave()


class RayWorker:
    """Serve one worker's orders in an actor, on its main thread, where a step that hangs can be interrupted."""

    def __init__(self, target: str, versions_there: dict[str, str]) -> None:
        become_worker()
        self.worker, self.refusal = None, b""
        
        self.worker = RemoteWorker(target)

    def carry_out(self, turn: int, kind: int, body: bytes, names: list[str], *messages: np.ndarray) -> Answer:
        carried = {name: message.data for name, message in zip(names, messages, strict=True)}
        return self.worker.carry_out(turn, kind, body, carried)


def versions() -> dict[str, str]:
    """Return what all workers must have alike."""
    return {"Python": platform.python_version(), "rlcli": rlcli.__version__, "torch": torch.__version__}
