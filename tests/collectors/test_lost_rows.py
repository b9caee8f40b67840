"""Rows that nobody gets, and batches that somebody holds: what is delivered beside them is whole, and stays so."""

from __future__ import annotations

import warnings
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from face import decode_state, encode_state, refused

from rlcli.collectors import AsyncCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from rlcli.data import LazyTensorStorage, ReplayBuffer, SliceSampler
from rlcli.envs import GymEnv
from rlcli.errors import ArgumentError
from rlcli.keys import MASK
from rlcli.report.tally import EpisodeStats
from tests.collectors.counting import counting, pair
from tests.collectors.test_multi import cartpole, four

IDS, REWARD = ("collector", "traj_ids"), ("next", "reward")
KINDS = [MultiSyncCollector, MultiAsyncCollector]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "steps"


class Raising:
    """A hook that raises at every third batch; where it is pickled, each worker counts its own."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, batch) -> None:
        self.calls += 1
        if self.calls % 3 == 0:
            raise ValueError("the disk of the hook is full")


def whole(trajectories, length):
    """Whether a delivery of `counting` envs, end to end, holds only whole episodes."""
    t = trajectories["observation"][:, 1].reshape(-1, length)
    return torch.equal(t, torch.arange(length, dtype=t.dtype).expand_as(t))


# ---- batches that are held ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [MultiSyncCollector, AsyncCollector])
def test_a_batch_that_is_held_is_not_written_again(kind, path):
    """One env: a column that was cut short is a view of the memory, and looks like nobody's."""
    maker = partial(counting, path, 7)
    options = {"frames_per_batch": 20, "total_frames": 200, "reset_when_done": False}
    with kind([maker] if kind is MultiSyncCollector else maker, None, **options) as c:
        held = [(batch, batch.clone()) for batch in c]
    assert len(held) > 10
    for batch, then in held:
        assert all(
            torch.equal(torch.as_tensor(batch[key]), torch.as_tensor(then[key])) for key in then.keys(True, True)
        )


# ---- rows that nobody got ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_no_trajectory_is_put_together_over_a_batch_that_failed(kind, path):
    options = {"frames_per_batch": 24, "trajs_per_batch": 1, "traj_format": "cat", "post_collect_hook": Raising()}
    with kind([partial(pair, path, 7)] * 2, None, **options) as c:
        found, failed = 0, 0
        while found < 40:
            try:
                pieces = c.deliver().pieces
            except ValueError:
                failed += 1
                continue
            for piece in pieces:
                length = len(piece)
                assert length in (7, 8) and whole(piece, length)
                found += 1
        assert failed > 3


@pytest.mark.parametrize("leftovers", [False, True])
def test_no_trajectory_is_put_together_over_a_batch_that_came_too_late(leftovers, path):
    options = {"trajs_per_batch": 1, "traj_format": "cat", "deliver_leftovers": leftovers, "frames_per_batch": 12}
    with MultiAsyncCollector([partial(pair, path, 7)] * 2, learned(), max_lag=0, on_lag="drop", **options) as c:
        found, stats = [], EpisodeStats()
        while len(found) < 60 or not c.dropped_frames:
            delivered = c.deliver()
            stats.interrupt(delivered.gaps)
            lengths = stats.update(delivered.reward, delivered.done, delivered.lanes)[1].tolist()
            assert set(lengths) <= {7, 8}
            found += delivered.pieces
            if c.batches % 3 == 0:
                c.update_policy_weights_()
        for piece in found:
            ended = bool(piece["next", "terminated"][-1])
            assert ended or leftovers
            t = piece["observation"][:, 1]
            assert torch.equal(t, torch.arange(len(t), dtype=t.dtype)) and (len(t) in (7, 8) or not ended)
        pool = c.trajectories
        assert sum(map(len, found)) + pool.leftover_frames + pool.dropped_frames == c.frames


@pytest.mark.parametrize("next_obs", ["delta", "compact"])
def test_a_batch_that_came_too_late_ends_the_trajectory_in_every_mode(next_obs, path):
    """Also over a checkpoint, and where two batches of one trajectory are lost."""
    rows: dict[int, list[float]] = {}
    options = {"max_lag": 0, "on_lag": "drop", "next_obs": next_obs, "frames_per_batch": 12}
    buffer = ReplayBuffer(storage=LazyTensorStorage(4000), sampler=SliceSampler(slice_len=2), batch_size=2000)
    makers, batches, late = [partial(pair, path, 60)] * 2, 0, 0
    state = None
    while batches < 80 or late < 8:
        with MultiAsyncCollector(makers, learned(), **options) as c:
            if state is not None:
                c.load_state_dict(decode_state(b"".join(map(bytes, encode_state(state))), "a checkpoint"))
            for _ in range(40):
                batch, late, batches = c.next(), c.dropped_frames // 12, batches + 1
                buffer.extend(batch)
                for lane in batch:
                    for number, t in zip(lane[IDS].tolist(), lane["observation"][:, 1].tolist(), strict=True):
                        rows.setdefault(number, []).append(t)
                if batches % 3 == 0:
                    c.update_policy_weights_()
            state = c.state_dict()
    assert all(np.array_equal(np.diff(each), np.ones(len(each) - 1)) for each in rows.values())
    slices = buffer.sample()["observation"].reshape(-1, 2, 2)
    assert (slices[:, 1, 1] == slices[:, 0, 1] + 1).all()


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, MultiAsyncCollector])
def test_a_step_that_a_reset_cut_off_is_of_no_later_episode(kind, path):
    make, stats = partial(pair, path, 3), EpisodeStats()  # of 3 and 4 steps
    options = {"frames_per_batch": 10 if kind is not MultiSyncCollector else 20, "reset_at_each_iter": True}
    with kind(make if kind is Collector else [make] * 2, None, **options) as c:
        for _ in range(4):
            delivered = c.deliver()
            stats.interrupt(delivered.gaps)
            lengths = stats.update(delivered.reward, delivered.done, delivered.lanes)[1].tolist()
            assert set(lengths) == {3, 4}


def test_episodes_whose_beginning_is_unknown_are_not_counted():
    def row(*values):
        return np.array(values, float)[None, :, None]

    stats = EpisodeStats()
    stats.update(row(1, 1, 1), row(0, 0, 0))
    stats.interrupt({0: False})
    assert stats.update(row(1, 1, 1), row(0, 0, 0))[1].tolist() == []
    assert stats.update(row(1, 1, 1, 1), row(0, 1, 0, 1))[1].tolist() == [2]
    stats.update(row(5, 5), row(0, 0))
    stats.interrupt({0: True})
    returns, lengths = stats.update(row(1, 1, 1), row(0, 0, 1))
    assert (returns.tolist(), lengths.tolist(), stats.episodes) == ([3.0], [3], 2)


# ---- between two batches -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, AsyncCollector])
def test_the_next_batch_after_a_reset_or_a_seed_is_of_it(kind):
    maker = [four] if kind is MultiSyncCollector else four
    with kind(
        maker, None, frames_per_batch=80, seed=3, **({"cat_results": 0} if kind is MultiSyncCollector else {})
    ) as c:
        first = c.next()
        c.reset()
        second = c.next()
        assert second[IDS].min() > first[IDS].max()
        c.set_seed(3)
        third = c.next()
        assert torch.equal(third["observation"], first["observation"]) and torch.equal(third["action"], first["action"])


def test_what_was_loaded_after_a_batch_that_failed_goes_on():
    options = {"frames_per_batch": 40, "seed": 3, "cat_results": 0, "episode_seeds": True}
    with MultiSyncCollector([four] * 2, None, **options) as straight:
        assert straight.remember_episodes(500)
        straight.next()
        state = decode_state(b"".join(map(bytes, encode_state(straight.state_dict()))), "a checkpoint")
        expected = [straight.next() for _ in range(2)]
    hook = Raising()
    hook.calls = 2
    with MultiSyncCollector([four] * 2, None, post_collect_hook=hook, **options) as c:
        refused(ValueError, "disk", lambda: c.next())
        c.set_seed(3, episode_seeds=True)
        assert c.load_state_dict(state) == []
        for batch in expected:
            assert torch.equal(c.next()["observation"], batch["observation"])


@pytest.mark.parametrize("kind", KINDS)
def test_what_would_disturb_workers_is_refused_while_they_collect(kind, path):
    from rlcli.data import LazyTensorStorage, ReplayBuffer

    buffer = ReplayBuffer(storage=LazyTensorStorage(1 << 20))
    with kind([partial(counting, path, 7)] * 2, None, frames_per_batch=40, replay_buffer=buffer) as c:
        c.start()
        for ask in (c.rows, partial(c.limit_episodes, 5), c.reset, c.state_dict):
            with refused(ArgumentError, "background"):
                ask()
        with c.pause():
            assert c.rows().frames == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_collector_that_was_shut_down_says_so(kind, path):
    c = kind([partial(counting, path, 7)] * 2, None, frames_per_batch=40)
    c.next()
    c.shutdown()
    for ask in (c.rows, partial(c.limit_episodes, 5), c.reset, c.state_dict, partial(c.set_seed, 1)):
        with refused(ArgumentError, "shut down"):
            ask()


# ---- shares of different lengths ---------------------------------------------------------------------------------
def test_random_frames_are_counted_over_shares_of_different_lengths(path):
    for frames, expected in ((60, 60), (70, 70), (30, 30), (105, 105)):
        options = {"frames_per_batch": [100, 10], "init_random_frames": frames, "cat_results": 0}
        with MultiSyncCollector([partial(counting, path)] * 2, constant(), **options) as c:
            batch = c.next()
        assert len(batch) == 110 and int((batch["random"] == 0).sum()) == expected


def learned():
    """A policy with a weight, for envs that show (episode, step)."""
    from tensordict.nn import TensorDictModule

    return TensorDictModule(Zero(), ["observation"], ["action"])


class Zero(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 1)

    def forward(self, observation):
        return (0 * super().forward(observation)).squeeze(-1).long()


def constant():
    from tensordict.nn import TensorDictModule

    return TensorDictModule(one_each, ["observation"], ["action", "random"])


def one_each(observation):
    ones = observation.new_ones(observation.shape[:-1])
    return ones.long(), ones


@pytest.mark.filterwarnings("ignore:split_trajectories pads")
@pytest.mark.parametrize("mode", ["full", "exact"])
@pytest.mark.parametrize(
    "more", [{"frames_per_batch": [24, 8]}, {"reset_when_done": False}, {"preemptive_threshold": 0.5}]
)
def test_trajectories_are_split_out_of_each_workers_own_rows(mode, more, path):
    options = {"frames_per_batch": 32, "split_trajs": True, "cat_results": 0, "next_obs": mode} | more
    with MultiSyncCollector([partial(pair, path, 5)] * 2, None, **options) as c:
        frames = 0
        for _ in range(3):
            batch, before = c.next(), frames
            frames = c.frames
            assert int(batch[MASK].sum()) == frames - before
            for row in batch:
                rows = row[row[MASK]]
                t = rows["observation"][:, 1]
                assert torch.equal(t, torch.arange(int(t[0]), int(t[0]) + len(t), dtype=t.dtype))
                assert len(rows[IDS].unique()) == 1 and rows[IDS][0] >= 0
                assert torch.equal(torch.as_tensor(rows["next", "observation"])[:, 1], t + 1)


class Plain:
    """A buffer with no method but the one that is used."""

    def __init__(self) -> None:
        self.shapes = []

    def extend(self, rows) -> None:
        self.shapes.append(tuple(rows.shape))


def test_a_buffer_of_the_users_own_takes_shares_of_different_lengths(path):
    buffer = Plain()
    with MultiSyncCollector([partial(counting, path)] * 2, None, frames_per_batch=[20, 10], replay_buffer=buffer) as c:
        c.next()
    assert buffer.shapes == [(20,), (10,)]


def test_single_envs_and_batches_of_envs_are_not_mixed(path):
    for makers in ([cartpole, partial(pair, path)], [partial(pair, path), cartpole]):
        with refused(ArgumentError, "single"):
            MultiAsyncCollector(makers, None, frames_per_batch=8)


# ---- hooks in workers --------------------------------------------------------------------------------------------
def doubled(batch) -> None:
    batch["next", "reward"] = batch["next", "reward"] * 2


def doubled_in_place(batch) -> None:
    batch["next", "reward"] *= 2


def retyped(batch) -> None:
    batch["action"] = batch["action"].float()


def removed(batch) -> None:
    batch.exclude("action", inplace=True)


def following(batch) -> None:
    batch["next", "observation"] += 1


@pytest.mark.parametrize("hook", [doubled, doubled_in_place])
def test_what_a_hook_writes_arrives_and_the_report_has_the_envs_own_rewards(hook, path):
    options = {"frames_per_batch": 12, "total_frames": 30, "cat_results": 0, "post_collect_hook": hook}
    with MultiSyncCollector([partial(pair, path, 5)] * 2, None, **options) as c:
        for _ in range(3):  # the last one is cut, and its columns lie elsewhere
            delivered = c.deliver()
            assert (delivered.raw[REWARD] == 2).all() and (delivered.reward == 1).all()


@pytest.mark.parametrize("hook", [retyped, removed, following])
def test_what_a_hook_cannot_change_is_refused(hook, path):
    options = {"frames_per_batch": 12, "post_collect_hook": hook}
    with (
        MultiSyncCollector([partial(counting, path, 5)] * 2, None, **options) as c,
        refused(ArgumentError, "post_collect_hook"),
    ):
        c.next()


# ---- checkpoints -------------------------------------------------------------------------------------------------
class Outside(gym.Env):
    """Shows 2 at every third step, where 1 is the most that it declares."""

    observation_space, action_space, t = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2), 0

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.full(1, 2.0 * (self.t % 3 == 0), np.float32), 1.0, False, False, {}


def outside():
    return GymEnv(Outside(), categorical_action_encoding=True)


def test_observations_out_of_bounds_of_batches_in_flight_are_counted_after_a_resume():
    def make():
        return AsyncCollector(outside, None, frames_per_batch=30, total_frames=600)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with make() as c:
            for _ in range(5):
                c.next()
            state = decode_state(b"".join(map(bytes, encode_state(c.state_dict()))), "a checkpoint")
        with make() as c:
            c.load_state_dict(state)
            for _ in c:
                pass
            counted = c.figures()["out_of_bounds"]["observation"]["observations"]
    assert c.frames == 600 and 195 <= counted <= 200  # an env that was begun anew counts its steps anew
