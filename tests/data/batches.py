"""Batches with ends in every place that matters, each beside its `full` twin, and a process for what may crash."""

from __future__ import annotations

import os
import pickle
import signal
import traceback
from multiprocessing import Pipe

import numpy as np
import torch
from tensordict import TensorDict

from rlcli.data.next_obs import Rows, build_exact, build_full

KEYS = ("observation", ("camera", "pixels"))


def arrays(rng, lanes=3, steps=5, ends=4, dtype=np.float32, shapes=((4,), (2, 3))):
    """The four arguments of every builder: columns, carrier, places of ends, their true successors."""
    cells = [(t, lane) for t in range(steps) for lane in range(lanes)]
    places = [cells[i] for i in sorted(rng.choice(len(cells), min(ends, len(cells)), replace=False))]

    def values(*shape):
        return (rng.random(shape) * 250).astype(dtype)

    now = {key: values(lanes, steps, *shape) for key, shape in zip(KEYS, shapes, strict=True)}
    after = {key: values(lanes, *shape) for key, shape in zip(KEYS, shapes, strict=True)}
    last = {key: values(len(places), *shape) for key, shape in zip(KEYS, shapes, strict=True)} if places else {}
    return now, after, places, last


def twins(seed=0, *, batched=True, **options):
    """(exact, full): two batches that hold the same steps."""
    now, after, places, last = arrays(
        np.random.default_rng(seed), lanes=options.pop("lanes", 3 if batched else 1), **options
    )
    out = []
    for build in (build_exact, build_full):
        roots = {key: torch.from_numpy(column.copy()) for key, column in now.items()}
        lanes, steps = now["observation"].shape[:2]
        nexts = build(roots, after, places, last, batched=batched)
        size = [lanes, steps] if batched else [steps]
        td = TensorDict({}, batch_size=size, names=[None, "time"] if batched else ["time"])
        for key, root in roots.items():
            td.set(key, root if batched else root[0])
        for key, value in nexts.items():
            td.set(("next", *((key,) if isinstance(key, str) else key)), value)
        td.set(("next", "reward"), torch.arange(float(np.prod(size))).reshape(*size, 1))
        out.append(td)
    return out


class Child:
    """A forked process that runs functions of test modules, so that a segfault fails one test and not the suite.

    One process serves all calls; after one that died, the next call forks another.
    """

    pid = 0

    def __call__(self, work, *args):
        """What `work(*args)` returns; both are pickled, `work` by its name."""
        if not self.pid:
            self.line, line = Pipe()
            self.pid = os.fork()
            if self.pid == 0:
                self.line.close()
                self._serve(line)
            line.close()
        try:
            self.line.send((work, args))
            fine, value = self.line.recv()
        except (EOFError, OSError):
            status = self._ended()
            raise AssertionError(f"the process ended with {status}; minus a number is a signal") from None
        assert fine, value
        return value

    @staticmethod
    def _serve(line):
        try:
            while True:
                work, args = line.recv()
                try:
                    answer = pickle.dumps((True, work(*args)))
                except BaseException:
                    answer = pickle.dumps((False, traceback.format_exc()))
                line.send_bytes(answer)
        finally:
            os._exit(0)

    def _ended(self):
        pid, self.pid = self.pid, 0
        self.line.close()
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def close(self):
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            self._ended()


def same(ours, theirs) -> None:
    """Equal in kind, shape, dtype and every bit, whatever is nested in what."""
    if isinstance(theirs, torch.Tensor):
        plain = ours.full() if isinstance(ours, Rows) else ours
        assert plain.shape == theirs.shape and plain.dtype == theirs.dtype, (plain.shape, theirs.shape)
        assert torch.equal(plain.detach(), theirs.detach())
    elif hasattr(theirs, "batch_size"):
        assert ours.batch_size == theirs.batch_size
        names = set(theirs.keys(True, True))
        assert set(ours.keys(True, True)) == names
        for name in names:
            same(ours.get(name), theirs.get(name))
    elif isinstance(theirs, np.ndarray):
        np.testing.assert_array_equal(ours, theirs)
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            same(ours[name], value)
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            same(one, other)
    else:
        assert ours == theirs
