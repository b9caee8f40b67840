"""A ring on disk whose every row follows from its step, and how to tell that none is lost or torn."""

from __future__ import annotations

import functools
import warnings

import numpy as np
import torch
from disks import LosingDisk
from face import Disk, Ring
from tensordict import TensorDict

from rlcli.data.files import dumps
from rlcli.data.storages import LazyMemmapStorage, LazyTensorStorage
from rlcli.data.stored.place import check_files

STEPS = 20


def batch(number: int, length: int = 4) -> TensorDict:
    """Batch `number` of 2 envs: an exact one would keep few of its next observations."""
    first = number * length
    step = torch.arange(first, first + length + 1).repeat(2, 1) * 10 + torch.arange(2)[:, None]
    obs = (step[..., None] * torch.arange(1, 6)).to(torch.int32)
    done = (step[:, :-1, None] // 10) % 7 == 6
    nexts = obs[:, 1:].clone()
    nexts[done[..., 0]] = -1  # what came last in an episode is no first observation
    return TensorDict(
        {"obs": obs[:, :-1].clone(), "next": {"obs": nexts, "done": done, "reward": step[:, :-1, None].double()}},
        [2, length],
    )


@functools.cache
def reference(batches: int, mode: str) -> dict:
    """All live rows after so many batches, oldest first."""
    ring = Ring(LazyTensorStorage(STEPS * 2, ndim=2), next_obs=mode)
    for i in range(batches):
        ring.extend(batch(i))
    return live(ring)


def live(ring: Ring) -> dict:
    if not ring.fields:
        return {}
    return ring.columns(np.arange(ring.base * 2, ring.cursor * 2) % (STEPS * 2))


def begin(folder, disk=None, mode="exact", **options) -> Ring:
    """A new ring, or one that goes on with what the folder holds."""
    options = {"commit_seconds": 0.0, **options}
    storage = LazyMemmapStorage(STEPS * 2, ndim=2, scratch_dir=folder, resume=True, disk=disk or Disk(), **options)
    ring = Ring(storage, next_obs=mode)
    dumps.resume(ring)
    return ring


def wrong(folder) -> list[str]:
    """A sentence for everything in a storage's folder that is not as it was committed."""
    names = [path.name for path in folder.iterdir()]
    return [f"{file.path}: {file.why}" for file in check_files(folder, names) if file.state != "ok"]


def batches_in(ring: Ring) -> int:
    assert ring.cursor % 4 == 0, "half a batch was acknowledged"
    return ring.cursor // 4


def equal(a: dict, b: dict) -> bool:
    return list(a) == list(b) and all(torch.equal(a[key], b[key]) for key in a)


def quiet(work):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return work()


class LosingPages(LosingDisk):
    """`LosingDisk` for files that are mapped: of what was not synced each page may be old or new."""

    page = 64

    def at(self, call: str, path) -> None:
        super().at(call, path)
        if call == "remove":  # its inode may be given to another file
            for gone in (path, *path.glob("**/*")):
                if gone.is_dir() or gone.stat().st_nlink == 1:
                    self.bytes.pop(gone.stat().st_ino, None)
                    self.names.pop(gone.stat().st_ino, None)

    def after_the_cut(self, folder, out, rng) -> None:
        super_names = self.names.get(folder.stat().st_ino, {})
        out.mkdir()
        for path in folder.iterdir():
            inode = path.stat().st_ino
            if super_names.get(path.name) != inode and rng.random() < 0.5:
                if super_names.get(path.name) in self.replaced:  # it is still the other file's
                    (out / path.name).write_bytes(self.replaced[super_names[path.name]])
                continue
            if path.is_dir():
                self.after_the_cut(path, out / path.name, rng)
                continue
            now, safe = path.read_bytes(), self.bytes.get(inode, b"")
            if path.suffix == ".bin":
                safe = safe.ljust(len(now), b"\0")
                pages = range(0, len(now), self.page)
                now = b"".join((now if rng.random() < 0.5 else safe)[i : i + self.page] for i in pages)
            elif now != safe:
                tail = now[len(safe) : int(rng.integers(len(safe), len(now) + 1))]
                now = safe + (tail if rng.random() < 0.7 else bytes(len(tail)))
            (out / path.name).write_bytes(now)
