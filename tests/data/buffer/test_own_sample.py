"""A buffer whose class samples in a way of its own is asked that way by whatever samples."""

from __future__ import annotations

import pytest
import torch
from episodes import episodes

from rlcli.data import (
    LazyTensorStorage,
    RandomSampler,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)


class Doubled(TensorDictReplayBuffer):
    """Draws twice as many rows as asked for, and keeps every second one."""

    asked = 0

    def sample(self, batch_size=None, return_info=False):
        self.asked += 1
        sampled = super().sample(2 * (batch_size or self.batch_size), return_info)
        if not return_info:
            return sampled[::2].set("mine", torch.ones(len(sampled) // 2))
        return sampled[0][::2].set("mine", torch.ones(len(sampled[0]) // 2)), sampled[1]


def doubled(sampler=None, **options):
    sampler = sampler or RandomSampler(seed=0)
    return Doubled(storage=LazyTensorStorage(100), sampler=sampler, batch_size=5, **options)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_iteration_and_next_ask_it(prefetch):
    rb = doubled(SamplerWithoutReplacement(seed=0), prefetch=prefetch)
    rb.extend(episodes([20]))
    batches = list(rb)
    assert [len(batch) for batch in batches] == [5, 5] and all("mine" in batch for batch in batches)
    assert len({int(i) for batch in batches for i in batch["index"]}) == 10
    assert "mine" in rb.next() and rb.asked == 3
    rb.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_ensemble_asks_it(prefetch):
    rb = ReplayBufferEnsemble(doubled(), doubled(), batch_size=10, sample_from_all=True, prefetch=prefetch, seed=0)
    for worker in range(2):
        rb.extend(episodes([20], first=worker), buffer=worker)
    samples = [rb.sample() for _ in range(3)]
    assert all(sample.shape == (2, 5) and "mine" in sample for sample in samples)
    rb.close()


def test_what_it_drew_before_it_failed_is_drawn_again():
    class Refuses(Doubled):
        refused = False

        def sample(self, batch_size=None, return_info=False):
            sampled = super().sample(batch_size, return_info)
            if self.refused:
                raise RuntimeError("not this one")
            return sampled

    drawn = []
    for refused in (False, True):
        rb = Refuses(storage=LazyTensorStorage(100), sampler=SamplerWithoutReplacement(seed=0), batch_size=5)
        rb.extend(episodes([20]))
        rb.refused = refused
        if refused:
            with pytest.raises(RuntimeError, match="not this one"):
                rb.next()
            rb.refused = False
        drawn.append([rb.sample()["index"].tolist() for _ in range(2)])
    assert drawn[0] == drawn[1]
