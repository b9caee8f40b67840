"""Steps that are a pure function of (worker, life, time), and processes that write them."""

from __future__ import annotations

import os
import time
from itertools import pairwise

import numpy as np
import torch
from tensordict import TensorDict

from rlcli.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer
from rlcli.data.next_obs import Rows

WIDE = 40
SLICE, SLICES = 4, 6


def observation(worker, life, lane, at):
    """``[N, WIDE]``: who, which life, which lane, when, and the same mixed, so that half a row is seen."""
    at = np.asarray(at, np.int64)
    head = np.stack([np.full_like(at, worker), np.full_like(at, life), np.full_like(at, lane), at], -1)
    mixed = (head * [7919, 104729, 1299709, 15485863]).sum(-1)[..., None]
    return np.concatenate((head, mixed * np.arange(1, WIDE - 3) % 65521), -1).astype(np.float64)


def episode(life, lane, at):
    """Its number, and whether the step at time `at` ends it: lengths go 5, 6, ... 14, 5, ..."""
    at = np.asarray(at) + 3 * lane
    lap, inside = at // 95, at % 95
    ends = np.cumsum(np.arange(5, 15)) - 1
    return 1_000_000 * life + 1000 * lane + 10 * lap + np.searchsorted(ends, inside), np.isin(inside, ends)


def batch(worker, life, start, lanes, length, *, ids=True, lazy=True):
    """``[lanes, length]`` from time `start` on."""
    size, at = [lanes, length], np.arange(start, start + length)
    obs = np.stack([observation(worker, life, lane, at) for lane in range(lanes)])
    number, done = (np.stack(x) for x in zip(*(episode(life, lane, at) for lane in range(lanes)), strict=True))
    following = np.stack([observation(worker, life, lane, at + 1) for lane in range(lanes)])
    following[done] += 0.5  # the true last observation is in no row
    td = TensorDict({"observation": torch.from_numpy(obs)}, size)
    flag = torch.from_numpy(done).unsqueeze(-1)
    td["next"] = TensorDict({"done": flag, "terminated": flag.clone(), "truncated": flag & False}, size)
    if ids:
        td["collector", "traj_ids"] = torch.from_numpy(number)
    last = done.copy()
    last[:, -1] = True
    ends = torch.from_numpy(np.flatnonzero(last).astype(np.int32))
    extra = torch.from_numpy(following.reshape(-1, WIDE))
    td["next", "observation"] = (
        Rows.from_ends(td["observation"], ends, extra[ends.long()]) if lazy else extra.view(*size, WIDE)
    )
    return td


def check_rows(rows, worker=None):
    """Every row is whole, and its next observation is the true one; (life, lane, time) of each."""
    head = rows["observation"][:, :4].numpy()
    if worker is not None:
        assert (head[:, 0] == worker).all()
    for (who, life, lane), place in _groups(head):
        at = head[place, 3]
        now, after = (rows[key].numpy()[place] for key in ("observation", ("next", "observation")))
        number, done = episode(int(life), int(lane), at.astype(int))
        assert np.array_equal(now, observation(who, life, lane, at)), "a torn row"
        following = observation(who, life, lane, at + 1)
        following[done] += 0.5
        assert np.array_equal(after, following), "a wrong next observation"
        assert np.array_equal(rows["next", "terminated"].numpy()[place, 0], done)
        if ("collector", "traj_ids") in rows.keys(True):
            assert np.array_equal(rows["collector", "traj_ids"].numpy()[place], number)
    return head[:, 1:]


def _groups(head):
    for who in np.unique(head[:, :3], axis=0):
        yield tuple(who), (head[:, :3] == who).all(1)


def check_slices(rows):
    """Slices are consecutive steps of one life, one lane and one episode."""
    starts = [*rows["is_init"].squeeze(1).nonzero().squeeze(1).tolist(), len(rows)]
    for start, stop in pairwise(starts):
        part = rows[start:stop]
        head = part["observation"][:, :4].numpy()
        assert (head[:, :3] == head[0, :3]).all() and (np.diff(head[:, 3]) == 1).all()
        assert len(set(episode(int(head[0, 1]), int(head[0, 2]), head[:, 3].astype(int))[0])) == 1
        assert part["next", "done"].squeeze(1).tolist() == [False] * (stop - start - 1) + [True]


def buffer(max_size=300, lanes=1, **options):
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(max_size * lanes, ndim=1 if lanes == 1 else 2),
        sampler=SliceSampler(slice_len=SLICE, strict_length=False),
        batch_size=SLICE * SLICES,
        shared=True,
        **options,
    )


def write_on(writer, worker, life, lanes=1, length=7, seconds=60.0, ids=True, lazy=True):
    """Write until the time is over or the writer's end is closed."""
    start, deadline = 0, time.monotonic() + seconds
    parent = os.getppid()
    while time.monotonic() < deadline and os.getppid() == parent:
        td = batch(worker, life, start, lanes, length, ids=ids, lazy=lazy)
        writer.extend(td[0] if lanes == 1 else td)
        start += length


def forked(work, *args):
    """The pid of a child that runs `work(*args)` and ends at once, whatever happens."""
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            work(*args)
            status = 0
        finally:
            os._exit(status)
    return pid
