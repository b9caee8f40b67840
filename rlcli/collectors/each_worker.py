"""From the options of a collector with workers to those of each: where one is a list, it has an entry for each."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from rlcli.collectors.devices import not_both
from rlcli.collectors.options import EACH, FIELDS, PARENT, CollectorOptions, CountedOption, counted, in_scope
from rlcli.errors import ArgumentError
from rlcli.processes.process import cores

_OF_ONE_KIND = {  # of collectors with workers: the values that ask for nothing, which any kind may be given
    "cat_results": (("stack",), "a batch is one worker's, and put together with no other's", "MultiSyncCollector"),
    "preemptive_threshold": (
        (None, 1), "workers that do not wait for each other are not preempted", "MultiSyncCollector"
    ),
    "max_lag": ((None,), "workers that wait for each other are never behind", "MultiAsyncCollector"),
    "on_lag": (("report",), "workers that wait for each other are never behind", "MultiAsyncCollector"),
}  # fmt: skip
_WITHOUT_EFFECT = {"trust_policy", "use_buffers"}


class CountedEach(CountedOption):
    """Count `frames_per_batch` of a batch, or of each worker's share of it."""

    def __set__(self, instance: Any, value: Any) -> None:
        if not isinstance(value, list | tuple):
            super().__set__(instance, value)
            return
        own_length("frames_per_batch", value, instance.num_workers)
        vars(instance)[self._name] = [counted(self._name, frames) for frames in value]


def own_length(name: str, value: Sequence[Any], workers: int) -> None:
    """Refuse a list that has not an entry for each worker."""
    if len(value) != workers:
        raise ArgumentError(f"{name} has {len(value)} entries, for {workers} workers")


def makers_of(create_env_fn: Any, num_workers: int | None) -> list[Any]:
    """Return what makes the env of each worker."""
    if isinstance(create_env_fn, Sequence) and not isinstance(create_env_fn, str):
        makers = list(create_env_fn)
        if not makers or num_workers not in (None, len(makers)):
            raise ArgumentError(
                f"create_env_fn has {len(makers)} entries, one for each worker", why=f"num_workers is {num_workers}"
            )
        return makers
    return [create_env_fn] * counted("num_workers", 1 if num_workers is None else num_workers, 1)


def warn_of_cores(workers: int) -> None:
    """Say so where workers are more than the cores, which only helps envs that wait."""
    if workers > (there := cores()):
        warnings.warn(
            f"{workers} workers share {there} core{'s' * (there > 1)}: right where envs wait in step (for a device, a "
            f"network, another process); where they compute, {there} with more envs each would be faster",
            stacklevel=4,
        )


def check_alike(about: Sequence[Mapping[str, Any]]) -> None:
    """Refuse workers whose envs take different actions, or are single and batched: both may look alike in a batch."""
    first = about[0]["actions"]
    for index, said in enumerate(about):
        if said["batched"] != about[0]["batched"]:
            single, several = sorted((0, index), key=lambda worker: about[worker]["batched"])
            raise ArgumentError(
                "some workers have a single env, and some a batch of envs", where=f"workers {single} and {several}",
                why="their batches have different shapes", fix="SerialEnv(1, ...) is a batch of one.",
            )  # fmt: skip
    for index, said in enumerate(about):
        if said["actions"] != first:
            raise ArgumentError(
                "the workers' envs do not take the same actions", where=f"workers 0 and {index}",
                why=f"{first} against {said['actions']}", fix="Give all workers envs with the same actions.",
            )  # fmt: skip


def check_names(options: Mapping[str, Any], kind: type) -> None:
    """Refuse options that a collector of this `kind` has not, of those that its constructor has no parameter for."""
    names = (FIELDS.keys() | _WITHOUT_EFFECT) - {"traj_pool"}
    for name, value in options.items():
        if name in _OF_ONE_KIND:
            without_effect, why, other = _OF_ONE_KIND[name]
            if value not in without_effect:
                raise ArgumentError(f"a {kind.__name__} has no {name}", why=why, fix=f"Leave it out, or use {other}.")
        elif name == "traj_pool":
            raise ArgumentError(
                f"a {kind.__name__} has no option 'traj_pool'", why="each worker counts its own trajectories",
                fix="Leave it out.",
            )  # fmt: skip
        elif name not in names:
            own = [each for part in kind.__mro__ for each in inspect.signature(part).parameters.values()]
            near = difflib.get_close_matches(name, names.union(p.name for p in own if p.kind is p.KEYWORD_ONLY), n=1)
            raise ArgumentError(f"a collector has no option {name!r}", fix=f"Did you mean {near[0]}?" if near else None)


def of_worker(options: Mapping[str, Any], index: int, count: int, maker: Any) -> CollectorOptions:
    """Return the options of one worker: what stays with the parent is left at its default."""
    own = {name: value for name, value in options.items() if name in FIELDS and name not in in_scope(PARENT)}
    not_both(own.get("device"), own.get("devices"))
    for name in in_scope(EACH):
        value = own.get(name)
        if isinstance(value, list | tuple):
            own_length(name, value, count)
            own["device" if name == "devices" else name] = value[index]
            own.pop("devices", None)
    return CollectorOptions(create_env_fn=maker, **own)


def one_of_all(name: str, value: Any, workers: int) -> Any:
    """Return what a list says of each worker, where it has to be the same for all."""
    if not isinstance(value, list | tuple):
        return value
    own_length(name, value, workers)
    if len({*map(str, value)}) > 1:
        raise ArgumentError(
            f"{name} has more than one device", why="the rows of all workers make one batch", fix="Give one of them."
        )
    return value[0]
