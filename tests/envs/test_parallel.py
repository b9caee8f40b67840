"""`ParallelEnv` gives what `SerialEnv` gives, to the bit; its workers are light, and their end is noticed."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from face import GymRecipe, refused
from gym_worlds import Breaking, LateStart, Locked, Remembering, Sampled, Slow
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from test_step_contract import STEP_FAULTS, with_part

from rlcli.collectors import Collector
from rlcli.envs import EnvBase, GymEnv, ParallelEnv, SerialEnv, TransformedEnv
from rlcli.errors import ArgumentError, ConfigError, EnvError
from rlcli.modules import GRUModule
from rlcli.specs import Categorical, Composite, Unbounded
from rlcli.transforms import Compose, RewardScaling, RewardSum, RunningNorm, StepCounter
from rlcli.vec_envs.gym_vec_env import GymVecEnv
from rlcli.vec_envs.parallel_vec_env import ParallelVecEnv
from rlcli.vec_envs.vec_env import reward_column
from rlcli.vec_envs.workers import shared_out

CARTPOLE, PENDULUM = partial(GymEnv, "CartPole-v1"), partial(GymEnv, "Pendulum-v1", narrow=True, max_episode_steps=9)
LINUX = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="reads /proc")


def sampled(**kwargs):
    def make() -> GymEnv:
        env = Sampled(**kwargs)
        env.observation_space = copy.deepcopy(env.observation_space)  # else lanes of one process draw from one stream
        return GymEnv(env)

    return make


WORLDS = {
    "CartPole": CARTPOLE,
    "CartPole, indices": partial(GymEnv, "CartPole-v1", categorical_action_encoding=True),
    "Pendulum": PENDULUM,
    "skipped frames": partial(GymEnv, "CartPole-v1", frame_skip=3, wrappers=[gym.wrappers.FlattenObservation]),
    "nested": sampled(observation="nested", action="several", length=3, end="both"),
    "image, from five": sampled(observation="image", action="from_five", end="truncated"),
    "index": sampled(observation="index", action="switches"),
    "unbounded": sampled(observation="doubles", action="unbounded", length=5),
}


def equal(a, b) -> bool:
    keys = set(a.keys(True, True))
    assert keys == set(b.keys(True, True))
    return all(a[key].dtype == b[key].dtype and torch.equal(a[key], b[key]) for key in keys)


class Walk(EnvBase):
    """An own env of TensorDicts, with a state that its `_reset` gives and a key that only steps write."""

    def __init__(self):
        super().__init__()
        self.observation_spec = Composite(place=Unbounded((2,)), shape=())
        self.action_spec = Categorical(3)
        self.rng = np.random.default_rng(0)

    def _set_seed(self, seed):
        self.rng = np.random.default_rng(seed)

    def _reset(self, td):
        self.t, self.place = 0, torch.from_numpy(self.rng.normal(size=2).astype(np.float32))
        return TensorDict(place=self.place)

    def _step(self, td):
        self.t, self.place = self.t + 1, self.place + td["action"] - 1
        over = torch.tensor([self.t == 4])
        return TensorDict(place=self.place, reward=self.place.sum(-1, True), terminated=over, extra=torch.ones(3))


def recurrent():
    return GRUModule(4, 3, in_keys=["observation", "h"], out_keys=["features", ("next", "h")])


CHILDREN = {
    "transforms": lambda: TransformedEnv(CARTPOLE(), Compose(StepCounter(7), RewardSum())),
    "an env's statistics": lambda: TransformedEnv(PENDULUM(), RunningNorm(["observation"])),
    "an env of one's own": Walk,
    "an env with a policy's state": partial(GymEnv, "CartPole-v1", policy=recurrent()),
    "an object": TransformedEnv(CARTPOLE(), StepCounter()),
    "several": [CARTPOLE, lambda: TransformedEnv(CARTPOLE(), RewardScaling(0.0, 2.0)), CARTPOLE],
}


@pytest.mark.parametrize("child", CHILDREN)
@pytest.mark.every(2)
def test_whatever_serial_env_steps_is_stepped_in_workers(child):
    """Rollouts, seeds, batches of a collector, and what a checkpoint holds."""
    made = CHILDREN[child]
    serial = (lambda: pickle.loads(pickle.dumps(made))) if isinstance(made, EnvBase) else made
    envs = [SerialEnv(3, serial), ParallelEnv(3, made, workers=2)]
    assert equal(*(rolled(env, 11) for env in envs))
    if child != "an env's statistics":  # which learn once a batch where a collector sees them
        batches, states = zip(*(collected(env, [6, 5]) for env in envs), strict=True)
        assert all(equal(a, b) for a, b in zip(*batches, strict=True)) and repr(states[0]) == repr(states[1])
    envs[1].close()
    refused(ArgumentError, "closed", lambda: envs[1].reset())


def test_statistics_inside_workers_are_in_a_checkpoint():
    env = ParallelEnv(2, CHILDREN["an env's statistics"], workers=2)
    state = collected(env, [6])[1]
    collector = Collector(env, None, frames_per_batch=8)
    for _ in range(2):  # each time with a reset
        collector.load_state_dict(state)
        state = collector.state_dict()
    counts = [x["_extra_state"]["observation/count"] for x in state["engine"]["lanes"]["transforms"].values()]
    assert counts == [1 + 6 + 2] * 2
    env.close()


def test_an_env_of_tensordicts_in_a_worker_that_ends_or_raises_is_named():
    env = ParallelEnv(3, Walk, workers=2, step_timeout=60.0)
    td = env.reset()
    refused(RuntimeError, "tensor", lambda: env.step(td.clone().set("action", torch.zeros(3, 5, dtype=torch.long))))
    td = env.step(td.set("action", torch.zeros(3, dtype=torch.long)))  # which goes on
    os.kill(env.inner.group.workers[1].pid, signal.SIGKILL)
    with pytest.raises(EnvError, match=r"was killed by SIGKILL \(ParallelEnv, envs 1 to 2\)"):
        env.rollout(3)
    refused(ArgumentError, "on_worker_error='restart' GymEnvs", lambda: ParallelEnv(2, Walk, on_worker_error="restart"))


def rolled(env, steps: int):
    env.set_seed(5)
    torch.manual_seed(0)
    return env.rollout(steps, break_when_any_done=False)


def collected(env, lengths, **options):
    """Batches of these lengths, and what a checkpoint would hold."""
    collector = Collector(env, None, frames_per_batch=env.batch_size[0] * 4, total_frames=-1, **options)
    collector.set_seed(3)
    batches = [collector.rollout(length) for length in lengths]
    return batches, collector.state_dict()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.every(2)
def test_rollouts_are_those_of_one_process(world):
    env = ParallelEnv(3, WORLDS[world], workers=2)
    assert equal(rolled(env, 25), rolled(SerialEnv(3, WORLDS[world]), 25))
    env.close()


@pytest.mark.parametrize("world", ["CartPole", "Pendulum", "nested"])
@settings(max_examples=4)
@given(data=st.data())
def test_batches_and_checkpoints_are_those_of_one_process(world, data):
    lanes = data.draw(st.integers(1, 5), "lanes")
    workers = data.draw(st.integers(1, lanes), "workers")
    lengths = data.draw(st.lists(st.integers(1, 17), min_size=1, max_size=4), "lengths")
    cut = data.draw(st.sampled_from([None, 4]), "max_frames_per_traj")
    here = collected(SerialEnv(lanes, WORLDS[world]), lengths, max_frames_per_traj=cut)
    env = ParallelEnv(lanes, WORLDS[world], workers=workers)
    there = collected(env, lengths, max_frames_per_traj=cut)
    env.close()
    assert all(equal(a, b) for a, b in zip(here[0], there[0], strict=True))
    mine, theirs = here[1]["engine"] if "engine" in here[1] else here[1], there[1].get("engine", there[1])
    assert repr(mine) == repr(theirs)


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_however_workers_are_made_they_give_the_same(method):
    env = ParallelEnv(3, PENDULUM, workers=2, start_method=method)
    assert equal(rolled(env, 12), rolled(SerialEnv(3, PENDULUM), 12)) and method in repr(env)
    assert ("torch" in env.vec_env.heavy) == (method == "fork") == ("torch" in repr(env))
    env.close()


def parallel_lanes(**options) -> ParallelVecEnv:
    return ParallelEnv(5, CARTPOLE, workers=2, **options).vec_env


def serial_lanes() -> GymVecEnv:
    return GymVecEnv([gym.make("CartPole-v1") for _ in range(5)])


def stepped(lanes, steps: int, first: int = 0):
    """Rows and outcome of a few steps, with what `reset` writes."""
    ((shape, dtype),) = lanes.schema.values()
    rows = {"observation": [np.zeros((lanes.n, *shape), dtype) for _ in range(steps + 1)]}
    step, reset = lanes.bind(rows)
    if lanes.episodes[0] < 0:
        lanes.restart({key: column[0] for key, column in rows.items()}, range(lanes.n))
    for t in range(steps):
        if done := step(t, (np.arange(lanes.n) + first + t) % 2):
            reset(t, done)
    outcome = lanes.take_outcome()
    rewards = np.zeros((lanes.n, steps), np.float32)
    reward_column(outcome, lanes, steps, rewards)
    return rows, rewards, outcome.ends


def test_a_checkpoint_of_one_process_goes_on_in_workers_and_back():
    here, there = serial_lanes(), parallel_lanes()
    for lanes in (here, there):
        lanes.seed(4, every_episode=True)
        lanes.history_limit = 1000
        assert lanes.is_replayable()
        stepped(lanes, 37)
    states = here.state_dict(), there.state_dict()
    assert states[0]["history"].dtype == states[1]["history"].dtype
    assert repr(states[0]) == repr(states[1])
    others = serial_lanes(), parallel_lanes()
    for lanes, state in zip(others, reversed(states), strict=True):  # crosswise
        lanes.seed(4, every_episode=True)
        lanes.history_limit = 1000
        assert lanes.load_state_dict(state, replay=True) == []
    after = [stepped(lanes, 60, 37) for lanes in (here, there, *others)]
    for rows, rewards, ends in after[1:]:
        np.testing.assert_array_equal(rewards, after[0][1])
        assert ends == after[0][2]
        np.testing.assert_array_equal(np.stack(rows["observation"])[1:], np.stack(after[0][0]["observation"])[1:])
    assert others[1].seeds == here.seeds and others[1].episodes == here.episodes
    assert parallel_lanes().load_state_dict(states[0], replay=False) == [0, 1, 2, 3, 4]


# ---- errors --------------------------------------------------------------------------------------------------------
def raised(env) -> str:
    collector = Collector(env, None, frames_per_batch=9, total_frames=-1)
    collector.set_seed(2)
    with pytest.raises(EnvError) as caught:
        for _ in range(4):
            collector.rollout(3)
    return str(caught.value)


@pytest.mark.parametrize(
    ("fault", "at"),
    [
        pytest.param(fault, at, marks=[] if at == (1, 5)[n % 2] else pytest.mark.slow)  # each fault once, by turns
        for n, fault in enumerate(STEP_FAULTS)
        for at in (1, 5)
    ],
)
@pytest.mark.every(2)
def test_a_broken_step_is_refused_with_the_sentence_of_one_process(fault, at):
    makers = [lambda: GymEnv(Breaking(lambda result: result, 0))] * 2
    makers.append(lambda: GymEnv(Breaking(STEP_FAULTS[fault][0], at)))
    env = ParallelEnv(3, makers, workers=2)
    expected = raised(SerialEnv(3, makers))
    assert raised(env) == expected and "env 2" in expected
    env.close()


@pytest.mark.parametrize("fault", ["reward None", "terminated int", "short"])
def test_the_tensordict_face_refuses_it_too(fault):
    makers = [lambda: GymEnv(Breaking(STEP_FAULTS[fault][0], 3))] * 2
    texts = []
    for env in (SerialEnv(2, makers), ParallelEnv(2, makers)):
        env.set_seed(0)
        torch.manual_seed(0)
        with pytest.raises(EnvError) as caught:
            env.rollout(5)
        texts.append(str(caught.value))
        env.close()
    assert texts[0] == texts[1]


@pytest.mark.parametrize("caller_steps", [False, True])
def test_numbers_that_shared_memory_cannot_hold_arrive_as_they_are(caller_steps):
    given = (1 << 60) + 1, np.int8(3), 1 << 70
    makers = [lambda each=each: GymEnv(Breaking(with_part(1, each), 2)) for each in given]
    lanes = ParallelEnv(3, makers, workers=2 - caller_steps, caller_steps=caller_steps).vec_env
    rows = {"observation": [np.zeros((3, 3), np.float32)] * 2}
    lanes.restart({"observation": rows["observation"][0]}, [0, 1, 2])
    step, _ = lanes.bind(rows)
    step(0, np.zeros(3, np.int64))
    step(0, np.zeros(3, np.int64))
    assert lanes.outcome.rewards == [1.0, 1.0, 1.0, (1 << 60) + 1, 3.0, 1 << 70]
    lanes.close()


@pytest.mark.parametrize("caller_steps", [False, True])
def test_actions_of_another_dtype_reach_the_env_as_they_do_in_one_process(caller_steps):
    found = []
    for make in (SerialEnv, partial(ParallelEnv, workers=1, caller_steps=caller_steps)):
        env = make(2, lambda: GymEnv(Remembering()))
        td = env.reset()
        td["action"] = torch.tensor([[0.1, 0.2], [0.3, 0.4]], dtype=torch.float64)
        found.append(env.step(td)["next"])
        env.close()
    assert equal(*found) and not torch.equal(found[0]["reward"], found[0]["observation"])


@pytest.mark.parametrize("kind", [ParallelEnv, SerialEnv])
def test_an_argument_of_an_env_may_have_any_name(kind):
    refused(ConfigError, "kwargs", lambda: kind(2, partial(GymEnv, "CartPole-v1", kwargs={"a": 1})))


def test_an_env_that_cannot_be_made_is_refused_as_in_one_process():
    makers = partial(GymEnv, "CartPole-v1", colour="red")
    texts = []
    for kind in (SerialEnv, ParallelEnv):
        with pytest.raises(ConfigError) as caught:
            kind(2, makers)
        texts.append(str(caught.value))
    assert texts[0] == texts[1] and "colour" in texts[0]


@pytest.mark.parametrize("workers", [1, 2])
def test_envs_that_differ_are_refused(workers):
    with pytest.raises(EnvError, match=r"differ in their spaces \(CartPole-v1, env 1"):
        ParallelEnv(2, ["CartPole-v1", "MountainCar-v0"], workers=workers)
    refused(ArgumentError, "alike", lambda: ParallelEnv(2, [CARTPOLE, WORLDS["CartPole, indices"]]))


def test_what_workers_cannot_step_is_refused():
    refused(ArgumentError, "ParallelEnv SerialEnv", lambda: ParallelEnv(2, lambda: SerialEnv(2, CARTPOLE)))
    with refused(ArgumentError, "sent worker"):
        env = Sampled()
        env.open = (each for each in ())
        ParallelEnv(1, lambda: GymEnv(env))
    refused(EnvError, "Locked TypeError", lambda: ParallelEnv(1, GymEnv(GymRecipe(Locked, name="Locked"))))
    refused(ArgumentError, "maker per", lambda: ParallelEnv(2, [CARTPOLE]))
    refused(ArgumentError, "workers", lambda: ParallelEnv(2, CARTPOLE, workers=3))


def test_an_unknown_mode_is_refused_as_in_one_process():
    for kind in (SerialEnv, ParallelEnv):
        with pytest.raises(ArgumentError, match=r"unknown out_of_bounds 'nope'\. Choose one of refuse, count, ignore"):
            kind(2, partial(GymEnv, "CartPole-v1", out_of_bounds="nope"))


def test_an_id_that_this_program_registered_is_known_to_workers():
    gym.register("Registered-v7", entry_point=lambda **settings: Sampled(**settings), max_episode_steps=2)
    try:
        env = ParallelEnv(2, partial(GymEnv, "Registered-v7", length=50))
        assert rolled(env, 6)["next", "truncated"].sum() == 6
        env.close()
    finally:
        del gym.registry["Registered-v7"]


def test_what_a_maker_makes_here_to_be_looked_at_is_closed_again():
    closed = []

    class Noted(gym.Wrapper):
        def close(self):
            closed.append(self)

    def make() -> GymEnv:
        return GymEnv(GymRecipe(lambda: Noted(gym.make("CartPole-v1")), name="noted"))

    ParallelEnv(2, make, workers=1).close()
    assert len(closed) == 2


def test_an_interrupted_reset_leaves_the_books_alike():
    """Of two workers, one was told to reset and the other not: the next reset gives both the parent's episode."""
    here, there = serial_lanes(), parallel_lanes()
    for lanes in (here, there):
        lanes.seed(4, every_episode=True)
        stepped(lanes, 3)
        lanes.begin_episodes(range(5))
        lanes.clock[0] += 1
    found = []
    for lanes in (here, there):
        row = np.zeros((5, 4), np.float32)
        lanes.restart({"observation": row}, range(5))
        found.append((row, stepped(lanes, 30)[2]))
    there.close()
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("workers", [None, 1, 2, 3])
def test_after_a_reset_that_raised_the_next_gives_the_episodes_of_one_process(workers):
    shown = []
    for make in (SerialEnv, ParallelEnv):
        options = {"workers": workers} if make is ParallelEnv else {}
        env = make(3, [lambda fails=fails: GymEnv(LateStart(fails)) for fails in (False, True, False)], **options)
        env.set_seed(7)
        with pytest.raises(EnvError, match=r"env 1, .*not up yet"):
            env.reset()
        shown.append([env.reset()["observation"] for _ in range(3)])
        env.close()
    assert all(map(torch.equal, *shown))


def test_transforms_lie_outside():
    made = [TransformedEnv(kind(3, PENDULUM), RunningNorm(["observation"])) for kind in (SerialEnv, ParallelEnv)]
    batches = [collected(env, [6, 5])[0] for env in made]
    made[1].close()
    assert all(equal(a, b) for a, b in zip(*batches, strict=True))


# ---- processes -----------------------------------------------------------------------------------------------------
def test_workers_import_nothing_heavy_and_do_not_run_main(tmp_path):
    program = (
        "import gymnasium as gym\n"
        "from rlcli.envs import GymEnv, ParallelEnv\n"
        "class Mine(gym.Wrapper):\n    def step(self, action):\n        return self.env.step(0)\n"
        "print('main runs')\n"
        "if __name__ == '__main__':\n"
        "    for method in ('forkserver', 'spawn'):\n"
        "        env = ParallelEnv(2, lambda: GymEnv('CartPole-v1', wrappers=[Mine]), workers=1, start_method=method)\n"
        "        print(env.vec_env.heavy, env.rollout(3)['next', 'done'].shape[0])\n"
    )
    (tmp_path / "mine.py").write_text(program)
    told = subprocess.run([sys.executable, str(tmp_path / "mine.py")], capture_output=True, text=True, check=True)
    assert told.stdout == "main runs\n[] 2\n[] 2\n" and not told.stderr


def test_spaces_and_errors_of_classes_of_main_come_back_as_they_are(tmp_path):
    program = (
        "import gymnasium as gym\n"
        "from rlcli.envs import GymEnv, ParallelEnv\n"
        "class Mine(gym.spaces.Box):\n    pass\n"
        "class Broken(Exception):\n    pass\n"
        "class World(gym.Env):\n"
        "    observation_space, action_space = Mine(-1, 1, (2,)), gym.spaces.Discrete(2)\n"
        "    def reset(self, *, seed=None, options=None):\n        return self.observation_space.low, {}\n"
        "    def step(self, action):\n        raise Broken('so it is')\n"
        "if __name__ == '__main__':\n"
        "    for method in ('forkserver', 'spawn'):\n"
        "        env = ParallelEnv(2, lambda: GymEnv(World()), workers=2, start_method=method)\n"
        "        print(type(env.vec_env.spaces[0]) is Mine, env.reset()['observation'].shape[0])\n"
        "        try:\n            env.rollout(3)\n"
        "        except Exception as error:\n            print('Broken: so it is' in str(error))\n"
    )
    (tmp_path / "mine.py").write_text(program)
    told = subprocess.run([sys.executable, str(tmp_path / "mine.py")], capture_output=True, text=True, check=True)
    assert told.stdout == "True 2\nTrue\n" * 2 and not told.stderr


def private(pid: int | str) -> float:
    """Megabytes that a process shares with no other."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(map(int, re.findall(r"^Private_\w+:\s+(\d+)", text, re.MULTILINE))) / 1024


@LINUX
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_worker_is_light(cold_workers, method):
    if method == "forkserver":
        limit = 10.0
    else:
        program = "import gymnasium, sys\nprint(flush=True)\nsys.stdin.readline()"
        alone = [
            subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for _ in range(2)
        ]
        for each in alone:
            each.stdout.readline()
        limit = private(alone[0].pid) + 3.0
        for each in alone:
            each.communicate(b"\n")
    env = ParallelEnv(2, "CartPole-v1", start_method=method)
    rolled(env, 200)
    for worker in env.vec_env.group.workers:
        assert private(worker.pid) <= limit
    env.close()


def test_a_worker_that_is_killed_in_a_step_is_named():
    env = ParallelEnv(4, lambda: GymEnv(Slow(0.3)), workers=2)
    env.reset()
    victim = env.vec_env.group.workers[1].pid
    killed = []

    def kill(*_) -> None:
        killed.append(time.monotonic())
        os.kill(victim, signal.SIGKILL)

    before = signal.signal(signal.SIGALRM, kill)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(EnvError, match=r"a worker process was killed by SIGKILL \(Slow, envs 2 to 3, step 1 of"):
            env.rollout(20, break_when_any_done=False)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - killed[0] < 30
    with pytest.raises(EnvError, match="envs 2 to 3"):
        env.reset()
    env.close()


@pytest.mark.slow
def test_kills_at_25_random_times_are_each_noticed():
    rng = np.random.default_rng(0)
    for _ in range(25):
        env = ParallelEnv(4, CARTPOLE, workers=2)
        victim, wait = env.vec_env.group.workers[int(rng.integers(2))].pid, float(rng.uniform(0.001, 0.3))
        before = signal.signal(signal.SIGALRM, lambda *_, victim=victim: os.kill(victim, signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, wait)
        began = time.monotonic()
        try:
            with pytest.raises(EnvError, match="SIGKILL"):
                while True:
                    env.rollout(1000, break_when_any_done=False)
        finally:
            signal.signal(signal.SIGALRM, before)
        assert time.monotonic() - began < 2 + wait
        env.close()


def swift() -> GymEnv:
    return GymEnv(Slow(0.0))


def test_a_worker_that_hangs_is_named_and_ended():
    env = ParallelEnv(3, [swift, swift, lambda: GymEnv(Slow(60))], workers=3)
    env.vec_env.step_timeout = 1.0
    collector = Collector(env, None, frames_per_batch=3, total_frames=-1)
    began = time.monotonic()
    place = r"no answer for 1 s \(Slow, env 2, step 1 of the run\): step has not returned in its worker"
    with pytest.raises(EnvError, match=place):
        collector.rollout(1)
    assert time.monotonic() - began < 30
    refused(EnvError, "answering", lambda: collector.rollout(1))
    env.close()
    assert env.vec_env.group.workers[2].exit_code() == -signal.SIGKILL


def test_an_interrupted_rollout_can_be_followed_by_another():
    env = ParallelEnv(2, lambda: GymEnv(Slow(0.2)))
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            env.rollout(50)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert env.rollout(2).shape == (2, 2)
    env.close()


def test_nobody_needs_to_close_it():
    env = ParallelEnv(2, CARTPOLE, workers=2)
    workers = env.vec_env.group.workers
    del env
    gc.collect()
    assert [worker.exit_code(2.0) for worker in workers] == [0, 0]


@pytest.mark.parametrize("workers", [0, 3, 1.5, True, "two"])
def test_so_many_workers_as_envs_cannot_have_are_refused(workers):
    refused(ArgumentError, f"{workers!r}", lambda: ParallelEnv(2, CARTPOLE, workers=workers))


def test_whole_floats_are_numbers_of_workers():
    assert shared_out(6, workers=2.0, caller_steps=False) == shared_out(6, workers=2, caller_steps=False)
    assert shared_out(6, per_worker=3.0) == shared_out(6, per_worker=3)


@pytest.mark.parametrize("policy", ["raise", "restart"])
@pytest.mark.parametrize("caller_steps", [None, True])
def test_an_env_that_is_closed_says_so(policy, caller_steps):
    env = ParallelEnv(2, CARTPOLE, workers=1, on_worker_error="raise" if caller_steps else policy,
                      caller_steps=caller_steps)  # fmt: skip
    td = env.rand_step(env.reset())
    env.close()
    env.close()
    collect = lambda: Collector(env, None, frames_per_batch=4).next()  # noqa: E731
    for act in (env.reset, lambda: env.set_seed(1), lambda: env.rand_step(td), env.vec_env.state_dict, collect):
        with refused(ArgumentError, "CartPole-v1"):
            act()


@pytest.mark.parametrize("policy", ["raise", "restart"])
def test_a_fork_of_this_process_is_refused_its_workers(policy):
    env, here = ParallelEnv(2, CARTPOLE, workers=2, on_worker_error=policy), SerialEnv(2, CARTPOLE)
    env.set_seed(5)
    env.reset()
    mine, theirs = os.pipe()
    if (child := os.fork()) == 0:
        try:
            signal.alarm(30)
            for act in (env.reset, lambda: env.set_seed(1), env.vec_env.state_dict):
                with pytest.raises(ArgumentError, match="a forked process cannot use the workers of its parent"):
                    act()
            env.close()
            gc.collect()
            os.write(theirs, b"refused")
        finally:
            os._exit(0)
    os.close(theirs)
    assert os.waitpid(child, 0)[1] == 0 and os.read(mine, 9) == b"refused"
    os.close(mine)
    assert equal(rolled(env, 9), rolled(here, 9))
    env.close()
