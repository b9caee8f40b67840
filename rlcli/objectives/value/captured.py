"""The value stage as one graph, from the network to the targets, on columns copied to where it reads them.

`exact` batches keep more or fewer next observations apart. They are padded with rows that nothing gathers to a power of
two, each with a graph of its own; where the stage may become a graph, plain calls are made on the padded batch, too.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlcli.graphs.captured import MOST, Captured, settings
from rlcli.graphs.graph import Recorder
from rlcli.keys import APPROXIMATED, DELTA, NEXT, STEPS_TO_NEXT_OBS, Key, unravel
from rlcli.modules.watch import ModuleWatch, hooked
from rlcli.objectives.value.estimator import ValueEstimator
from rlcli.objectives.value.network import Observations, is_gathered

_COUNTS = ("_rows", "_approximated", "_dropped")  # attributes that an estimate leaves beside columns


class CapturedValues:
    def __init__(self, estimator: ValueEstimator, record: Recorder) -> None:
        self.estimator, self.record = estimator, record
        self._refused: Captured | None = None
        self._watch: ModuleWatch[Any] = ModuleWatch(estimator)
        self._of: dict[tuple, _Stage] = {}
        self._memory: dict[object, Tensor] = {}  # of columns, which all graphs share

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        keys = [*self.estimator.readable, APPROXIMATED, STEPS_TO_NEXT_OBS]
        columns = {key: x for key in keys if (x := batch.get(key, None)) is not None}
        lazy = {key: columns.pop(key) for key in [*columns] if is_gathered(columns[key])}
        if why := self._why(batch, lazy):
            if self._refused is None:
                self._refused = Captured("values", lambda: None, tuple, self.record)
                self._refused.refuse(why)
            return self.estimator(batch)
        room = 1 << (max(len(x.extra) for x in lazy.values()) - 1).bit_length() if lazy else 0
        kinds = {key: (key, x.shape, x.dtype) for key, x in columns.items()}
        kind = self._settings(), batch.shape, room, *kinds.values(), *lazy
        stage = self._of.pop(kind, None)
        if stage is None:  # those that came last stay: how many rows are kept apart drifts as episodes grow
            self._of = dict([(k, stage) for k, stage in self._of.items() if k[0] == kind[0]][1 - MOST :])
            self._memory = {x: at for x, at in self._memory.items() if any(x in k for k in self._of)}
            places = {k: self._memory.setdefault(kinds[k], x.clone()) for k, x in columns.items()}
            stage = _Stage(self, batch, places, lazy, room)
        self._of[kind] = stage
        return stage.on(batch, columns, lazy)

    def _why(self, batch: TensorDictBase, lazy: dict[Key, Any]) -> str:
        of, norm = self.estimator, self.estimator.value_norm
        if any(map(hooked, of.modules())):
            return "hooks on its modules would act only while it is recorded"
        if of.reads_batch or (of.differentiable and torch.is_grad_enabled()):
            return "its estimator reads more than rewards, ends and values, or is differentiated"
        if (of.recurrent and not of.shifted) or (of.shifted and batch.ndim == 1):
            return "which observations its network reads hangs on where trajectories end"
        if norm is not None and (norm.rescales or norm.across is not None):
            return "its normaliser rescales the network, or asks other ranks"
        followed = None if of._net is None or not lazy else Observations(batch, of._net.in_keys).common_gather()
        if batch.get((NEXT, DELTA), None) is not None or (lazy and (followed is None or len(followed[1]) != len(lazy))):
            return "its next observations are no rows of the batch and a few more"
        return ""

    def _settings(self) -> tuple[Any, ...]:
        of, given = self.estimator, [x for k, x in vars(self.estimator).items() if k[0] != "_"]
        numbers = [x for x in given if isinstance(x, int | float | str | torch.dtype)]
        read = [*of.parameters(), *of.buffers(), *(x for x in given if isinstance(x, Tensor))]
        training = [part.training for part in of.modules()]
        # what a graph holds for good
        return self._watch.version, *numbers, *settings(), *training, *(x.data_ptr() for x in read)


class _Stage:
    def __init__(
        self, of: CapturedValues, batch: TensorDictBase, columns: dict[Key, Tensor], lazy: dict[Key, Any], room: int
    ) -> None:
        self.estimator, self.like, self.columns = of.estimator, batch.select(), columns
        self.extra = {key: (type(x), x.extra.new_zeros(room, *x.extra.shape[1:])) for key, x in lazy.items()}
        self.index = [x.index.clone() for x in lazy.values()][:1]
        self.out: dict[Key, Tensor] = {}
        self.counts: dict[str, Any] = {}
        self.captured = Captured("values", self._call, lambda: [*self.out.values(), *of.estimator.buffers()], of.record)

    def on(self, batch: TensorDictBase, columns: dict[Key, Tensor], lazy: dict[Key, Any]) -> TensorDictBase:
        torch._foreach_copy_([*self.columns.values()], [*columns.values()])
        for index, x in zip(self.index, lazy.values(), strict=False):
            index.copy_(x.index)
        for key, x in lazy.items():
            self.extra[key][1][: len(x.extra)].copy_(x.extra)
        self.captured()
        for key, x in self.out.items():
            if key in _COUNTS:
                self.counts[key] = x.clone()
            else:
                batch.set(key, x.clone())
        vars(self.estimator).update(self.counts)
        return batch

    def _call(self) -> None:
        td, given = self.like.copy(), dict(self.columns)
        for key, (kind, extra) in self.extra.items():
            given[key] = kind(self.columns[unravel(key[1:])], extra, *self.index)
        for key, x in given.items():
            td.set(key, x)
        left = {unravel(key): x for key, x in self.estimator(td).items(True, True) if x is not given.get(unravel(key))}
        left |= {name: getattr(self.estimator, name) for name in _COUNTS}
        self.counts = {name: left.pop(name) for name in _COUNTS if not isinstance(left[name], Tensor)}
        for key, x in left.items():
            self.out[key] = self.out[key].copy_(x) if key in self.out else x.clone()
