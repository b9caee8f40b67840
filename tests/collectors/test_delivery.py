"""`deliver`: the one way by which batches reach whoever consumes them; iteration is a loop over it."""

from __future__ import annotations

import contextlib

import pytest
import torch
from face import refused
from worlds import Counter

from rlcli.collectors import Collector
from rlcli.data import LazyTensorStorage, ReplayBuffer
from rlcli.envs import GymEnv, SerialEnv
from rlcli.errors import ArgumentError
from rlcli.keys import DONE, REWARD

WAYS = {
    "batches": {},
    "split": {"split_trajs": True},
    "whole": {"trajs_per_batch": 2},
    "leftovers": {"trajs_per_batch": 3, "traj_format": "cat", "deliver_leftovers": True},
    "cut": {"set_truncated": True, "next_obs": "exact"},
}


def collector(**options) -> Collector:
    options = {"frames_per_batch": 24, "total_frames": 100, "seed": 1} | options
    return Collector(SerialEnv(3, lambda: GymEnv(Counter())), **options)


class Watched:
    """Options that count what is called and mark what passes."""

    def __init__(self) -> None:
        self.before, self.seen = 0, []
        self.options = {
            "pre_collect_hook": self.begin, "post_collect_hook": self.look, "postproc": self.process
        }  # fmt: skip

    def begin(self):
        self.before += 1

    def process(self, piece):
        piece.set(REWARD, piece[REWARD] * 2 + 1)
        return piece.set("number", torch.full(piece.shape, len(self.seen)))

    def look(self, piece):
        self.seen.append(piece.to_tensordict().clone())


def deliveries(made: Collector):
    while made.steps_left():
        yield made.deliver()


def same(found, expected) -> bool:
    return set(found.keys(True, True)) == set(expected.keys(True, True)) and bool((found == expected).all())


@pytest.mark.filterwarnings("ignore:split_trajectories pads")
@pytest.mark.parametrize("way", WAYS)
def test_deliveries_hold_what_iteration_yields_and_call_the_hooks_as_often(way):
    iterated, delivered = Watched(), Watched()
    expected = [batch.clone() for batch in collector(**WAYS[way], **iterated.options)]
    pieces = [piece for found in deliveries(collector(**WAYS[way], **delivered.options)) for piece in found.pieces]
    assert len(pieces) == len(expected) > 3 and all(map(same, pieces, expected))
    assert delivered.before == iterated.before and len(delivered.seen) == len(iterated.seen) == len(pieces)
    assert all(map(same, delivered.seen, iterated.seen))


@pytest.mark.parametrize("way", ["batches", "whole", "cut"])
@pytest.mark.parametrize("extend_buffer", [True, False])
def test_a_buffer_holds_the_same_rows_whoever_drives(way, extend_buffer):
    def rows(drive) -> tuple:
        watched = Watched()
        made = collector(
            **WAYS[way], **watched.options, replay_buffer=ReplayBuffer(storage=LazyTensorStorage(200)),
            extend_buffer=extend_buffer,
        )  # fmt: skip
        drive(made)
        return made.replay_buffer[:], watched

    def by_delivery(made):
        assert all(found.pieces == () for found in deliveries(made))

    (expected, iterated), (found, delivered) = rows(list), rows(by_delivery)
    assert len(found) > 50 and same(found, expected)
    assert (delivered.before, len(delivered.seen)) == (iterated.before, len(iterated.seen))


def test_rewards_and_ends_are_the_envs_own_whatever_a_delivery_writes():
    plain = collector(total_frames=24).deliver().raw
    watched = Watched()
    changed = collector(total_frames=24, set_truncated=True, **watched.options).deliver()
    assert torch.equal(torch.from_numpy(changed.reward), plain[REWARD])
    assert torch.equal(torch.from_numpy(changed.done), plain[DONE])
    assert torch.equal(changed.raw[REWARD], plain[REWARD] * 2 + 1) and bool(changed.raw[DONE][:, -1].all())


def test_what_a_batch_lacks_is_not_told():
    found = collector(keep_keys=["observation", "action"]).deliver()
    assert found.reward is None and found.done is None


def test_stages_are_entered_one_after_the_other_and_time_is_told_on_request():
    entered, inside = [], []

    @contextlib.contextmanager
    def stage(name):
        assert not inside
        inside.append(name)
        entered.append(name)
        yield
        inside.pop()

    made = collector(replay_buffer=ReplayBuffer(storage=LazyTensorStorage(200)))
    assert made.deliver(stage=stage).seconds is None
    assert entered == ["collect", "store"]
    seconds = made.deliver(timed=True).seconds
    assert 0 < seconds.env + seconds.policy < seconds.total


def test_nothing_is_delivered_of_a_run_that_is_over_or_closed():
    made = collector(total_frames=24)
    made.deliver()
    refused(ArgumentError, "total_frames", lambda: made.deliver())
    made.shutdown()
    refused(ArgumentError, "shut down", lambda: made.deliver(4))


def test_a_delivery_of_no_steps_is_refused_for_what_it_is():
    refused(ArgumentError, "step", lambda: collector(total_frames=24).deliver(0))


def test_what_an_iteration_left_comes_with_the_next_delivery():
    whole = [piece["observation"] for piece in collector(trajs_per_batch=1)]
    made = collector(trajs_per_batch=1)
    found = [made.next()["observation"]]
    found += [piece["observation"] for delivered in deliveries(made) for piece in delivered.pieces]
    assert len(found) == len(whole) and all(map(torch.equal, found, whole))


@pytest.mark.parametrize("options", [{}, {"set_truncated": True}], ids=["plain", "truncated"])
def test_a_subclass_that_collects_otherwise_is_asked(options):
    class Doubled(Collector):
        def rollout(self, steps=None):
            batch = super().rollout(steps)
            return batch.set("reward_twice", batch[REWARD] * 2)

    make = lambda: SerialEnv(3, lambda: GymEnv(Counter()))  # noqa: E731
    options = {"frames_per_batch": 24, "total_frames": 96, "seed": 1} | options
    plain = list(deliveries(Collector(make(), **options)))
    for batches in (list(Doubled(make(), **options)), [found.raw for found in deliveries(Doubled(make(), **options))]):
        assert len(batches) == len(plain)
        assert all(
            torch.equal(batch["reward_twice"], p.raw[REWARD] * 2) for batch, p in zip(batches, plain, strict=True)
        )
    for found, expected in zip(deliveries(Doubled(make(), **options)), plain, strict=True):
        assert (found.reward == expected.reward).all() and (found.done == expected.done).all()


def test_what_a_postproc_changes_in_place_is_delivered():
    def mark(batch):
        batch["mark"] = torch.ones(batch.shape)

    made = collector(postproc=mark)
    assert bool(made.deliver().pieces[0]["mark"].all()) and bool(made.next()["mark"].all())


@pytest.mark.parametrize("way", ["iteration", "deliver", "buffer"])
@pytest.mark.parametrize("name", ["postproc", "pre_collect_hook", "post_collect_hook"])
@pytest.mark.parametrize("cut", ["batches", "whole"])
def test_a_stop_iteration_of_a_users_function_ends_nothing_in_silence(name, way, cut):
    calls = iter([None, None])
    options = WAYS[cut] | {name: lambda *_: next(calls)}
    if way == "buffer":
        options["replay_buffer"] = ReplayBuffer(storage=LazyTensorStorage(200), batch_size=4)
    with collector(**options) as made, refused(ArgumentError, f"{name} StopIteration") as caught:
        for _ in deliveries(made) if way == "deliver" else made:
            pass
    assert caught.value.fix
