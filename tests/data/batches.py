"""Batches with ends in every place that matters, each beside its `full` twin, and a way to try what may crash."""

from __future__ import annotations

import os
import pickle
import traceback

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


def in_child(work, *args):
    """What `work(*args)` returns, run in a forked process, so that a segfault fails one test and not the suite."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            answer = pickle.dumps((True, work(*args)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(answer)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    status = os.waitpid(pid, 0)[1]
    assert not os.WIFSIGNALED(status), f"the process died of signal {os.WTERMSIG(status)}"
    fine, value = pickle.loads(answer)
    assert fine, value
    return value


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
