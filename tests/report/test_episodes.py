"""Episode returns and lengths equal a plain loop's, wherever the batches are cut."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from face import refused
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcli.report.tally import WINDOW, EpisodeStats, boundary_rows


def by_hand(reward: np.ndarray, done: np.ndarray) -> list[tuple[int, int, float, int]]:
    """(end time, lane, return, length) of every finished episode of `[N, T]` columns."""
    found = []
    for lane in range(reward.shape[0]):
        total, length = 0.0, 0
        for t in range(reward.shape[1]):
            total, length = total + float(reward[lane, t]), length + 1
            if done[lane, t]:
                found.append((t, lane, total, length))
                total, length = 0.0, 0
    return sorted(found)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4),
    st.lists(st.integers(1, 7), min_size=1, max_size=6),
    st.floats(0, 1),
    st.integers(0, 10**6),
)
def test_cutting_the_stream_into_batches_changes_nothing(lanes, cuts, p, seed):
    rng = np.random.default_rng(seed)
    steps = sum(cuts)
    reward = rng.integers(-3, 4, (lanes, steps)).astype(np.float32)
    done = rng.random((lanes, steps)) < p
    stats = EpisodeStats()
    found, start = [], 0
    for cut in cuts:
        part = slice(start, start + cut)
        returns, lengths = stats.update(torch.from_numpy(reward[:, part, None]), torch.from_numpy(done[:, part, None]))
        found += list(zip(returns.tolist(), lengths.tolist(), strict=True))
        start += cut
    expected = by_hand(reward, done)
    assert stats.episodes == len(expected)
    assert found == [(total, length) for _, _, total, length in expected]
    if expected:
        assert stats.best == max(total for _, _, total, _ in expected)
        assert stats.mean_return == pytest.approx(np.mean([total for _, _, total, _ in expected[-WINDOW:]]))


def test_a_single_env_has_no_lane_dimension():
    stats = EpisodeStats()
    returns, lengths = stats.update(torch.ones(5, 1), torch.tensor([0, 1, 0, 0, 1]).bool()[:, None])
    assert returns.tolist() == [2, 3] and lengths.tolist() == [2, 3]


def test_an_infinite_reward_spoils_its_own_episode_only():
    reward = torch.tensor([[1.0, float("inf"), 1, 1, 1, 1]])
    done = torch.tensor([[0, 1, 0, 1, 0, 1]]).bool()
    returns, _ = EpisodeStats().update(reward, done)
    assert returns.tolist() == [float("inf"), 2, 2]


def test_a_nan_return_does_not_become_or_hide_the_best():
    stats = EpisodeStats()
    stats.update(torch.tensor([[float("nan"), 3.0]]), torch.ones(1, 2).bool())
    assert stats.best == 3
    stats.update(torch.tensor([[float("nan")]]), torch.ones(1, 1).bool())
    assert stats.best == 3


def test_state_continues_open_episodes_exactly_through_json():
    rng = np.random.default_rng(3)
    reward, done = rng.standard_normal((3, 40)), rng.random((3, 40)) < 0.1
    whole, first = EpisodeStats(), EpisodeStats()
    whole.update(reward[:, :17], done[:, :17])
    first.update(reward[:, :17], done[:, :17])
    second = EpisodeStats()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for a, b in zip(
        whole.update(reward[:, 17:], done[:, 17:]), second.update(reward[:, 17:], done[:, 17:]), strict=True
    ):
        assert np.array_equal(a, b)
    assert whole.state_dict() == second.state_dict()


def test_forgotten_open_episodes_do_not_leak_into_the_next():
    stats = EpisodeStats()
    stats.update(torch.ones(1, 4), torch.zeros(1, 4).bool())
    stats.forget_open()
    returns, _ = stats.update(torch.ones(1, 2), torch.tensor([[False, True]]))
    assert returns.tolist() == [2]


def test_one_lane_can_forget_while_the_others_go_on():
    stats = EpisodeStats()
    stats.update(torch.ones(3, 4), torch.zeros(3, 4).bool())
    stats.forget_open([1])
    returns, lengths = stats.update(torch.ones(3, 1, 1), torch.ones(3, 1, 1).bool())
    assert returns.tolist() == lengths.tolist() == [5, 1, 5]


def test_before_the_first_end_there_is_no_mean():
    stats = EpisodeStats()
    stats.update(torch.ones(2, 3), torch.zeros(2, 3).bool())
    assert stats.mean_return is None and stats.mean_length is None


def test_columns_of_different_shapes_are_refused():
    refused(ValueError, "differ", lambda: EpisodeStats().update(torch.ones(2, 3), torch.zeros(2, 4).bool()))


def test_a_batch_of_no_steps_has_no_boundary():
    assert boundary_rows(np.zeros((2, 0, 1), bool)) == boundary_rows(np.zeros((2, 0), bool)) == 0


def test_boundary_rows_are_ends_and_each_lanes_last():
    done = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 1]]).bool()[..., None]
    assert boundary_rows(done) == 3  # one end inside, two lane ends (one of them an end as well)
