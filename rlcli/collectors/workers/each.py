"""What is each worker's own: its options, of which a list has an entry for each, its pickles and its record.

Tensors of `share_memory_()` stay the parent's in a pickle: counters and flags of hooks and envs. What a module holds is
copied all the same: versions of weights are published whole.
"""

from __future__ import annotations

import inspect
import io
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.multiprocessing import get_sharing_strategy

from rlcli.arguments import nearest, refuse
from rlcli.collectors.options import EACH, FIELDS, PARENT, CollectorOptions, counted, in_scope
from rlcli.errors import ArgumentError, in_words
from rlcli.processes.process import cores

_OF_ONE_KIND = {  # of collectors with workers: the values that ask for nothing, which any kind may be given
    "cat_results": (("stack",), "a batch is one worker's, and put together with no other's", "MultiSyncCollector"),
    "preemptive_threshold": (
        (None, 1), "workers that do not wait for each other are not preempted", "MultiSyncCollector"
    ),
    "max_lag": ((None,), "workers that wait for each other are never behind", "MultiAsyncCollector"),
    "on_lag": (("report",), "workers that wait for each other are never behind", "MultiAsyncCollector"),
}  # fmt: skip


def own_length(name: str, value: Sequence[Any], workers: int) -> None:
    refuse(len(value) != workers, f"{name} has {len(value)} entries, for {workers} workers")


def makers_of(create_env_fn: Any, number: int | None, name: str = "num_workers") -> list[Any]:
    """Return what makes the env of each worker, as many as the option of this name says."""
    if isinstance(create_env_fn, Sequence) and not isinstance(create_env_fn, str):
        makers = list(create_env_fn)
        refuse(not makers or number not in (None, len(makers)),
               f"create_env_fn has {len(makers)} entries, one for each {name.removeprefix('num_')[:-1]}",
               why=f"{name} is {number}")  # fmt: skip
        return makers
    return [create_env_fn] * counted(name, 1 if number is None else number, 1)


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
    alike([facts["batched"] for facts in about], "some workers have a single env, and some a batch of envs",
          lambda *_: "their batches have different shapes", "SerialEnv(1, ...) is a batch of one.")  # fmt: skip
    alike([facts["actions"] for facts in about], "the workers' envs do not take the same actions",
          "{} against {}".format, "Give all workers envs with the same actions.")  # fmt: skip


def alike(each: Sequence[Any], what: str, why: Callable[[Any, Any], str], fix: str) -> None:
    """Refuse workers of which one differs from the first in this."""
    for index, one in enumerate(each):
        if one != each[0]:
            raise ArgumentError(what, where=f"workers 0 and {index}", why=why(each[0], one), fix=fix)


def check_names(options: Mapping[str, Any], kind: type) -> None:
    """Refuse options that a collector of this `kind` has not, of those that its constructor has no parameter for."""
    names = FIELDS.keys() - {"traj_pool"}
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
            parameters = [each for part in kind.__mro__ for each in inspect.signature(part).parameters.values()]
            legal = names.union(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)
            raise ArgumentError(f"a collector has no option {name!r}", fix=nearest(name, legal))


def check_elsewhere(options: Mapping[str, Any], start_method: str | None, schemes: Any) -> None:
    """Refuse what workers of other machines cannot do."""
    refuse(options.get("weights_swap", "rollout") != "rollout", "weights_swap='step' needs workers of this machine",
           why="new weights get to others with the order of a batch", fix="Leave it out.")  # fmt: skip
    refuse(start_method is not None, "start_method is of processes of this machine",
           why="a transport starts these workers", fix="Leave it out.")  # fmt: skip
    for name, scheme in schemes.items() if isinstance(schemes, Mapping) else ():
        refuse(getattr(scheme, "local", False), f"weights of '{name}' do not get to workers elsewhere",
               why=f"a {type(scheme).__name__} shares memory",
               fix="Use MultiProcessWeightSyncScheme, or leave it out.")  # fmt: skip


def of_worker(options: Mapping[str, Any], index: int, count: int, maker: Any) -> CollectorOptions:
    """Return the options of one worker: what stays with the parent is left at its default."""
    chosen = {name: value for name, value in options.items() if name in FIELDS and name not in in_scope(PARENT)}
    for name in in_scope(EACH):
        value = chosen.get(name)
        if isinstance(value, list | tuple):
            own_length(name, value, count)
            chosen[name] = value[index]
    return CollectorOptions(create_env_fn=maker, **chosen)


def one_of_all(name: str, value: Any, workers: int) -> Any:
    """Return what a list says of each worker, where it has to be the same for all."""
    if not isinstance(value, list | tuple):
        return value
    own_length(name, value, workers)
    refuse(len({*map(str, value)}) > 1, f"{name} has more than one device",
           why="the rows of all workers make one batch", fix="Give one of them.")  # fmt: skip
    return value[0]


# ---- what another process is sent ------------------------------------------------------------------------------------
def pickled(options: CollectorOptions, *, shared: bool = True) -> bytes:
    """Pickle the options by value; `shared` tensors stay shared, but for those of modules."""
    try:
        return dumps(options, shared=shared)
    except Exception:  # whatever a user's `__reduce__` raises
        for name in FIELDS:
            sent(name, getattr(options, name))
        raise


def sent(name: str, value: Any, *, shared: bool = True) -> bytes:
    """Return an option as another process can take it: `pickle.loads` gives the like."""
    try:
        return dumps(value, shared=shared)
    except Exception as error:  # whatever a user's `__reduce__` raises
        raise ArgumentError(
            f"{name} cannot be sent to another process", why=f"it is a {type(value).__name__}: {in_words(error, 200)}",
            fix=_SENDABLE.get(name, "Give one that pickle.dumps takes."),
        ) from error  # fmt: skip


_SENDABLE = {
    "create_env_fn": "Give a function that makes the env from what it is called with, or what can be pickled: "
    "partial(GymEnv, 'CartPole-v1').",
    "policy": "Give policy_factory=, a function that makes the policy.",
    "policy_factory": "Give a function that makes all that the policy needs.",
    "traj_pool": "Leave it out: each process counts its own trajectories.",
}


def dumps(value: Any, *, shared: bool = True) -> bytes:
    """Return what `pickle.loads` reads in another process; `shared` tensors while this one holds them."""
    if not shared:
        return cloudpickle.dumps(value)
    body = io.BytesIO()
    _Pickler(body).dump(value)
    return body.getvalue()


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._copied: set[int] = set()  # where the tensors of modules lie

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, nn.Module):  # comes before its tensors
            self._copied |= {x.untyped_storage().data_ptr() for x in (*obj.parameters(), *obj.buffers())}
        elif type(obj) is Tensor and obj.device.type == "cpu" and obj.is_shared():
            storage = obj.untyped_storage()
            if storage.data_ptr() not in self._copied:
                if sys.platform == "linux" and get_sharing_strategy() == "file_descriptor":
                    fd, size = storage._share_fd_cpu_()
                    address = os.getpid(), fd, size
                    return _opened, (address, obj.dtype, obj.storage_offset(), tuple(obj.shape), obj.stride())
                warnings.warn("a tensor in shared memory was sent to a worker as a copy", stacklevel=2)
        return super().reducer_override(obj)


def _opened(place: tuple[int, int, int], dtype: torch.dtype, *form: Any) -> Tensor:
    """Return the tensor, in the memory of the process that sent it."""
    pid, number, size = place
    fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
    try:
        storage = torch.UntypedStorage._new_shared_fd_cpu(fd, size)  # type: ignore[attr-defined]
    finally:
        os.close(fd)
    return torch.empty(0, dtype=dtype).set_(storage, *form)


# ---- records ---------------------------------------------------------------------------------------------------------
@dataclass
class WorkerRecord:
    """Record one worker, of `lanes` envs from the collector's `first_lane` on."""

    lanes: int
    first_lane: int
    episodes: list[int]
    next_id: int
    frames: int = 0  # in whole batches, delivered or not
    version: int = 0
    lag: int | None = None  # publications that its last batch was behind; None where nothing is published meanwhile
    largest_lag: int | None = None
    restarts: int = 0
    lost_frames: int = 0
    cause: str = ""
    # its next rows begin episodes (True) or are mid-episode after a loss (False); None: they go on
    begins: bool | None = None
    # seconds of this session: the learner for its batches, and those, once there, for the learner; None: not known
    waited: tuple[float, float] | None = None
    at_most: str = ""  # "at most ": `lost_frames` it was asked for, and those it took went with it

    @property
    def span(self) -> range:
        return range(self.first_lane, self.first_lane + self.lanes)
