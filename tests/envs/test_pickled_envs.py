"""An env that is pickled is the way to make its like: the other side's begins anew, with workers of its own."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import cloudpickle
import gymnasium as gym
import pytest
import torch
from face import Channel, Line, Worker, WorkerGroup, packed, serve, unpacked
from gym_worlds import Sampled

from rlcli.envs import GymEnv, ParallelEnv, SerialEnv, TransformedEnv
from rlcli.transforms import RewardSum
from tests.preloaded import OWNER, forked

CARTPOLE = partial(GymEnv, "CartPole-v1", categorical_action_encoding=True)
PENDULUM = partial(GymEnv, "Pendulum-v1", narrow=True, max_episode_steps=9)


class Slower(gym.Wrapper):
    """Of this module, which a worker need not know."""

    def step(self, action):
        observation, reward, *rest = self.env.step(action)
        return observation, reward / 2, *rest


MADE = {
    "GymEnv": lambda: PENDULUM(),
    "GymEnv with a wrapper": lambda: GymEnv("CartPole-v1", wrappers=[lambda env: Slower(env)]),
    "SerialEnv": lambda: SerialEnv(2, lambda: PENDULUM()),
    "SerialEnv with transforms": lambda: SerialEnv(2, lambda: TransformedEnv(CARTPOLE(), RewardSum())),
    "ParallelEnv": lambda: ParallelEnv(3, CARTPOLE),
    "ParallelEnv of lambdas": lambda: ParallelEnv(2, lambda: PENDULUM(), workers=1),
}


def rolled(env):
    env.set_seed(5)
    torch.manual_seed(0)
    return env.rollout(15, break_when_any_done=False)


def same(a, b) -> bool:
    keys = set(a.keys(True, True))
    return keys == set(b.keys(True, True)) and all(torch.equal(a[key], b[key]) for key in keys)


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("by", [pickle, cloudpickle])
def test_what_is_unpickled_is_a_fresh_env_of_the_same(kind, by):
    env = MADE[kind]()
    expected = rolled(env)
    again = pickle.loads(by.dumps(env))
    assert type(again) is type(env) and repr(again) == repr(env) and again is not env
    assert again.action_spec == env.action_spec and again.out_of_bounds == env.out_of_bounds
    assert same(rolled(again), expected)
    for each in (env, again):
        each.close()


def test_the_way_to_make_one_is_pickled_too():
    make = pickle.loads(cloudpickle.dumps(partial(ParallelEnv, 2, lambda: CARTPOLE(), workers=1)))
    env = make()
    assert same(rolled(env), rolled(SerialEnv(2, CARTPOLE)))
    env.close()


def test_how_envs_are_dealt_out_is_kept():
    env = ParallelEnv(3, CARTPOLE, workers=2, start_method="spawn")
    again = pickle.loads(pickle.dumps(env))
    assert again.vec_env.parts == env.vec_env.parts and again.start_method == "spawn" and again.vec_env.own is None
    assert not {worker.pid for worker in again.vec_env.group.workers} & {
        worker.pid for worker in env.vec_env.group.workers
    }
    env.close()
    again.close()


def test_an_env_that_was_changed_does_not_pass_for_its_recipe():
    env = CARTPOLE()
    env._step = lambda td: GymEnv._step(env, td)
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        pickle.dumps(env)


def test_a_new_python_that_has_not_run_this_program_can_use_it(tmp_path):
    gym.register("Registered-v8", entry_point=lambda **settings: Sampled(**settings), max_episode_steps=2)
    try:
        env = ParallelEnv(2, partial(GymEnv, "Registered-v8", length=50))
        (tmp_path / "env.pickle").write_bytes(pickle.dumps(env))
        env.close()
    finally:
        del gym.registry["Registered-v8"]
    program = (
        "import pickle, sys\nenv = pickle.load(open(sys.argv[1], 'rb'))\n"
        "print(env.rollout(6, break_when_any_done=False)['next', 'truncated'].sum().item())\nenv.close()"
    )
    told = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "env.pickle")], capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert told.stdout == "6\n"


# ---- in workers ------------------------------------------------------------------------------------------------------
def collecting(channel: Channel) -> None:
    """A worker, as a collector has them, that is sent an env: its pids, then what it gives."""
    kept = []

    def orders(kind: int, body: bytes):
        if kind == 1:
            kept.append(unpacked(body))
            return [worker.pid for worker in kept[0].vec_env.group.workers]
        if kind == 3:
            return kept.pop().close()
        found = rolled(kept[0])
        return {str(key): found[key].numpy() for key in found.keys(True, True)}

    serve(Line(channel), orders)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_worker_rebuilds_it_with_workers_of_its_own_that_end_with_it(method):
    env = ParallelEnv(3, CARTPOLE, workers=1, caller_steps=True)
    expected = rolled(env)
    ours = Worker("test_pickled_envs:collecting", start_method=method, preload=["tests.preloaded"])
    group = WorkerGroup(lambda: ours, 1)
    (inner,) = group.order(1, packed(env))
    assert len(inner) == 1 and runs(inner[0]) and inner != [worker.pid for worker in env.vec_env.group.workers]
    assert "/dev/shm" not in Path(f"/proc/{inner[0]}/maps").read_text()  # what has no name is not left behind
    (found,) = group.order(2)
    assert all((found[str(key)] == expected[key].numpy()).all() for key in expected.keys(True, True))
    if method == "spawn":  # that it is told to, or that it is killed, comes to the same
        group.order(3)
        group.close()
    else:
        group.workers[0].kill()
    assert ended(inner, 30)
    group.close()
    env.close()


OWNS = """
from functools import partial
from rlcli.envs import GymEnv, ParallelEnv

def make(): return ParallelEnv(4, partial(GymEnv, 'CartPole-v1'), workers=2, caller_steps=True)
def workers_of(env): return env.vec_env.group.workers
def work(env): env.rollout(1000, break_when_any_done=False)
"""


def test_nothing_is_left_of_a_program_that_was_killed(tmp_path):
    assert forked(OWNER.format(begin=OWNS), tmp_path, "killed") == (0, "", "")


def ended(pids: list[int], within: float) -> bool:
    deadline = time.monotonic() + within
    while any(map(runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(runs, pids))


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("env_id", ["ALE/Pong-v5", "Mine-v0"])
def test_a_recipe_is_received_without_a_warning_though_its_package_registers_the_id(tmp_path, env_id):
    """The parent has registered it; where it arrives, who registers it comes after."""
    if env_id.startswith("ALE"):
        pytest.importorskip("ale_py")
    (tmp_path / "mine.py").write_text("""
import gymnasium as gym
from gymnasium.envs.classic_control.cartpole import CartPoleEnv as Mine
gym.register("Mine-v0", entry_point="mine:Mine")
""")
    program = """
import pickle, sys
from rlcli.vec_envs.make import GymRecipe
recipe = GymRecipe(sys.argv[1])
if len(sys.argv) == 2:
    import mine
    recipe.make().close()
    sys.stdout.buffer.write(pickle.dumps(recipe))
else:
    pickle.load(sys.stdin.buffer).make().close()
"""
    write = [sys.executable, "-c", program, env_id]
    sent = subprocess.run(write, capture_output=True, check=True, cwd=tmp_path).stdout
    read = [sys.executable, "-W", "error::UserWarning", "-c", program, env_id, "read"]
    done = subprocess.run(read, input=sent, capture_output=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr.decode()
