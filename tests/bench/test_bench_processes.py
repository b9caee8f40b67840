"""The bench of processes compares ways that collect the same frames; times are not asserted."""

from functools import partial

import pytest

from rlcli.bench import workers
from rlcli.bench.bare_envs import bare
from rlcli.envs import GymEnv
from rlcli.errors import NumericsError
from rlcli.vec_envs.make import GymRecipe
from tests.bench import processes
from tests.bench.bare_processes import Independent, busy
from tests.bench.settings import BENCHES

QUICK = ["seconds=0.001", "rounds=7", "env.num=2"]
OURS = {processes.SERIAL, processes.calling(1), processes.apart(1), processes.apart(2)}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(workers, "cores", lambda: 2)
    monkeypatch.setattr(processes, "STEPS", 8)


def labelled(label, names):
    return {f"{label}: {name}" for name in names}


def test_every_way_is_compared_with_others_and_with_bare_envs():
    pytest.importorskip("torchrl")
    pytest.importorskip("stable_baselines3")
    result = BENCHES.measure("processes", [*QUICK, "costs=[0,100]", "pong="]).as_dict()
    in_workers = {*OURS, processes.collecting(2), "2 bare processes"}
    assert {side["name"] for side in result["sides"]} == (
        labelled("CartPole", {*OURS, *processes.BARS})
        | labelled("0 us", in_workers)
        | labelled("100 us", in_workers)
        | labelled("CartPole, 2x64 net", {processes.COLLECTOR, processes.collecting(2), processes.MULTI_SYNC})
    )
    barred = {ratio["over"]: (ratio["under"], ratio["bar"]) for ratio in result["ratios"] if ratio["bar"]}
    assert barred == {
        "CartPole: gymnasium async": ("rlcli caller + 1 worker", ">= 10"),
        "CartPole: SB3 subproc": ("rlcli caller + 1 worker", ">= 10"),
        "CartPole: torchrl parallel": ("rlcli caller + 1 worker", ">= 40"),
        "100 us: 2 bare processes": ("rlcli caller + 1 worker", ">= 0.9"),
        "CartPole, 2x64 net: torchrl 2 collectors": ("rlcli 2 collectors", ">= 15"),
    }
    assert len(result["checks"]) == 4 and {*result["checks"].values()} == {"equal"}


def test_ways_that_collect_something_else_are_not_timed(monkeypatch):
    recipe = GymRecipe("CartPole-v1", max_episode_steps=3)
    other = partial(GymEnv, recipe, categorical_action_encoding=True, narrow=True)
    monkeypatch.setattr(processes, "ParallelEnv", lambda num, make, **options: PARALLEL(num, other, **options))
    with pytest.raises(NumericsError, match="rlcli 1 worker collects other frames than rlcli serial"):
        BENCHES.measure("processes", [*QUICK, "costs=[0]", "pong=", "peers=false"])


PARALLEL = processes.ParallelEnv


def test_bare_envs_take_as_many_steps_here_and_in_processes_of_their_own():
    taken = []

    def counting():
        env = GymRecipe("CartPole-v1").make()
        inner = env.unwrapped.step
        env.unwrapped.step = lambda action: taken.append(action) or inner(action)
        return env

    bare(counting, 3)(40)
    assert len(taken) == 120 and {*taken} == {0, 1}
    for recipe in (GymRecipe("Pendulum-v1"), busy(0)):
        apart = Independent(recipe, [2, 1])
        try:
            apart.step(250)
        finally:
            apart.close()


def test_an_env_of_a_cost_counts_in_proportion():
    cheap, dear = (busy(cost).settings["loops"] for cost in (5, 500))
    assert 0 < cheap < dear
    env = busy(0).make()
    env.reset(seed=0)
    ends = [env.step(0)[2:4] for _ in range(200)]
    assert ends == [(False, False)] * 199 + [(False, True)]
