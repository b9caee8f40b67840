"""Lanes that finish are reset within the step where a reset is sure to follow: nobody can tell, but by the orders."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import torch
from face import refused
from gym_worlds import Seeded, Wandering
from hypothesis import given, settings
from hypothesis import strategies as st
from test_parallel import collected, equal

from rlcli.collectors import Collector
from rlcli.envs import GymEnv, ParallelEnv, SerialEnv, TransformedEnv
from rlcli.errors import EnvError
from rlcli.transforms import Compose, RewardSum, RunningNorm, StepCounter
from rlcli.vec_envs.shard import RESET, STEP, STEP_ON
from rlcli.vec_envs.vec_env import reward_column

DEALINGS = {
    "caller": {"workers": 1, "caller_steps": True},
    "caller and two": {"workers": 2, "caller_steps": True},
    "workers": {"workers": 2, "caller_steps": False},
    "replaced": {"workers": 2, "on_worker_error": "restart"},
}
LANES = 4


def wandering(**options):
    return lambda: GymEnv(Wandering(**options))


def orders(env: ParallelEnv) -> list[int]:
    """The kinds of the orders that its workers are given from now on."""
    given, send = [], env.vec_env.group.send

    def counted(kind, *args, **kwargs):
        given.append(kind)
        return send(kind, *args, **kwargs)

    env.vec_env.group.send = counted
    return given


# ---- what is collected -----------------------------------------------------------------------------------------------
def plain(env):
    return env


def counted(env):
    return TransformedEnv(env, Compose(StepCounter(max_steps=2), RewardSum()))


def normed(env):
    return TransformedEnv(env, RunningNorm())


@pytest.mark.parametrize("dressed", [plain, counted, normed])
@pytest.mark.parametrize("dealing", DEALINGS)
@settings(max_examples=4)
@given(data=st.data())
@pytest.mark.every(3)
def test_batches_and_checkpoints_are_those_of_one_process(dealing, dressed, data):
    makers = [wandering(most=most) for most in data.draw(st.lists(st.integers(1, 4), min_size=3, max_size=5))]
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4), "lengths")
    options = data.draw(
        st.fixed_dictionaries({}, optional={"max_frames_per_traj": st.just(2), "reset_when_done": st.just(False)})
    )
    here = collected(dressed(SerialEnv(len(makers), makers)), lengths, **options)
    env = ParallelEnv(len(makers), makers, **DEALINGS[dealing])
    there = collected(dressed(env), lengths, **options)
    env.close()
    assert all(equal(a, b) for a, b in zip(here[0], there[0], strict=True))
    assert repr(here[1]) == repr(there[1])


@pytest.mark.parametrize("dealing", DEALINGS)
def test_between_two_batches_anybody_may_reset(dealing):
    """An episode that was begun ahead and is in use is not given out again."""
    found = []
    for make in (SerialEnv, lambda n, makers: ParallelEnv(n, makers, **DEALINGS[dealing])):
        env = make(LANES, wandering(most=2))
        collector = Collector(env, None, frames_per_batch=LANES, total_frames=-1)
        collector.set_seed(1)
        shown = []
        for _ in range(12):
            shown += [collector.rollout(1), env.reset()]
        found.append(shown)
        env.close()
    assert all(map(equal, *found))


@pytest.mark.parametrize("dealing", DEALINGS)
def test_ends_cost_no_order(dealing):
    env = ParallelEnv(LANES, wandering(), **DEALINGS[dealing])
    collector = Collector(env, None, frames_per_batch=4 * LANES, total_frames=-1)
    collector.rollout(1)
    given = orders(env)
    batch = collector.rollout(30)
    assert batch["next", "done"].sum() > 30 and given == [STEP_ON] * 30
    collector.shutdown()


@pytest.mark.parametrize("reason", ["step_timeout", "reset_when_done", "by hand"])
def test_where_it_is_not_sure_that_a_reset_follows_it_is_ordered(reason):
    env = ParallelEnv(LANES, wandering(), workers=2, step_timeout=60 if reason == "step_timeout" else None)
    collector = Collector(
        env, None, frames_per_batch=LANES, total_frames=-1, reset_when_done=reason != "reset_when_done"
    )
    collector.rollout(1)
    given = orders(env)
    if reason == "by hand":
        env.rollout(9, break_when_any_done=False)
    else:
        for _ in range(9):
            collector.rollout(1)
    assert set(given) == {STEP, RESET}
    env.close()


# ---- by the array face -----------------------------------------------------------------------------------------------
class Face:
    """Steps lanes that are told that resets follow."""

    def __init__(self, env, every_episode: bool) -> None:
        self.vec_env, self.seen = env.vec_env, []
        self.vec_env.seed(5, every_episode=every_episode)
        self.row = np.zeros((LANES, 3))
        self.rows = {"observation": [self.row, self.row]}
        self.restart()
        self.vec_env.resets_follow = True
        self.step_all, self.reset_all = self.vec_env.bind(self.rows)

    def restart(self) -> None:
        self.vec_env.restart({"observation": self.row}, range(LANES))
        self.seen.append(self.row.copy())

    def step(self) -> list[int]:
        done = list(self.step_all(0, np.arange(LANES) % 2))
        outcome, rewards = self.vec_env.take_outcome(), np.zeros((LANES, 1), np.float32)
        reward_column(outcome, self.vec_env, 1, rewards)
        self.seen += [self.row.copy(), rewards, outcome.ends]
        return done

    def reset(self, done: list[int]) -> None:
        self.reset_all(0, done)
        self.seen.append(self.row.copy())


def both(dealing: str, script, makers=None, every_episode: bool = False) -> None:
    """Run a script on one process's lanes and on these: they show the same."""
    makers, faces = makers or [wandering()] * LANES, []
    for make in (SerialEnv, lambda n, makers: ParallelEnv(n, makers, **DEALINGS[dealing])):
        env = make(LANES, makers)
        face = Face(env, every_episode)
        script(face)
        faces.append(face)
        env.close()
    one, other = (face.seen for face in faces)
    assert len(one) == len(other) and repr(one) == repr(other)
    assert faces[0].vec_env.episodes == faces[1].vec_env.episodes and faces[0].vec_env.seeds == faces[1].vec_env.seeds


@pytest.mark.parametrize("every_episode", [False, True])
@pytest.mark.parametrize("dealing", DEALINGS)
def test_who_stops_between_a_step_and_its_resets_goes_on_as_in_one_process(dealing, every_episode):
    def script(face: Face) -> None:
        for turn in range(40):
            done = face.step()
            if turn % 4 == 3:  # all begin anew: those that began ahead are reset once, not twice
                face.restart()
            elif turn % 4 == 2 and done:  # some of those that ended, then the others
                face.reset(done[1:])
                face.reset(done[:1])
            elif done:
                face.reset(done)

    both(dealing, script, every_episode=every_episode)


@pytest.mark.parametrize("dealing", DEALINGS)
def test_a_seed_that_was_given_meanwhile_is_heeded(dealing):
    def script(face: Face) -> None:
        for turn in range(20):
            done = face.step()
            if done and turn % 3 == 2:
                face.vec_env.seed(turn, every_episode=turn % 2 == 0)
            if done:
                face.reset(done)

    both(dealing, script, [lambda: GymEnv(Seeded())] * LANES)


@pytest.mark.parametrize("every_episode", [False, True])
@pytest.mark.parametrize("dealing", ["caller", "caller and two", "workers"])
@pytest.mark.parametrize("lane", range(LANES))
@pytest.mark.every(3)
def test_a_reset_that_raises_does_so_when_it_is_asked_for(dealing, lane, every_episode):
    """Said as in one process; the step before it counts, and the next reset goes on in the same way."""
    makers = [wandering(most=1 if each <= lane else 99, fails_at=3 if each == lane else None) for each in range(LANES)]

    def script(face: Face) -> None:
        face.reset(face.step())
        done = face.step()
        with refused(EnvError, lane) as caught:
            face.reset(done)
        face.seen.append(str(caught.value))
        for _ in range(3):
            face.restart()
            face.reset(face.step())

    both(dealing, script, makers, every_episode)


def test_in_a_worker_that_is_to_be_replaced_too():
    env = ParallelEnv(2, [wandering(most=1, fails_at=4), wandering(most=99)], workers=2, on_worker_error="restart")
    collector = Collector(env, None, frames_per_batch=2, total_frames=-1)
    with pytest.warns(UserWarning, match=r"worker of .*env 0.*raised .*the door is stuck.*; restarted"):
        batch = collector.rollout(3)
    assert env.vec_env.restarts == [(1, 0), (0, 0)]  # the step before the reset was answered: nothing of it is lost
    assert batch["next", "observation"][0, :, 0].tolist() == [1, 2, 3] and batch["next", "done"][0].all()
    assert collector.rollout(1)["observation"][0, 0, 0] == 1  # a new env
    collector.shutdown()


def test_a_worker_that_was_killed_since_its_lanes_began_is_replaced_at_the_next_step():
    env = ParallelEnv(LANES, wandering(most=1), workers=2, on_worker_error="restart")
    collector = Collector(env, None, frames_per_batch=LANES, total_frames=-1)
    collector.rollout(2)
    worker = env.vec_env.group.workers[1]
    os.kill(worker.pid, signal.SIGKILL)
    assert worker.exit_code(5.0) == -signal.SIGKILL
    with pytest.warns(UserWarning, match=r"envs 2 to 3, .* was killed by SIGKILL; restarted"):
        batch = collector.rollout(2)
    assert env.vec_env.restarts == [(0, 0), (1, 2)]
    first = batch["observation"][2:, 0]
    assert first[:, 0].tolist() == [3, 3]  # they had begun
    assert torch.equal(batch["next", "observation"][2:, 0], first) and batch["next", "truncated"][2:, 0].all()
    assert batch["observation"][:, 1, 0].tolist() == [4, 4, 1, 1]
    collector.shutdown()
