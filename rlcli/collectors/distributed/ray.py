"""`RayCollector`: the collectors of `rlcli.collectors.workers`, with workers on a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlcli import arguments
from rlcli.arguments import refuse
from rlcli.collectors.collector import Collector
from rlcli.collectors.distributed.cluster import cluster_of
from rlcli.collectors.distributed.ray_remote import RayRemote, amounts_of
from rlcli.collectors.options import AHEAD
from rlcli.collectors.workers.asynchronous import MultiAsyncCollector, MultiCollector
from rlcli.collectors.workers.each import makers_of, own_length
from rlcli.collectors.workers.sync import MultiSyncCollector
from rlcli.collectors.workers.worker import REMOTE

_INNER = {"single": Collector, "sync": MultiSyncCollector, "async": MultiAsyncCollector}


class RayCollector(MultiCollector):
    """Collect by workers on a Ray cluster: `MultiSyncCollector` with ``sync=True``, `MultiAsyncCollector` without.

    Batches, seeds and ids are those of the local ones to the bit. A batch is copied once, out of Ray's store, which is
    empty again then; weights go there once a version. Without an address a cluster on this machine is started, which
    listens on the loopback interface alone, and ends with the collector.

    Parameters
    ----------
    create_env_fn : env maker, or a sequence of them
        One a collector.
    policy, **options
        As the local collectors take them, but for `start_method` and `preemptive_threshold`.
    sync : bool
        Whether a batch is put together from all workers, or each worker's is delivered when it is there.
    num_collectors : int, optional
        With a single `create_env_fn`: how many make it.
    num_workers_per_collector : int
        Workers of each collector, which share a node; each is an actor, and makes the env of its collector.
    collector_class : {"single", "sync", "async"} or one of those classes, optional
        What a collector of several workers is: by default what `sync` says. With ``sync=False``, workers of a
        `MultiSyncCollector` share its `frames_per_batch`, and fill a batch ``[k, T]`` or ``[k, P, T]`` together.
    collector_kwargs : mapping, or a sequence of them, optional
        Further options, the same for all or one mapping a collector.
    ray_init_config : mapping, optional
        For `ray.init`; ``{"address": "host:port"}`` joins the cluster there, with its token in `RAY_AUTH_TOKEN`.
    remote_configs : mapping, or a sequence of them, optional
        What each worker asks for, as `ray.remote` takes it, the same for all or one mapping a collector; one CPU by
        default.
    update_after_each_batch : bool
        Whether the weights are published after each batch.
    max_weight_update_interval : int
        Batches after which they are published at the latest; -1 leaves it to `update_policy_weights_`.
    timeout : float
        Seconds that the cluster has to have room for all workers.

    Raises
    ------
    ArgumentError
        Options that do not fit together; Ray is not installed; nothing answers at the address.
    ResourceError
        Ray refuses to start, or to let this process in, or has no room for the workers.
    EnvError
        A worker ended; and whatever an env raises in one.
    """

    def __init__(
        self, create_env_fn: Any, policy: Any = None, *, sync: bool = False, num_collectors: int | None = None,
        num_workers_per_collector: int = 1, collector_class: Any = None,
        collector_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        update_after_each_batch: bool = False, max_weight_update_interval: int = -1, timeout: float = 120.0,
        **options: Any,
    ) -> None:  # fmt: skip
        makers = makers_of(create_env_fn, num_collectors, "num_collectors")
        self._each = arguments.count("num_workers_per_collector", num_workers_per_collector)
        waits = _inner(collector_class, self._each) is MultiSyncCollector and not sync
        self._together = self._each if waits else 1
        self._resources = _of_each("remote_configs", remote_configs or {"num_cpus": 1}, len(makers))
        for wanted in self._resources:
            amounts = amounts_of(wanted).values()
            refuse(not amounts or min(amounts) <= 0, "a worker in remote_configs asks for no resource", why=f"{wanted}",
                   fix="Give num_cpus, num_gpus, memory or resources: {'num_cpus': 1}.")  # fmt: skip
        self._init_config, self._timeout = ray_init_config, timeout
        self._interval = max_weight_update_interval
        self._version = self._since = 0  # newest, and batches with it
        self._fits = 0  # frames that Ray's store has room for
        if update_after_each_batch:
            options["update_at_each_batch"] = True
        further = _of_each("collector_kwargs", collector_kwargs or {}, len(makers))
        for name in {name for one in further for name in one}:
            each = [one.get(name) for one in further for _ in range(self._each)]
            options[name] = each[0] if all(value is each[0] for value in each) else each
        refuse(self._together > 1 and (options.get("reset_when_done") is False or _differ(options, self._together)),
               "workers of a MultiSyncCollector fill their batches in equal parts when sync=False",
               why="reset_when_done=False, or frames_per_batch of each, makes them differ",
               fix="Use sync=True.")  # fmt: skip
        makers = [maker for maker in makers for _ in range(self._each)]
        super().__init__(makers, policy, sync=sync, transport=self._remote, **options)

    def _remote(self, count: int) -> RayRemote:
        cpus = self._each * sum(each.get("num_cpus", 1) for each in self._resources)
        return RayRemote(cluster_of(cpus, self._init_config), REMOTE, self._resources, self._each, self._timeout)

    def _before_batch(self) -> None:
        ahead = 1 if isinstance(self, MultiSyncCollector) else AHEAD * len(self.lanes_in_batch)
        ordered = self.frames_in_batch * ahead
        if ordered > self._fits:
            self.group.processes.remote.check_store(ordered * self.schema.width)
            self._fits = ordered
        if 0 < self._interval <= self._since and self._version == self.policy_version:
            self.update_policy_weights_()
        if self._version != self.policy_version:
            self._version, self._since = self.policy_version, 0
        self._since += 1
        super()._before_batch()


def _inner(kind: Any, workers: int) -> Any:
    """Return the class of inner collectors; refuse one that these workers do not make."""
    kind = _INNER.get(kind, kind) if isinstance(kind, str) else kind
    refuse(kind not in (None, *_INNER.values()), f"unknown collector_class {kind!r}",
           fix=f"Use one of {', '.join(_INNER)}.")  # fmt: skip
    refuse(kind is Collector and workers > 1, "a Collector has one worker",
           why=f"num_workers_per_collector is {workers}",
           fix="Use MultiSyncCollector or MultiAsyncCollector.")  # fmt: skip
    return kind


def _differ(options: Mapping[str, Any], together: int) -> bool:
    frames = options.get("frames_per_batch", 0)
    each = list(frames) if isinstance(frames, list | tuple) else []
    return any(len({*each[at : at + together]}) > 1 for at in range(0, len(each), together))


def _of_each(name: str, value: Any, count: int) -> list[Mapping[str, Any]]:
    """Return a mapping for each collector."""
    if isinstance(value, Mapping):
        return [value] * count
    own_length(name, value, count)
    return list(value)
