"""Rows before a slice that only warm up a recurrent state."""

import pytest
import torch
from episodes import episodes, slices_of
from face import refusals

from rlcli.data import (
    LazyTensorStorage,
    PrioritizedSliceSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from rlcli.errors import ArgumentError

LENGTHS = [5, 1, 9, 3, 12]
BURN_IN = ("collector", "burn_in")


def buffer(sampler, batch_size, *, kind=TensorDictReplayBuffer, size=100, batch=None, borders=1):
    rb = kind(storage=LazyTensorStorage(size), sampler=sampler, batch_size=batch_size)
    for part in (episodes(LENGTHS) if batch is None else batch).chunk(borders):
        rb.extend(part)
    return rb


def parts(sample):
    """(episode, position of the first row learned from, rows of burn-in, rows learned from) of each slice."""
    starts = sample["is_init"].squeeze(1).nonzero().squeeze(1)
    lengths = torch.diff(starts, append=torch.tensor([len(sample)])).tolist()
    burn = [part.tolist() for part in sample[BURN_IN].split(lengths)]
    assert all(flags == sorted(flags, reverse=True) for flags in burn)
    whole = slices_of(sample, lengths)
    return [(e, first + sum(f), sum(f), n - sum(f)) for (e, first, n), f in zip(whole, burn, strict=True)]


@pytest.mark.parametrize("kind", [TensorDictReplayBuffer, ReplayBuffer])
@pytest.mark.parametrize("borders", [1, 4])
@pytest.mark.parametrize("burn_in", [1, 2, 20])
def test_slices_begin_with_as_many_rows_as_there_are_before_them(burn_in, borders, kind):
    rb = buffer(SliceSampler(slice_len=3, burn_in=burn_in, seed=0), 3 * 400, kind=kind, borders=borders)
    found = parts(rb.sample())
    assert len(found) == 400 and rb.sampler.ragged
    legal = {(e, start) for e, n in enumerate(LENGTHS) for start in range(n - 2)}
    assert {(e, start) for e, start, *_ in found} == legal  # where slices begin is as it was
    assert all(burn == min(burn_in, start) and n == 3 for _, start, burn, n in found)


def test_the_slices_are_those_without_burn_in():
    plain = buffer(SliceSampler(slice_len=4, seed=3), 40).sample()
    longer = buffer(SliceSampler(slice_len=4, burn_in=5, seed=3), 40).sample()
    assert torch.equal(longer[~longer[BURN_IN]]["index"], plain["index"])
    assert BURN_IN not in plain.keys(True)
    assert not longer["next", "done"].squeeze(1)[longer[BURN_IN]].any()


def test_a_trajectory_whose_head_was_overwritten_has_a_shorter_one():
    rb = buffer(SliceSampler(slice_len=2, burn_in=3, seed=0), 400, size=10, batch=episodes([8, 6]), borders=2)
    rest = {(0, n): min(3, n - 4) for n in range(4, 7)} | {(1, n): min(3, n) for n in range(5)}
    assert {(e, start): burn for e, start, burn, _ in parts(rb.sample())} == rest


@pytest.mark.parametrize("options", [{"strict_length": False}, {"span": True, "strict_length": False}])
def test_short_slices_have_burn_in_too(options):
    rb = buffer(SliceSampler(num_slices=300, slice_len=4, burn_in=2, seed=0, **options), None)
    found = parts(rb.sample())
    assert {n for *_, n in found} >= {1, 3, 4} and all(burn == min(2, start) for _, start, burn, _ in found)


def test_slices_without_replacement_learn_from_every_row_once():
    sampler = SliceSamplerWithoutReplacement(slice_len=4, burn_in=2, strict_length=False, seed=0)
    rb = buffer(sampler, 12)
    learned = torch.cat([sample["index"][~sample[BURN_IN]] for sample in rb])
    assert sorted(learned.tolist()) == list(range(30))


def test_priorities_are_those_of_the_first_row_that_is_learned_from_and_burn_in_gets_none():
    rb = buffer(PrioritizedSliceSampler(100, 1.0, 1.0, eps=0.0, slice_len=3, burn_in=2, seed=0), 3 * 200)
    priority = torch.zeros(30)
    priority[[18, 22]] = torch.tensor([1.0, 2.0])  # rows 0 and 4 of the last episode
    rb.update_priority(torch.arange(30), priority)
    sample = rb.sample()
    found = parts(sample)
    assert set(found) == {(4, 0, 0, 3), (4, 4, 2, 3)}
    weight = {int(i): float(w) for i, w in zip(sample["index"], sample["priority_weight"], strict=True)}
    assert weight[18] == 1.0 and weight[20] == weight[21] == weight[22] == 0.5
    sample["td_error"] = torch.full((len(sample), 1), 7.0)
    rb.update_tensordict_priority(sample)
    after = rb.sampler.state_dict()["priorities"][18:30].tolist()
    assert after == [7.0, 7.0, 7.0, 0.0, 7.0, 7.0, 7.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_burn_in_gets_no_priority_in_an_ensemble_either():
    samplers = [PrioritizedSliceSampler(100, 1.0, 1.0, eps=0.0, slice_len=3, burn_in=2, seed=seed) for seed in range(2)]
    rb = ReplayBufferEnsemble(*(buffer(sampler, 3 * 20) for sampler in samplers), batch_size=3 * 40)
    sample = rb.sample()
    sample["td_error"] = torch.where(sample[BURN_IN], 7.0, 2.0)
    rb.update_tensordict_priority(sample)
    given = torch.cat([sampler.state_dict()["priorities"] for sampler in samplers])
    assert sample[BURN_IN].any() and (given == 2.0).any() and not (given == 7.0).any()


test_padding_excludes_burn_in = refusals(
    (ArgumentError, "pad_output burn_in",
     lambda: SliceSampler(slice_len=3, burn_in=2, pad_output=True, strict_length=False)),
    (ArgumentError, "burn_in", lambda: SliceSampler(slice_len=3, burn_in=-2)),
)  # fmt: skip
