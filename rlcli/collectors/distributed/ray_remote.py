"""Workers as actors of a Ray cluster.

Ray places them, carries orders, batches and weights, and tells who died. It never restarts one nor repeats an order: an
order that is carried out twice would step envs twice.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import torch

from rlcli.collectors.distributed.cluster import Cluster
from rlcli.errors import ArgumentError, ResourceError, in_words
from rlcli.processes.channel import packed
from rlcli.processes.line import FAILED
from rlcli.processes.memory import size
from rlcli.processes.process import become_worker
from rlcli.processes.remote_group import Answer, Gone, RemoteWorker

_LOOK = 1.0  # seconds between two looks at a placement group
_NAMES = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}  # option of an actor -> resource of a cluster


class RayRemote:
    """Run workers as actors of a cluster, which is left by `close`: a `Remote`; ResourceError where there is no room.

    The actors of a bundle, `together` of them, share a node and ask for the same `resources` each, `{"num_cpus": 1}`.
    """

    def __init__(
        self, cluster: Cluster, target: str, resources: Sequence[Mapping[str, Any]], together: int, timeout: float
    ) -> None:
        from ray.util import placement_group

        self.cluster, self.target, self.resources, self.together = cluster, target, resources, together
        self._ray, self._workers = cluster.ray, set[Any]()
        node = self._ray.get_runtime_context().get_node_id()
        self._store: float = sum(
            each["Resources"].get("object_store_memory", 0) for each in self._ray.nodes() if each["NodeID"] == node
        )
        bundles = [{name: together * amount for name, amount in amounts_of(each).items()} for each in resources]
        self._place: Any = None
        try:
            self._place = placement_group(bundles, strategy="SPREAD")
            left = timeout
            while not self._place.wait(min(_LOOK, left)):
                if (left := left - _LOOK) <= 0:
                    raise ResourceError(
                        f"the Ray cluster has no room for {len(bundles)} x {_listed(bundles[0])}",
                        where=cluster.address,
                        why=f"after {timeout:g} s it has {_listed(self._ray.available_resources())} free",
                        fix="Use fewer workers, ask for less for each, add nodes, or begin with a larger cluster: "
                        "ray_init_config={'num_cpus': N}.",
                    )
        except BaseException:
            self.close()
            raise

    def start(self, index: int) -> Any:
        """Start an actor; what is wrong with its node is told by its first answer."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if not self._ray.is_initialized():  # Ray would start another cluster
            raise ResourceError("the Ray cluster was shut down, and a worker is lost", where=self.cluster.address,
                                fix="Leave ray.shutdown() to the collector, and make a new one.")  # fmt: skip
        bundle = index // self.together
        place = PlacementGroupSchedulingStrategy(self._place, placement_group_bundle_index=bundle)
        options = {**self.resources[bundle], "max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": place}
        try:
            worker = self._ray.remote(**options)(RayWorker).remote(self.target, versions())
        except (TypeError, ValueError) as error:
            raise ArgumentError("remote_configs is not what ray.remote takes", why=in_words(error)) from None
        self._workers.add(worker)
        return worker

    def submit(self, worker: Any, turn: int, kind: int, body: bytes, carried: Mapping[str, Any]) -> Future[Answer]:
        """Have a worker carry out an order; see `Remote.submit`."""
        if not self._ray.is_initialized():  # Ray would start another cluster
            raise Gone("was lost with the cluster, which somebody shut down")
        answer: Future[Answer] = Future()
        come = worker.carry_out.remote(turn, kind, body, [*carried], *carried.values())
        come.future().add_done_callback(partial(_hand_on, answer))
        return answer

    def check_store(self, need: int) -> None:
        """Refuse batches of so many bytes where the store of this node does not hold them: Ray would use its disk."""
        if need > self._store:
            raise ResourceError(
                "Ray's object store is too small for the batches that are ordered", where=self.cluster.address,
                why=f"they may take {size(need)}, and it has {size(self._store)} on this node",
                fix=f"Use smaller batches, or a larger store: ray start --object-store-memory={need}, or here "
                f"ray_init_config={{'object_store_memory': {need}}}.",
            )  # fmt: skip

    def carry(self, message: bytes) -> Any:
        """Put a message into the object store, once for all workers; each node fetches it once."""
        return self._ray.put(np.frombuffer(message, np.uint8))

    def kill(self, worker: Any) -> None:
        """End an actor at once."""
        self._workers.discard(worker)
        if self._ray.is_initialized():
            self._ray.kill(worker)

    def close(self) -> None:
        """End all actors, and leave the cluster."""
        from ray.util import remove_placement_group

        if self.cluster.answers():
            for worker in list(self._workers):
                self.kill(worker)
            if self._place is not None:
                remove_placement_group(self._place)
        self.cluster.leave()


class RayWorker:
    """Serve one worker's orders in an actor, on its main thread, where a step that hangs can be interrupted."""

    def __init__(self, target: str, needed: Mapping[str, str]) -> None:
        become_worker()
        there = versions()
        self._others = [
            f"{name} {there[name]} there, {here} here" for name, here in needed.items() if there[name] != here
        ]
        self._worker = RemoteWorker(target)

    def carry_out(self, turn: int, kind: int, body: bytes, names: list[str], *messages: np.ndarray) -> Answer:
        if self._others:
            error = ArgumentError(
                "a node of the Ray cluster has other versions", where=platform.node(), why="; ".join(self._others),
                fix="Install the same ones on all nodes.",
            )  # fmt: skip
            return FAILED, packed((error, "")), ()
        carried: dict[str, Any] = {name: each.data for name, each in zip(names, messages, strict=True)}
        return self._worker.carry_out(turn, kind, body, carried)


def versions() -> dict[str, str]:
    """Return the versions that all workers share with this process."""
    return {"Python": platform.python_version(), "rlcli": sys.modules["rlcli"].__version__, "torch": torch.__version__}


# ---- what becomes of an order ----------------------------------------------------------------------------------------
def _hand_on(answer: Future[Answer], come: Future[Any]) -> None:
    """Hand on what an actor answered, or how it ended."""
    if not answer.set_running_or_notify_cancel():
        return
    error = come.exception()
    if error is None:
        answer.set_result(come.result())
    elif "creation task" in str(error):  # Ray's words of a constructor that failed
        answer.set_exception(ArgumentError(
            "a worker cannot be made on its node", why=str(error).strip().splitlines()[-1],
            fix="Install rlcli, and what the envs need, on all nodes.",
        ))  # fmt: skip
    else:
        answer.set_exception(Gone(_how_it_ended(error)))


def _how_it_ended(error: BaseException) -> str:
    text = str(error)
    if "Node" in type(error).__name__ or "node has died" in text:
        return "was lost with its node"
    reason = text.strip().splitlines()[-1:]  # what stands before it are the numbers of the actor
    return "ended unexpectedly" if "SYSTEM_ERROR" in text else f"was lost ({type(error).__name__}: {''.join(reason)})"


def amounts_of(resources: Mapping[str, Any]) -> dict[str, float]:
    """Return what an actor's options ask for, by Ray's names of resources."""
    usual = {_NAMES[name]: value for name, value in resources.items() if name in _NAMES and value}
    return usual | dict(resources.get("resources") or {})


def _listed(amounts: Mapping[str, float]) -> str:
    """Say so much of which resources, without those that Ray counts for itself."""
    shown = {name: amount for name, amount in amounts.items() if not re.search("node:|_group|store|^accel", name)}
    return ", ".join(
        f"{amount / 2**30:.1f} GiB memory" if name == "memory" else f"{amount:g} {name}"
        for name, amount in shown.items()
    ) or "nothing"  # fmt: skip
