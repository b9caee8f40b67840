"""Both ends of a region in one process: what the owner follows is what the plain model of a ring says."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from ring_model import Model, Streams, batch_of, check, compare, next_bits

from rlcli.data import LazyTensorStorage, ReplayBuffer
from rlcli.data.shared import row_log


class Tale:
    """A random history of a region: writes of all forms, a reader that looks now and then, writers that come and go."""

    def __init__(self, seed):
        self.rng = rng = np.random.default_rng(seed)
        self.envs, self.ndim = int(rng.integers(1, 4)), int(rng.integers(1, 3))
        self.lanes = self.envs if self.ndim == 2 else 1
        self.has_ids, self.known = bool(rng.integers(2)), bool(rng.random() < 0.8)
        self.exact = self.known and bool(rng.integers(2))
        self.steps = int(rng.integers(4, 40)) * (1 if self.ndim == 2 else self.envs)
        self.rb = ReplayBuffer(
            storage=LazyTensorStorage(self.steps * self.lanes, ndim=self.ndim),
            next_obs="exact" if self.exact else "full",
            shared=True,
        )
        self.writer = self.rb.writer()
        self.world = Streams(rng, self.envs, ids=rng.choice(["unique", "reused", "one"]), end=rng.choice([0.05, 0.3]))
        self.steps_written, self.is_new = 0, False
        self.model = Model(self.steps, self.lanes, has_ids=self.has_ids, known=self.known)

    def write(self):
        length = int(self.rng.integers(1, max(2, self.steps // self.envs)))
        lanes = [self.world.play(env, length) for env in range(self.envs)]
        lazy = self.known and bool(self.rng.integers(2))
        td, lists = batch_of(lanes, (self.envs, length), next_obs=self.known, ids=self.has_ids, rows=lazy)
        assert self.writer.extend(td) == self.steps_written * self.lanes + td.numel()
        if self.is_new:
            self.cut()
            self.is_new = False
        whole, per_env = (length, length) if self.ndim == 2 else (length * self.envs, length)
        self.model.write(*lists, whole, per_env)
        self.steps_written += whole

    def another_writer(self):
        """The one before is gone, and so is what it had written of its last batch."""
        if self.steps_written and self.writer._region is not None and self.rng.integers(2):
            count, fields = int(self.rng.integers(1, self.steps + 1)) * self.lanes, self.writer._layout.fields
            columns = {key: torch.full_like(field.empty(count), 7) for key, field in fields.items()}
            self.writer._log.write(self.steps_written * self.lanes, columns, fields, torch.Size((count,)), cut=False)
        self.writer.close()
        self.writer, self.is_new = self.rb.writer(), self.steps_written > 0

    def cut(self):
        for lane in self.model.rows:
            for row in lane:
                row.traj.open = row.traj.parked = False
        self.model.parked = [{} for _ in range(self.lanes)]

    def look(self):
        count = len(self.rb)
        if not self.steps_written:
            return
        if self.missed:
            self.read_what_is_there(count)
        else:
            rows, live = compare(self.rb.ring, self.model)
            self.read(rows, live)
        check(self.rb.ring)

    def read(self, rows, live):
        if self.known:
            assert next_bits(self.rb.ring, rows) == [live[n].next for n in rows]

    def read_what_is_there(self, count):
        """A ring that fell behind has the newest rows, and calls them by other numbers."""
        ours = self.numbers(np.sort(self.rows())) + self.missed
        theirs = {row.step * self.lanes + row.lane: row for lane in self.model.rows for row in lane}
        assert set(ours) <= set(theirs) and self.steps_written * self.lanes - 1 in ours
        assert len(ours) == count == len(set(ours)) == len(theirs)
        if self.known:
            assert next_bits(self.rb.ring, np.sort(self.rows())) == [theirs[n].next for n in ours]
        succ = self.rb.ring.index.successors(np.sort(self.rows()))
        for n, after in zip(ours, succ, strict=True):
            if after >= 0:
                row = theirs[n]
                after = int(self.numbers(np.array([after]))[0]) + self.missed
                assert theirs[after] is row.succ

    @property
    def missed(self):
        return self.rb.inbox.taken - self.rb.ring.cursor * self.lanes

    def numbers(self, rows):
        return self.rb.ring.space.numbers_of(rows, self.rb.ring.cursor)

    def rows(self):
        ring = self.rb.ring
        return np.arange(ring.base * ring.lanes, ring.cursor * ring.lanes) % ring.space.size


@pytest.mark.filterwarnings("ignore:.*not followed by their own")
@pytest.mark.parametrize("seed", [*range(12), 71, *(pytest.param(n, marks=pytest.mark.slow) for n in range(100, 300))])
@pytest.mark.every(3)
def test_the_owner_follows_what_a_ring_in_one_process_would_know(seed, monkeypatch):
    monkeypatch.setattr(row_log, "_LEAST", 1)
    monkeypatch.setattr(row_log, "_WRITES", 1 + seed % 3)  # in a file
    tale = Tale(seed)
    for _ in range(60):
        act = tale.rng.random()
        if act < 0.75:
            tale.write()
        elif act < 0.82:
            tale.another_writer()
        if tale.rng.random() < 0.4:
            tale.look()
    tale.write()
    folder = tale.rb.inbox.folder.path
    left = sorted(int(name[5:-4]) for name in os.listdir(folder) if name.startswith("rows"))
    assert len(left) == 1 or left[1] > (tale.steps_written - tale.steps) * tale.lanes  # what nobody can see is not kept
    tale.rb.close()
    assert not folder.exists()
