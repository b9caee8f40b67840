"""What samplers choose: probabilities, epochs, slices and their markers, sentences where nothing can be chosen."""

from __future__ import annotations

import warnings
from itertools import chain

import numpy as np
import pytest
import torch
from episodes import episodes, slices_of
from face import refused

from rlcli.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from rlcli.data.samplers import Draw, Sampler, prioritized, without_replacement
from rlcli.data.samplers.sampler import live_rows
from rlcli.errors import ArgumentError, MissingKeyError

LENGTHS = [5, 1, 9, 3, 12]
UNMARKED = episodes([9], ids=False, flags=())


def filled(sampler, batch_size=12, size=100, batch=None, **options):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(size), sampler=sampler, batch_size=batch_size, **options)
    rb.extend(episodes(LENGTHS) if batch is None else batch)
    return rb


def evenly(counts, expected, sigmas=5):
    """Whether counts fit their expectations (chi-square, normal approximation)."""
    counts, expected = np.asarray(counts, float), np.asarray(expected, float)
    statistic, freedom = ((counts - expected) ** 2 / expected).sum(), max(1, len(counts) - 1)
    return statistic < freedom + sigmas * np.sqrt(2 * freedom)


# ---- single rows -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("written", [7, 30, 45])
def test_every_live_row_is_equally_likely(written):
    rb = filled(RandomSampler(seed=0), 1000, size=30, batch=episodes([7]))
    for start in range(7, written, 10):
        rb.extend(episodes([min(10, written - start)], first=start))
    drawn = torch.cat([rb.sample()["index"] for _ in range(30)])
    counts = torch.bincount(drawn, minlength=len(rb))
    assert len(counts) == len(rb) and evenly(counts, np.full(len(rb), 30_000 / len(rb)))


def test_two_samplers_of_one_seed_draw_the_same_and_torch_seeds_those_without():
    def draws(**seed):
        return filled(RandomSampler(**seed)).sample()["index"].tolist()

    assert draws(seed=3) == draws(seed=3) != draws(seed=4)
    torch.manual_seed(1)
    one = draws()
    torch.manual_seed(1)
    assert draws() == one


def test_an_epoch_without_replacement_holds_every_row_once():
    rb = filled(SamplerWithoutReplacement(seed=0), 8)
    epochs = [[batch["index"].tolist() for batch in rb] for _ in range(2)]
    for epoch in epochs:
        assert [len(batch) for batch in epoch] == [8, 8, 8, 6]
        assert sorted(chain(*epoch)) == list(range(30))
    assert epochs[0] != epochs[1]


def test_what_does_not_fill_a_batch_is_left_out_on_request_and_order_is_kept_without_shuffling():
    rb = filled(SamplerWithoutReplacement(drop_last=True, shuffle=False), 8)
    assert [batch["index"].tolist() for batch in rb] == [list(range(i, i + 8)) for i in (0, 8, 16)]
    refused(ArgumentError, "30 31", lambda: rb.sample(31))


def test_rows_overwritten_in_an_epoch_drop_out_of_it_and_new_ones_wait():
    rb = filled(SamplerWithoutReplacement(seed=0), 10, size=40)
    first = rb.sample()["index"].tolist()
    rb.extend(episodes([15]))  # rows 30..39 are new, 0..4 overwritten
    rest = []
    while not rb.sampler.ran_out:
        rest += rb.sample()["index"].tolist()
    assert sorted(rest) == sorted(set(range(5, 30)) - set(first))
    assert sorted(chain(*(batch["index"].tolist() for batch in rb))) == list(range(40))
    rb.sample()
    rb.extend(episodes([40]))  # everything is new: the epoch begins again
    assert rb.sample()["index"].numel() == 10 and not rb.sampler.ran_out


# ---- slices ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("borders", [1, 4])
def test_slices_lie_in_one_episode_and_every_legal_start_is_drawn(ids, borders):
    sampler = SliceSampler(slice_len=3, seed=0)
    batch = episodes(LENGTHS, ids=ids)
    rb = filled(sampler, 3 * 400, batch=batch[:11])
    for part in batch[11:].chunk(borders):
        rb.extend(part)
    drawn = slices_of(rb.sample(), [3] * 400)
    assert {start for start in drawn} == {
        (episode, start, 3) for episode, n in enumerate(LENGTHS) for start in range(n - 2)
    }


@pytest.mark.parametrize("weighting", ["transition", "trajectory"])
def test_slices_are_drawn_with_the_stated_probability(weighting):
    rb = filled(SliceSampler(slice_len=3, weighting=weighting, seed=1), 3 * 20_000)
    drawn = slices_of(rb.sample(), [3] * 20_000)
    cases, expected = [], []
    legal = [(e, n) for e, n in enumerate(LENGTHS) if n >= 3]
    for episode, n in legal:
        share = n / sum(m for _, m in legal) if weighting == "transition" else 1 / len(legal)
        cases += [(episode, start, 3) for start in range(n - 2)]
        expected += [20_000 * share / (n - 2)] * (n - 2)
    assert evenly([drawn.count(case) for case in cases], expected)


def test_span_makes_every_row_equally_likely():
    rb = filled(SliceSampler(num_slices=20_000, slice_len=4, strict_length=False, span=True, seed=2), None)
    counts = torch.bincount(rb.sample()["index"], minlength=30)
    assert evenly(counts, np.full(30, float(counts.sum()) / 30), sigmas=25)  # rows of one slice come together


def test_short_trajectories_are_given_whole_where_length_is_not_strict():
    rb = filled(SliceSampler(num_slices=300, slice_len=4, strict_length=False, seed=0), None)
    sample = rb.sample()
    starts = sample["is_init"].squeeze(1).nonzero().squeeze(1)
    lengths = torch.diff(starts, append=torch.tensor([len(sample)])).tolist()
    found = set(slices_of(sample, lengths))
    assert len(lengths) == 300 and len(sample) < 1200 and rb.sampler.ragged
    assert {(1, 0, 1), (3, 0, 3), (0, 0, 4), (0, 1, 4)} <= found and all(n == min(4, LENGTHS[e]) for e, _, n in found)


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_boundary_keys_are_in_the_samples_of_both_buffers_and_index_in_one(kind):
    rb = kind(storage=LazyTensorStorage(100), sampler=SliceSampler(slice_len=3, seed=0), batch_size=60)
    rb.extend(episodes(LENGTHS))
    sample = rb.sample()
    first = torch.arange(60) % 3 == 0
    assert sample["is_init"].shape == (60, 1) and torch.equal(sample["is_init"].squeeze(1), first)
    terminated = sample["next", "terminated"].squeeze(1)
    last = torch.arange(60) % 3 == 2
    assert terminated.any() and not terminated[~last].any()
    assert torch.equal(sample["next", "truncated"].squeeze(1), last & ~terminated)
    assert torch.equal(sample["next", "done"].squeeze(1), last)
    assert ("index" in sample) == (kind is TensorDictReplayBuffer)
    assert not rb[:]["next", "truncated"].any() and "is_init" not in rb[:]


def test_stored_markers_are_added_to_and_never_taken_away():
    batch = episodes([20], terminated=False)
    batch["is_init"] = torch.zeros(20, 1, dtype=torch.bool)
    batch["is_init"][[0, 7]] = True
    rb = filled(SliceSampler(num_slices=1, slice_len=20), None, batch=batch)
    sample = rb.sample()
    assert sample["is_init"].nonzero()[:, 0].tolist() == [0, 7]
    assert sample["next", "truncated"].nonzero()[:, 0].tolist() == [19]


@pytest.mark.parametrize("flags", [(), ("done",), ("terminated",), ("done", "truncated"), ("terminated", "truncated")])
@pytest.mark.parametrize("terminated", [True, False])
def test_flags_that_are_not_stored_are_made_up_from_those_that_are(flags, terminated):
    rb = filled(SliceSampler(num_slices=1, slice_len=9), None, batch=episodes([9], terminated=terminated, flags=flags))
    sample = rb.sample()
    assert sample["next", "done"].nonzero()[:, 0].tolist() == [8]
    # a bare `done` is taken for a true end, as estimators take it
    ended = (terminated and bool({"terminated", "truncated"} & set(flags))) or flags == ("done",)
    assert sample["next", "truncated"].nonzero()[:, 0].tolist() == ([] if ended else [8])


def test_marks_in_one_compiled_pass_are_those_of_plain_indexing(monkeypatch):
    from rlcli.data.samplers import slice_sampler

    def marked():
        return filled(SliceSampler(num_slices=40, slice_len=4, strict_length=False, seed=5), None).sample()

    fast = marked()
    monkeypatch.setattr(slice_sampler, "_compiled", lambda *_: False)
    assert (fast == marked()).all()


DTYPES = (torch.bool, torch.uint8, torch.int64, torch.float32, torch.bfloat16)


def marked_plainly(sample, lengths, padded):
    """Marks of slices in plain Python, from rows as they are stored; lists of 0 and 1, a row each."""
    rows = {key: sample["next"].get(key, None) for key in ("done", "terminated", "truncated")}
    rows = {key: None if flag is None else [int(any(x)) for x in flag.reshape(len(sample), -1).tolist()]
            for key, flag in rows.items()}  # fmt: skip
    rows["is_init"] = [int(x) for x in sample["is_init"].flatten().tolist()] if "is_init" in sample else None
    done, terminated, truncated = (rows[key] for key in ("done", "terminated", "truncated"))
    known = terminated if terminated is not None else done
    ended = [0] * len(sample) if known is None else list(known)
    if terminated is None and done is not None and truncated is not None:
        ended = [int(d and not t) for d, t in zip(done, truncated, strict=True)]
    out = {key: list(flag or [0] * len(sample)) for key, flag in rows.items() if flag or key != "terminated"}
    at = 0
    for n in lengths:
        out["is_init"][at] = out["done"][at + n - 1] = 1
        out["truncated"][at + n - 1] |= 1 - ended[at + n - 1]
        for flag in out.values():
            flag[at + n : at + max(n, padded)] = [0] * max(0, padded - n)
        at += max(n, padded)
    return out


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("padded", [0, 4])
def test_flags_of_any_dtype_and_shape_are_marked_alike(shape, padded):
    rng = np.random.default_rng(0)
    for trial in range(60):
        held = [key for key in ("done", "terminated", "truncated") if rng.random() < 0.7]
        stored = episodes(LENGTHS, flags=(), ids=True)
        ends = episodes(LENGTHS)["next", "done"]
        kinds = {"terminated": ends & torch.from_numpy(rng.random((30, 1)) < 0.5)}
        kinds |= {"done": ends, "truncated": ends & ~kinds["terminated"]}
        for key in held:
            dtype = DTYPES[rng.integers(len(DTYPES))]
            stored["next", key] = kinds[key].to(dtype).reshape(30, *shape)
        if rng.random() < 0.5:
            init = torch.from_numpy(rng.random(30) < 0.2)
            stored["is_init"] = init.to(DTYPES[rng.integers(len(DTYPES))]).reshape(30, *shape)
        sampler = SliceSampler(num_slices=20, slice_len=4, strict_length=False, pad_output=bool(padded), seed=trial)
        rb = filled(sampler, None, batch=stored)
        sample = rb.sample()
        before = rb[sample["index"]]
        starts = [0, *(np.flatnonzero(np.diff(sample["index"].numpy()) != 1) + 1)]
        lengths = np.diff([*starts, len(sample)]).tolist()
        if padded:
            lengths = sample["collector", "mask"].reshape(-1, padded).sum(1).tolist()
        elif len(lengths) != 20:
            continue  # two slices that happen to follow each other: where they meet cannot be told
        for key, flag in marked_plainly(before, lengths, padded).items():
            ours = sample["is_init"] if key == "is_init" else sample["next", key]
            assert [int(x) for x in ours.flatten().tolist()] == flag, (key, held, trial)
            given = before.get(key if key == "is_init" else ("next", key), None)
            assert ours.dtype is (torch.bool if given is None else given.dtype)
            assert ours.shape == (len(sample), *(shape if held or given is not None else (1,)))
        assert ("next", "terminated") in sample.keys(True) or "terminated" not in held


def test_many_values_a_row_are_marked_one_by_one():
    batch = episodes([6], flags=("done",))
    batch["next", "terminated"] = torch.zeros(6, 2, dtype=torch.bool)
    batch["next", "terminated"][5, 0] = True
    batch["next", "truncated"] = torch.zeros(6, 2, dtype=torch.bool)
    sample = filled(SliceSampler(num_slices=1, slice_len=6), None, batch=batch).sample()
    assert sample["next", "truncated"][5].tolist() == [False, True] and not sample["next", "truncated"][:5].any()
    one = batch.exclude(("next", "truncated"))
    one["next", "truncated"] = torch.zeros(6, 1, dtype=torch.bool)
    sample = filled(SliceSampler(num_slices=1, slice_len=6), None, batch=one).sample()
    assert sample["next", "truncated"].flatten().tolist() == [False] * 5 + [True]


@pytest.mark.parametrize("ids", [True, False])
def test_of_several_end_keys_those_that_are_stored_count_and_ids_where_none_is(ids):
    asked = [("next", "over"), ("next", "terminated"), ("next", "truncated")]
    held = filled(SliceSampler(slice_len=3, end_keys=asked), batch=episodes(LENGTHS, ids=ids, flags=("terminated",)))
    assert held.ring.markers.end_keys == (("next", "terminated"),)
    assert (held.ring.markers.traj_key is not None) == ids and held.ring.index.count == 5
    slices_of(held.sample(), [3] * 4)
    bare = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=SliceSampler(slice_len=3, end_keys=asked[:1]))
    if ids:
        bare.extend(episodes(LENGTHS))
        with pytest.warns(UserWarning, match=r"none of end_keys \(next\.over\) is stored.*collector\.traj_ids"):
            slices_of(bare.sample(12), [3] * 4)
    else:
        refused(MissingKeyError, "next.over", lambda: bare.extend(episodes(LENGTHS, ids=False)))


def test_padding_of_whole_slices_is_said_to_do_nothing():
    with pytest.warns(UserWarning, match="strict_length=False"):
        SliceSampler(slice_len=3, pad_output=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SliceSampler(slice_len=3, pad_output=True, strict_length=False)
        SliceSampler(slice_len=3, pad_output=True, span=True)


def test_flags_stay_as_stored_without_a_truncated_key():
    rb = filled(SliceSampler(slice_len=3, truncated_key=None, seed=0))
    sample = rb.sample()
    assert not sample["next", "truncated"].any() and sample["is_init"].sum() == 4


def test_padding_repeats_the_last_row_and_masks_it():
    rb = filled(SliceSampler(num_slices=50, slice_len=4, strict_length=False, pad_output=True, seed=0), None)
    sample = rb.sample()
    mask = sample["collector", "mask"].reshape(50, 4)
    assert sample.shape == (200,) and mask[:, 0].all() and not mask.all() and not rb.sampler.ragged
    by_slice = sample.reshape(50, 4)
    for slice_, real in zip(by_slice, mask, strict=True):
        n = int(real.sum())
        assert real.tolist() == [True] * n + [False] * (4 - n)
        slices_of(slice_[:n], [n])
        assert (slice_["observation"][n:] == slice_["observation"][n - 1]).all()
        assert slice_["is_init"].squeeze(1).tolist() == [True, False, False, False]
        assert slice_["next", "done"].squeeze(1).tolist() == [False] * (n - 1) + [True] + [False] * (4 - n)
    ends = [sample["next", key].sum() for key in ("done", "terminated", "truncated")]
    assert ends[0] == 50 == ends[1] + ends[2]  # one end a slice can be counted


def test_one_draw_of_slices_without_replacement_shows_no_row_twice():
    rb = filled(SliceSamplerWithoutReplacement(slice_len=3, seed=0), 6)
    seen = []
    for batch in rb:
        slices_of(batch, [3] * (len(batch) // 3))
        seen += batch["index"].tolist()
    assert len(seen) == len(set(seen)) == 3 * sum(n // 3 for n in LENGTHS)
    ragged = filled(SliceSamplerWithoutReplacement(slice_len=3, strict_length=False, seed=0), 6)
    assert sorted(chain(*(batch["index"].tolist() for batch in ragged))) == list(range(30))
    whole = filled(SliceSamplerWithoutReplacement(slice_len=3, drop_last=True, shuffle=False), 12)
    assert [len(batch) for batch in whole] == [12, 12]


@pytest.mark.parametrize("ids", [True, False])
def test_slices_that_are_not_shuffled_come_in_the_order_of_writing(ids):
    rb = filled(SliceSamplerWithoutReplacement(slice_len=5, shuffle=False), 10, size=40, batch=episodes([5]))
    for first in range(1, 13):
        rb.extend(episodes([5], first=first))
    found = torch.cat(list(rb))["observation"][:, 0]
    assert found.tolist() == [float(n) for n in range(5, 13) for _ in range(5)]


def test_a_write_ends_no_epoch_of_slices_and_takes_its_own_rows_out_of_it(monkeypatch):
    """What is stored is looked through once an epoch, not once a write."""
    looks = []
    monkeypatch.setattr(without_replacement, "live_rows", lambda ring: looks.append(1) or live_rows(ring))
    rb = filled(SliceSamplerWithoutReplacement(slice_len=5, shuffle=False), 5, size=40, batch=episodes([5] * 7))
    drawn = [rb.sample()["index"][0].item()]
    for _ in range(3):  # of 35 rows; the second one on take the oldest away
        rb.extend(episodes([5]))
        drawn.append(rb.sample()["index"][0].item())
    assert drawn == [0, 5, 10, 15] and len(looks) == 1
    rb.extend(episodes([5] * 4))  # up to row 30
    assert rb.sample()["index"][0] == 30 and len(looks) == 1
    assert len(rb.sample()) == 5 and len(looks) == 2  # what was left is gone
    rb[0] = rb[1]
    assert len(rb.sample()) == 5 and len(looks) == 3


def test_every_row_has_its_turn_over_the_epochs_of_slices():
    rb = filled(SliceSamplerWithoutReplacement(slice_len=4, seed=0), 8)
    seen = {row for _ in range(40) for batch in rb for row in batch["index"].tolist()}
    assert seen == set(range(30)) - {5, 15, 16, 17}  # but for episodes that are shorter than a slice


def test_the_last_step_of_a_slice_is_followed_across_writes_of_other_episodes():
    """Two streams interleaved in one flat ring: slices of each go on over the other's rows."""
    a, b = episodes([20]), episodes([20], first=1)
    rb = filled(SliceSampler(num_slices=200, slice_len=10, seed=0), None, batch=a[:7])
    for part in (b[:9], a[7:15], b[9:], a[15:]):
        rb.extend(part)
    drawn = slices_of(rb.sample(), [10] * 200)
    assert {start for _, start, _ in drawn} == set(range(11))


# ---- priorities --------------------------------------------------------------------------------------------------
def test_rows_are_drawn_by_priority_and_weighed_back():
    rb = filled(PrioritizedSampler(100, alpha=0.7, beta=0.5, seed=0), 50_000)
    priority = torch.rand(30, dtype=torch.float64) * 10 ** torch.randint(-2, 2, (30,))
    rb.update_priority(torch.arange(30), priority)
    sample = rb.sample()
    p = (priority + 1e-8) ** 0.7
    assert evenly(torch.bincount(sample["index"], minlength=30), 50_000 * p / p.sum())
    weight = (30 * p / p.sum()) ** -0.5
    torch.testing.assert_close(sample["priority_weight"], (weight / weight.max())[sample["index"]].float())
    rb.sampler.beta = 0.0
    assert (rb.sample()["priority_weight"] == 1).all()


def test_new_rows_have_the_largest_priority_given_and_overwritten_ones_lose_theirs():
    rb = filled(PrioritizedSampler(40, alpha=1.0, beta=1.0, eps=0, seed=0), 100, size=40)
    rb.update_priority(torch.arange(30), torch.full((30,), 2.0**-30))
    rb.update_priority([3], 5.0)
    rb.extend(episodes([12]))
    priorities = rb.sampler.state_dict()["priorities"]
    assert (priorities[torch.tensor([3, *range(30, 40), 0, 1])] == 5).all() and (priorities[4:30] == 2.0**-30).all()
    rb.extend(episodes([40]))
    assert (rb.sampler.state_dict()["priorities"] == 5).all()
    rb.update_priority(torch.arange(40), 0.5)
    rb[7] = rb[8]
    assert rb.sampler.state_dict()["priorities"][7] == 5


def test_the_largest_priority_within_the_buffer_forgets_what_is_gone():
    sampler = PrioritizedSampler(30, 1.0, 1.0, 0, max_priority_within_buffer=True)
    rb = filled(sampler, size=30)
    rb.update_priority(torch.arange(30), 1.0)
    rb.update_priority([2], 9.0)
    assert sampler.default_priority == 9
    rb.update_priority([2], 0.5)
    assert sampler.default_priority == 1


def test_no_rows_have_no_priorities():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(9), sampler=PrioritizedSampler(9, 1.0, 1.0))
    batch = episodes([5]).set("td_error", torch.ones(5, 1))
    assert [len(rb.extend(part)) for part in (batch[:0], batch, batch[:0])] == [0, 5, 0] and len(rb) == 5
    rb.update_priority(torch.empty(0, dtype=torch.int64), torch.empty(0, 1))


def test_priorities_of_rows_that_are_gone_are_left_out():
    rb = filled(PrioritizedSampler(100, 1.0, 1.0, seed=0), 500)
    rb.update_priority([29, 30, 99, -1, 10**6], [1.0, 1e9, 1e9, 1e9, 1e9])
    assert rb.sample()["index"].max() < 30
    rb.empty()
    rb.update_priority([3], 7.0)
    rb.extend(episodes([2]))
    assert set(rb.sample()["index"].tolist()) == {0, 1}


def test_td_errors_come_back_under_their_key_reduced_to_one_a_row():
    rb = filled(PrioritizedSampler(100, 1.0, 1.0, 0, seed=0), 4)
    sample = rb.sample()
    sample["index"] = torch.tensor([1, 2, 3, 3])
    sample["td_error"] = torch.tensor([[1.0, 4.0], [2.0, 0.0], [5.0, 5.0], [3.0, 1.0]])
    rb.update_tensordict_priority(sample)
    assert rb.sampler.state_dict()["priorities"][1:4].tolist() == [4, 2, 3]  # of a row given twice the last
    batch = episodes([3])
    batch["td_error"] = torch.tensor([0.1, 0.2, 0.3])
    other = filled(PrioritizedSampler(9, 1.0, 1.0, 0), 4, size=9, batch=batch)
    assert other.sampler.state_dict()["priorities"][:3].tolist() == pytest.approx([0.1, 0.2, 0.3])
    refused(MissingKeyError, "td_error", lambda: rb.update_tensordict_priority(rb.sample()))


def test_priorities_of_envs_side_by_side_are_of_the_rows_that_extend_gave():
    sampler = PrioritizedSampler(20, 1.0, 1.0, eps=0.0)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20, ndim=2), sampler=sampler)
    priority = torch.arange(1.0, 9.0).reshape(2, 4)
    rb.update_priority(rb.extend(episodes([8]).reshape(2, 4)), priority)
    assert sampler._tree.priorities[:8].tolist() == priority.T.flatten().tolist()
    rb.update_priority(torch.arange(8), priority[..., None])
    assert sampler._tree.priorities[:8].tolist() == priority.flatten().tolist()
    refused(ArgumentError, "priority", lambda: rb.update_priority(torch.arange(8), priority[:, :3]))


@pytest.mark.parametrize("slice_len", [3, 9])
def test_slices_are_drawn_by_the_priority_of_their_first_row(slice_len):
    count = 20_000
    rb = filled(PrioritizedSliceSampler(100, 0.8, 1.0, slice_len=slice_len, seed=0), slice_len * count)
    priority = torch.rand(30) ** 2
    rb.update_priority(torch.arange(30), priority)
    sample = rb.sample()
    slices_of(sample, [slice_len] * count)
    first = np.cumsum([0, *LENGTHS[:-1]])
    legal = [f + i for f, n in zip(first, LENGTHS, strict=True) for i in range(n - slice_len + 1)]
    p = (priority[legal].double() + 1e-8) ** 0.8
    starts = sample["index"].reshape(count, slice_len)[:, 0]
    counts = torch.bincount(starts, minlength=30)
    assert counts.sum() == counts[legal].sum() and evenly(counts[legal], count * p / p.sum())
    weights = sample["priority_weight"].reshape(count, slice_len)
    assert (weights == weights[:, :1]).all() and weights.max() <= 1


@pytest.mark.parametrize("few", [False, True], ids=["by tries", "by one pass"])
def test_without_strict_length_slices_by_priority_are_whole_or_whole_trajectories(few, monkeypatch):
    if few:
        monkeypatch.setattr(prioritized, "TRIES", 0)
    sampler = PrioritizedSliceSampler(100, 1.0, 0.5, slice_len=10, strict_length=False, seed=0)
    rb = filled(sampler, 3000, batch=episodes([5, 30, 2]))
    sample = rb.sample()
    index, starts = sample["index"], sample["is_init"][:, 0]
    sizes = torch.diff(torch.cat([starts.nonzero()[:, 0], torch.tensor([len(index)])]))
    assert {(int(row), int(size)) for row, size in zip(index[starts], sizes, strict=True)} == {
        (0, 5), (35, 2), *((row, 10) for row in range(5, 26))
    }  # fmt: skip


def of_late_priorities(**slices):
    """Only the last three rows of an episode of ten have a priority."""
    rb = filled(PrioritizedSliceSampler(100, 1.0, 0.5, eps=0.0, seed=0, **slices), None, batch=episodes([10]))
    rb.update_priority(torch.arange(10), torch.tensor([0.0] * 7 + [1.0] * 3))
    return rb


def test_rows_of_priority_0_begin_no_slice():
    rb = of_late_priorities(slice_len=3)
    sample = rb.sample(300)
    assert set(sample["index"][::3].tolist()) == {7} and (sample["priority_weight"] == 1).all()


class Own(Sampler):
    """A sampler of somebody's own."""

    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def sample(self, ring, batch_size):
        return Draw(self.rows)


@pytest.mark.parametrize("set_later", [True, False])
def test_rows_that_a_sampler_of_ones_own_chooses_are_looked_at(set_later):
    def drawn(rows):
        rb = filled(RandomSampler() if set_later else Own(rows))
        if set_later:
            rb.set_sampler(Own(rows))
        return rb.sample()["index"].tolist()

    for fine in ([3, 3, 29], np.array([3, 3, 29], np.int32), np.array([3, 9, 3, 9, 29])[::2]):
        assert drawn(fine) == [3, 3, 29]
    for rows, text in (([3, 30], "1 of 2, the first is 30 of 30"), ([10**7], "10000000"), ([-1], "-1")):
        with pytest.raises(ArgumentError, match=text):
            drawn(rows)
    for rows in ([0.5], [[1, 2]]):
        with refused(ArgumentError, "int64 [M]"):
            drawn(rows)


class Cut(SliceSampler):
    """Says something else of its slices than it draws."""

    def __init__(self, change):
        self.change = change
        super().__init__(slice_len=4, seed=0)

    def sample(self, ring, batch_size):
        draw = super().sample(ring, batch_size)
        for name, value in self.change(draw).items():
            setattr(draw, name, value)
        return draw


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda draw: {"rows": draw.rows[:5]}, "rows"),
        (lambda draw: {"lengths": draw.lengths[:2]}, "12 rows"),
        (lambda draw: {"lengths": draw.lengths * 2 - 4 * np.array([0, 1, 2])}, "12 rows"),
        (lambda draw: {"lengths": draw.lengths.astype(float)}, "int64"),
        (lambda draw: {"lengths": None}, "lengths"),
        (lambda draw: {"lengths": None, "padded": 4}, "padded"),
        (lambda draw: {"padded": 3}, "padded"),
        (lambda draw: {"columns": {"w": torch.ones(7)}}, "[7] 12"),
        (lambda draw: {"columns": {"w": [1.0] * 12}}, "list"),
    ],
)
def test_all_that_a_sampler_of_ones_own_says_of_slices_is_looked_at(change, text):
    refused(ArgumentError, text, lambda: filled(Cut(change)).sample())


def test_lengths_may_be_a_tensor_and_a_sampler_may_leave_its_random_stream_to_its_base():
    same = [filled(Cut(change)).sample() for change in (lambda _: {}, lambda d: {"lengths": torch.tensor(d.lengths)})]
    assert (same[0] == same[1]).all()

    class Plain(Sampler):
        def __init__(self):
            pass

        def sample(self, ring, batch_size):
            return Draw(live_rows(ring)[self.random.integers(len(ring), batch_size)])

    assert len(filled(Plain()).sample()) == 12


def test_a_draw_is_looked_at_whose_method_was_put_on_the_object():
    sampler = RandomSampler()
    sampler.sample = lambda ring, size: Draw(np.full(size, 10**6))
    refused(ArgumentError, "1000000", lambda: filled(sampler).sample())


@pytest.mark.parametrize(
    "make",
    [
        SamplerWithoutReplacement,
        lambda: SliceSamplerWithoutReplacement(slice_len=2),
        lambda: PrioritizedSampler(100, 1.0, 1.0),
        lambda: PrioritizedSliceSampler(100, 1.0, 1.0, slice_len=2),
    ],
)
@pytest.mark.parametrize("gone", [True, False])
def test_a_sampler_that_comes_back_or_moves_on_draws_what_is_stored_now(make, gone):
    sampler = make()
    rb = filled(sampler)
    rb.sample(4)
    if gone:
        del rb
        rb = filled(sampler, batch=episodes([6]))
    else:
        rb.set_sampler(RandomSampler())
        rb.empty()
        rb.extend(episodes([6]))
        rb.set_sampler(sampler)
    assert set(torch.cat([rb.sample(4)["index"] for _ in range(40)]).tolist()) == set(range(6))


@pytest.mark.parametrize(
    ("make", "change", "text"),
    [
        (lambda: PrioritizedSampler(30, 1.0, 1.0), {"priorities": torch.full((30,), float("nan"))}, "priorities"),
        (lambda: PrioritizedSampler(30, 1.0, 1.0), {"priorities": torch.full((30,), -1.0)}, "priorities"),
        (lambda: PrioritizedSampler(30, 1.0, 1.0), {"largest": float("inf")}, "priorities"),
        (
            lambda: SliceSamplerWithoutReplacement(slice_len=2),
            {"starts": torch.tensor([9]), "sizes": torch.tensor([2])},
            "slice among",
        ),
    ],
)
def test_a_state_whose_numbers_lead_nowhere_is_refused(make, change, text):
    sampler = make()
    refused((ArgumentError, ValueError), text, lambda: sampler.load_state_dict(sampler.state_dict() | change))


def test_rows_that_are_not_stored_are_not_drawn_after_a_state_was_loaded():
    for make, name, value in (
        (lambda: PrioritizedSampler(30, 1.0, 1.0, seed=0), "priorities", torch.ones(30)),
        (lambda: SamplerWithoutReplacement(shuffle=False), "left", torch.arange(20)),
    ):
        rb = filled(make(), size=30, batch=episodes([6]))
        state = rb.state_dict()
        state["rest"]["sampler"][name] = value
        rb.load_state_dict(state)
        assert set(torch.cat([rb.sample(3)["index"] for _ in range(40)]).tolist()) == set(range(6))


def test_the_state_of_slices_of_what_was_stored_before_can_be_loaded():
    def made():
        return filled(SliceSamplerWithoutReplacement(slice_len=3, seed=0), size=60, batch=episodes([9] * 5))

    rb, other = made(), made()
    rb.sample(6)
    rb.empty()
    rb.extend(episodes([6]))  # fewer rows than the slices of the epoch lay in
    other.load_state_dict(rb.state_dict())
    assert set(other.sample(6)["index"].tolist()) == set(range(6))


# ---- one read ----------------------------------------------------------------------------------------------------
class Counting(LazyTensorStorage):
    """Counts what is gathered, by key."""

    def gather(self, rows, keys=None):
        self.counts = getattr(self, "counts", {})
        for key in self.fields if keys is None else (keys := list(keys)):
            self.counts[key] = self.counts.get(key, 0) + 1
        return super().gather(rows, keys)


@pytest.mark.parametrize(
    "make",
    [
        RandomSampler,
        SamplerWithoutReplacement,
        lambda: SliceSampler(slice_len=3),
        lambda: SliceSampler(slice_len=3, strict_length=False, pad_output=True),
        lambda: SliceSamplerWithoutReplacement(slice_len=3),
        lambda: PrioritizedSampler(100, 1.0, 1.0),
        lambda: PrioritizedSliceSampler(100, 1.0, 1.0, slice_len=3),
    ],
)
@pytest.mark.parametrize("ids", [True, False])
def test_every_key_is_gathered_once_a_sample_and_writing_reads_nothing(make, ids):
    rb = TensorDictReplayBuffer(storage=Counting(100), sampler=make(), batch_size=12)
    for _ in range(3):
        rb.extend(episodes([12, 8], ids=ids))
    assert not getattr(rb.storage, "counts", {})
    rb.sample()
    assert set(rb.storage.counts.values()) == {1} and set(rb.storage.counts) == set(rb.storage.fields)


# ---- checkpoints -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "make",
    [
        RandomSampler,
        lambda: SamplerWithoutReplacement(),
        lambda: SliceSampler(slice_len=3, strict_length=False),
        lambda: SliceSamplerWithoutReplacement(slice_len=3),
        lambda: PrioritizedSampler(100, 0.6, 0.4),
        lambda: PrioritizedSliceSampler(100, 0.6, 0.4, slice_len=3),
    ],
)
def test_a_restored_sampler_goes_on_with_the_same_draws(make):
    rb, other = filled(make(), 6), filled(make(), 6, batch=episodes([2, 3]))
    rb.update_priority(torch.arange(30), torch.rand(30))
    rb.sample()
    other.load_state_dict(rb.state_dict())
    for _ in range(8):
        a, b = rb.sample(), other.sample()
        assert (a == b).all()
        for buffer in (rb, other):
            buffer.update_priority(a["index"], a["index"] / 30)
    for buffer in (rb, other):
        buffer.extend(episodes([7, 7]))
    assert (rb.sample() == other.sample()).all()


def test_a_restored_epoch_leaves_out_what_was_overwritten_before_it_was_saved():
    def going():
        rb = filled(SamplerWithoutReplacement(shuffle=False), 2, size=10, batch=episodes([10]))
        rb.sample()
        rb.extend(episodes([5], first=1))  # rows 0 to 4, of which three had not come yet
        return rb

    rb, other = going(), going()
    other.sample()
    other.load_state_dict(rb.state_dict())
    drawn = [other.sample()["index"].tolist() for _ in range(3)]
    assert drawn == [rb.sample()["index"].tolist() for _ in range(3)] == [[5, 6], [7, 8], [9]]


# ---- one buffer --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("sampler", "wrong"),
    [
        (lambda: PrioritizedSampler(100, 0.6, 0.4), {"size": 200}),
        (lambda: SliceSampler(slice_len=20), {"size": 10}),
        (lambda: PrioritizedSliceSampler(100, 0.6, 0.4, slice_len=20), {"size": 10}),
        (RandomSampler, {"prefetch": -1}),
        (RandomSampler, {"priority_key": 3.5}),
        (RandomSampler, {"transform": 5}),
    ],
)
def test_a_sampler_that_one_buffer_refused_serves_another(sampler, wrong):
    sampler = sampler()
    with pytest.raises((ArgumentError, TypeError)) as _refused:  # it holds what is left of that buffer
        filled(sampler, **wrong)
    rb = filled(sampler, 20, batch=episodes([30]))
    assert rb.sampler is sampler and len(rb.sample()) == 20
    refused(ArgumentError, "belongs", lambda: filled(sampler))


def test_a_sampler_that_could_not_replace_another_serves_another_buffer():
    rb, sampler = filled(RandomSampler(), size=200), PrioritizedSampler(100, 0.6, 0.4)
    refused(ArgumentError, "max_capacity=200", lambda: rb.set_sampler(sampler))
    assert len(filled(sampler).sample()) == 12 and len(rb.sample()) == 12


# ---- sentences ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: [filled(sampler) for sampler in [RandomSampler()] * 2], "belongs to one buffer"),
        (
            lambda: filled(SliceSampler(slice_len=3), batch=episodes([9], ids=False, flags=())).sample(),
            "next.done are not",
        ),
        (
            lambda: filled(SliceSampler(slice_len=3, end_keys="over"), batch=episodes([9], ids=False)),
            "over is not in the batch",
        ),
        (lambda: SliceSampler(), "num_slices, slice_len, or both"),
        (lambda: SliceSampler(slice_len=0), "at least 1"),
        (lambda: filled(SliceSampler(slice_len=3, span=(1, 2, 3))).sample(), "each side (span): got (1, 2, 3)"),
        (lambda: filled(SliceSampler(slice_len=3, span=(1,))).sample(), "each side (span): got (1,)"),
        (lambda: filled(SliceSampler(slice_len=3, span="left")).sample(), "each side (span): got 'left'"),
        (lambda: SliceSampler(slice_len=3, weighting="length"), "weight"),
        (lambda: SliceSampler(slice_len=3, traj_key="a", trajectory_key="b"), "one setting"),
        (lambda: SliceSamplerWithoutReplacement(slice_len=3, span=True), "no span"),
        (lambda: PrioritizedSampler(10, -1.0, 0.4), "alpha"),
        (lambda: PrioritizedSampler(10, 0.5, float("nan")), "beta"),
        (lambda: PrioritizedSampler(10, 0.5, 0.5, reduction="sum"), "reduction"),
        (lambda: filled(PrioritizedSampler(99, 0.5, 0.5)), "max_capacity=100"),
        (lambda: filled(SliceSampler(slice_len=101)), "longer than what the storage holds"),
        (lambda: filled(SliceSampler(slice_len=5)).sample(), "batch_size=12 with slice_len=5"),
        (lambda: filled(SliceSampler(num_slices=5)).sample(), "batch_size=12 with num_slices=5"),
        (lambda: filled(SliceSampler(num_slices=3, slice_len=5)).sample(), "Use batch_size=15"),
        (lambda: filled(SliceSampler(slice_len=13), 26).sample(), "the longest of 5 has 12"),
        (lambda: filled(PrioritizedSliceSampler(100, 1, 1, slice_len=13), 26).sample(), "the longest of 5 has 12"),
        (lambda: filled(SliceSamplerWithoutReplacement(slice_len=13), 26).sample(), "has 12 rows"),
        (lambda: filled(SliceSampler(slice_len=3, traj_key="episode")), "episode is not in the batch"),
        (lambda: filled(SliceSampler(slice_len=3, end_key=("next", "over"))), "next.over is not in the batch"),
        (lambda: of_late_priorities(slice_len=4).sample(4), "priority 0. Use eps above 0"),
        (lambda: RandomSampler(seed=-1), "seed must be at least 0: got -1"),
        (lambda: filled(RandomSampler()).set_seed(-1), "got -1"),
        (lambda: filled(RandomSampler()).set_seed(0.5), "got 0.5"),
        (lambda: filled(PrioritizedSampler(100, 1, 1)).update_priority([1], -1.0), "from 0 on"),
        (lambda: filled(PrioritizedSampler(100, 1, 1)).update_priority([1, 2], torch.tensor([1.0, np.nan])), "nan"),
        (lambda: filled(PrioritizedSampler(100, 1, 1)).update_priority([1, 2], torch.ones(3)), "2 rows"),
        (lambda: filled(PrioritizedSampler(100, 2, 1)).update_priority([1], torch.tensor(1e200).double()), "alpha too"),
    ],
)
def test_what_cannot_be_drawn_is_said_in_a_sentence(make, text):
    with pytest.raises((ArgumentError, MissingKeyError)) as caught:
        make()
    assert text in str(caught.value)
