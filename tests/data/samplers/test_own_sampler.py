"""A sampler of somebody's own is one class: it draws, is saved, goes back and is told of writes as ours are."""

from __future__ import annotations

import numpy as np
import torch
from episodes import episodes
from face import refused

from rlcli.data import LazyTensorStorage, TensorDictReplayBuffer
from rlcli.data.samplers import Draw, Sampler
from rlcli.data.samplers.sampler import live_rows
from rlcli.errors import ArgumentError


class Recent(Sampler):
    """Half of each batch from the rows of the last write, the others from all; every third batch is all of the newest.

    It follows the docstring of `Sampler` and nothing else: `random`, `moves`, a state, writes, columns of its own.
    """

    moves = ("drawn",)

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(seed)
        self.drawn, self.newest = 0, 0

    def bind(self, ring):
        super().bind(ring)
        if ring.steps < 10:
            raise ArgumentError("too few steps for Recent", why=f"{ring.steps}")

    def sample(self, ring, batch_size):
        live = live_rows(ring)
        late = live[-self.newest :]
        self.drawn += 1
        new = batch_size if self.drawn % 3 == 0 else batch_size // 2
        rows = np.concatenate(
            (
                late[self.random.integers(len(late), new)],
                live[self.random.integers(len(live), batch_size - new)],
            )
        )
        return Draw(rows, columns={"is_late": torch.from_numpy(np.isin(rows, late))})

    def extended(self, ring, count):
        self.newest = count

    def state_dict(self):
        return super().state_dict() | {"drawn": self.drawn, "newest": self.newest}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.drawn, self.newest = state["drawn"], state["newest"]


def filled(sampler, **options):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(30), sampler=sampler, batch_size=12, **options)
    rb.extend(episodes([9, 12]))
    rb.extend(episodes([7]))
    return rb


def test_it_draws_what_it_says():
    rb = filled(Recent(seed=0))
    for number in range(1, 7):
        sample = rb.sample()
        rows, late = sample["index"], sample["is_late"]
        assert late.tolist() == [21 <= row < 28 for row in rows.tolist()]
        assert late[: 12 if number % 3 == 0 else 6].all()
    assert rb.sampler.drawn == 6


def test_its_settings_may_refuse_a_ring():
    with refused(ArgumentError, "too few"):
        TensorDictReplayBuffer(storage=LazyTensorStorage(5), sampler=Recent(), batch_size=2)


def test_samples_that_nobody_took_are_drawn_again():
    plain, ahead = filled(Recent(seed=3)), filled(Recent(seed=3), prefetch=2)
    for size in (12, 12, 6, 6, 6, 12):  # a sample of another size: those made ahead are thrown away
        assert ahead.sample(size)["index"].tolist() == plain.sample(size)["index"].tolist()
    ahead.close()


def test_a_restored_one_goes_on_with_the_same_draws(tmp_path):
    rb = filled(Recent(seed=5))
    for _ in range(4):
        rb.sample()
    rb.dumps(tmp_path / "dumps")
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(30), sampler=Recent(), batch_size=12)
    other.loads(tmp_path / "dumps")
    again = TensorDictReplayBuffer(storage=LazyTensorStorage(30), sampler=Recent(), batch_size=12)
    again.load_state_dict(rb.state_dict())
    for _ in range(4):
        wanted = rb.sample()["index"].tolist()
        assert other.sample()["index"].tolist() == again.sample()["index"].tolist() == wanted
