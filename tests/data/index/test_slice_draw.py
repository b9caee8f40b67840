"""Slices: stated probabilities, every row reachable, never across an end."""

import numpy as np
import pytest
import torch
from face import Ring, refused
from ring_model import Streams, batch_of

from rlcli.data.index import RandomStream
from rlcli.data.storages import LazyTensorStorage
from rlcli.errors import ArgumentError

DRAWS = 30_000


def a_ring(seed, *, lanes=1, interleaved=False, wrapped=True):
    """Trajectories of 1 to about 20 rows, some in several runs, head overwritten."""
    rng = np.random.default_rng(seed)
    streams = Streams(rng, 3, values="bytes", end=0.12)
    ring = Ring(LazyTensorStorage(60 if wrapped else 400, ndim=1 if lanes == 1 else 2), next_obs="exact")
    for _ in range(12):
        steps = 1 if interleaved else 7
        for _ in range(7 if interleaved else 1):
            ring.extend(batch_of([streams.play(env, steps) for env in range(3)], [3, steps])[0])
    return ring


def pvalue(counted, wanted):
    """Of the chi-square test: the chance of counts that lie at least this far off."""
    counted, wanted = np.asarray(counted, float), np.asarray(wanted, float)
    distance = ((counted - wanted) ** 2 / wanted).sum()
    half = torch.tensor([(len(wanted) - 1) / 2, distance / 2], dtype=torch.float64)
    return 1.0 if len(wanted) == 1 else float(torch.special.gammaincc(half[0], half[1]))


def trajectories(ring):
    """Number -> rows in order, by following successors from every row that follows none."""
    n = len(ring)
    rows = np.arange(n)
    following = ring.index.successors(rows)
    heads = np.setdiff1d(rows, following)
    out = {}
    for head in heads.tolist():
        line = [head]
        while following[line[-1]] >= 0:
            line.append(int(following[line[-1]]))
        out[int(ring.index.numbers(np.array([head]))[0])] = line
    assert sum(map(len, out.values())) == n
    return out


def starts(line, slice_len, left, right):
    """Every legal start of a trajectory's slices, clipped: the rows they give."""
    low, high = -left, len(line) - slice_len + right
    if high < low:
        low = high = 0
    return [line[max(s, 0) : min(s + slice_len, len(line))] for s in range(low, high + 1)]


def expected(ring, slice_len, strict, left, right, weighting):
    """Slice (as a tuple of rows) -> probability."""
    out, total = {}, 0.0
    for line in trajectories(ring).values():
        if strict and len(line) < slice_len:
            continue
        weight = 1.0 if weighting == "trajectory" else 2 * len(line) + left + right
        total += weight
        legal = starts(line, slice_len, left, right)
        for rows in legal:
            out[tuple(rows)] = out.get(tuple(rows), 0.0) + weight / len(legal)
    return {rows: p / total for rows, p in out.items()}


CASES = [(strict, span, weighting) for strict in (True, False) for span in (False, True, 2, (0, 3)) for weighting in
         ("transition", "trajectory")]  # fmt: skip


@pytest.mark.parametrize("layout", ["flat", "interleaved", "lanes", "not yet full"])
@pytest.mark.parametrize(("strict", "span", "weighting"), CASES)
@pytest.mark.every(3)
def test_every_start_is_drawn_with_the_stated_probability(layout, strict, span, weighting):
    ring = a_ring(
        5, lanes=3 if layout == "lanes" else 1, interleaved=layout == "interleaved", wrapped=layout != "not yet full"
    )
    slice_len = 4
    left, right = span if isinstance(span, tuple) else (3 * span if span is True else int(span),) * 2
    wanted = expected(ring, slice_len, strict, left, right, weighting)
    drawn, lengths = ring.index.draw(RandomStream(1), DRAWS, slice_len, strict, span, weighting)
    assert lengths.sum() == len(drawn)
    counted = dict.fromkeys(wanted, 0)
    for rows in np.split(drawn, np.cumsum(lengths)[:-1]):
        counted[tuple(rows.tolist())] += 1  # a slice that is not legal is a KeyError
    wide = [k for k in wanted if wanted[k] * DRAWS >= 5]
    assert len(wide) == len(wanted)
    assert pvalue([counted[k] for k in wide], [wanted[k] * DRAWS for k in wide]) > 1e-4


@pytest.mark.parametrize("lanes", [1, 3])
def test_with_span_every_row_is_exactly_equally_likely(lanes):
    ring = a_ring(8, lanes=lanes)
    drawn, _ = ring.index.draw(RandomStream(2), DRAWS, 5, False, True)
    counted = np.bincount(drawn, minlength=len(ring))
    # rows of one slice come together, so the spread is that of slices: at most 5 rows each
    share = expected(ring, 5, False, 4, 4, "transition")
    per_row = np.zeros(len(ring))
    for rows, p in share.items():
        per_row[list(rows)] += p
    assert np.allclose(per_row, per_row[0])
    assert (counted > 0).all() and np.abs(counted / counted.mean() - 1).max() < 0.2


@pytest.mark.parametrize("weighting", ["transition", "trajectory"])
def test_every_row_of_an_eligible_trajectory_is_reached(weighting):
    ring = a_ring(3, interleaved=True)
    drawn, _ = ring.index.draw(RandomStream(0), DRAWS, 3, False, False, weighting)
    assert set(drawn.tolist()) == set(range(len(ring)))


def test_few_long_trajectories_among_many_short_ones_are_found_with_the_same_probabilities():
    rng = np.random.default_rng(0)
    ring = Ring(LazyTensorStorage(5000))
    streams = Streams(rng, 1, values="bytes", end=1.0)
    ring.extend(batch_of([streams.play(0, 4000)], [4000])[0])
    streams.end = 0.0
    for length in (20, 30):
        played = streams.play(0, length)
        played[-1] = (*played[-1][:3], True)
        streams._reset(0)
        ring.extend(batch_of([played], [length])[0])
    wanted = expected(ring, 16, True, 0, 0, "transition")
    drawn, _ = ring.index.draw(RandomStream(3), DRAWS, 16)
    first = drawn.reshape(-1, 16)[:, 0]
    counted = [int((first == rows[0]).sum()) for rows in wanted]
    assert sum(counted) == DRAWS
    assert pvalue(counted, [p * DRAWS for p in wanted.values()]) > 1e-4


def test_the_same_generator_state_draws_the_same_slices():
    ring = a_ring(1)
    one, other = RandomStream(9), RandomStream(9)
    for _ in range(3):
        first, second = ring.index.draw(one, 8, 4, False), ring.index.draw(other, 8, 4, False)
        assert all(map(np.array_equal, first, second))


def test_draws_are_refused_with_what_to_change():
    ring = a_ring(1)
    refused(ArgumentError, "500 strict_length", lambda: ring.index.draw(RandomStream(0), 2, 500))
    with pytest.raises(ArgumentError, match=r"span.*Use at most 3, or True"):
        ring.index.draw(RandomStream(0), 2, 4, span=9)
    refused(ArgumentError, "weighting length", lambda: ring.index.draw(RandomStream(0), 2, 4, weighting="length"))


def test_uniform_numbers_continue_from_a_saved_state():
    stream = RandomStream(3)
    first = stream.random(1000)
    assert first.dtype == np.float64 and first.min() >= 0 and first.max() < 1 and abs(first.mean() - 0.5) < 0.05
    other = RandomStream(0)
    other.load_state_dict(stream.state_dict())
    assert (other.random(5) == stream.random(5)).all() and len(set(first)) == 1000
