"""The bench of a GPU walks its whole way on a CPU: sides run, agree, and a part that fails does not stop the others."""

import json
from functools import partial

import gymnasium as gym
import pytest
import torch
from face import refused

from rlcli.errors import ConfigError, NumericsError
from tests.bench import gpu, gpu_env, gpu_machine, gpu_off_policy, gpu_sides
from tests.bench.settings import BENCHES
from tests.graphs.standin import StandIn, act_elsewhere

SMALL = ["device=cpu", "peers=False", "strict=True"]


@pytest.fixture(autouse=True)
def there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Graphs of ours and of the hand-written sides are recorded by the stand-in, and the host asks for nothing."""
    monkeypatch.setattr(gpu_sides, "recorder", lambda device: StandIn.record)
    return act_elsewhere(monkeypatch)


def measured(*words):
    return BENCHES.measure("gpu", [*SMALL, *words]).as_dict()


def sides(result, part):
    return {
        side["name"].rpartition(": ")[2]
        for side in result["sides"]
        if side["name"].startswith((f"{part}, ", f"{part}: "))
    }


def test_acting_and_updates_as_on_a_gpu_give_the_same_numbers_on_all_sides(as_on_a_gpu):
    result = measured("parts=act,update")
    assert not result["refused"]
    ours = {gpu.AUTO, gpu.OFF}
    assert sides(result, "act") == {*ours, gpu.EAGER, gpu.GRAPH, gpu.RANDOM}
    assert sides(result, "update") == {*ours, gpu.EAGER, gpu.GRAPH}
    assert len(result["checks"]) == 2 * (1 + 4) + 2 * 3 + 2 * 3  # of SAC and DQN, too
    assert len(as_on_a_gpu) >= 2 * 2 + 2  # two nets, acting and updates; SAC, DQN
    barred = {figure["name"]: figure["bar"] for figure in result["figures"] if figure["bar"]}
    assert barred == {
        "act, MLP 64 x 2: acting, rlcli": "<= 90",
        f"act, Nature CNN: acting, {gpu.GRAPH} / {gpu.AUTO}": ">= 1",
        f"act, Nature CNN: acting, {gpu.EAGER} / {gpu.AUTO}": ">= 4",
    }
    assert {ratio["bar"] for ratio in result["ratios"]} == {"", ">= 2.5", ">= 1.0", ">= 8"}


def test_launches_and_waits_are_counted_by_step_and_minibatch(as_on_a_gpu):
    figures = {f["name"]: f["value"] for f in measured("parts=trace")["figures"]}
    for net in ("MLP 64 x 2", "Nature CNN"):
        for mode in (gpu.AUTO, gpu.OFF):
            assert figures[f"trace, {net}, {mode}: a minibatch: launches"] > 20
        assert figures[f"trace, {net}, {gpu.AUTO}: a step: waits"] <= 1
        assert figures[f"trace, {net}, {gpu.AUTO}: a minibatch: waits"] == 0


def test_every_other_part_has_its_sides_and_a_file_of_its_own(tmp_path, capsys):
    parts = ("values", "rnn", "workers", "replay", "env")
    result = measured(f"parts={','.join(parts)}")
    assert sides(result, "values") >= {gpu.AUTO, "rlcli, in a graph"}
    assert sides(result, "rnn") == {gpu.AUTO, "rlcli, in a graph", "rlcli, pad", "torch.nn, no resets"}
    assert len(sides(result, "replay")) == 5
    assert sides(result, "workers") > {gpu.AUTO, gpu_machine.GIVEN, "100 us between orders"}
    assert sides(result, "env") == {gpu.AUTO, gpu_env.ARRAYS, gpu_env.LOOP}
    assert not result["refused"]
    for part in parts:
        assert json.loads((tmp_path / f"runs/bench/gpu/{part}.json").read_text())["bench"] == f"gpu, {part}"
    assert "missed" in capsys.readouterr().out
    counted = [bar for bar in result["figures"] + result["ratios"] if bar["bar"]]
    assert any(note.startswith(tuple("0123456789")) and "bars met" in note for note in result["notes"]) and counted


def test_a_run_of_its_own_says_when_it_stepped_and_what_it_took_beside_its_plan():
    figures = {f["name"]: f for f in measured("parts=start")["figures"]}
    barred = {name.partition(": ")[2] or name: f["bar"] for name, f in figures.items() if f["bar"]}
    assert {*barred.values()} == {"<= 6", "<= 5", "<= 0"}
    assert 0 < figures["start, ppo_exact: from the command to the first frame"]["value"] < 60
    (resumed,) = (f["value"] for name, f in figures.items() if "differ in a bit" in name)
    assert resumed == 0


@pytest.mark.parametrize(("algo", "env"), [("SAC", "Pendulum-v1"), ("DQN", "CartPole-v1")])
def test_loops_by_hand_learn_the_same_with_a_graph_and_without(algo, env, as_on_a_gpu):
    found = []
    for in_graph in (False, True):
        torch.manual_seed(0)
        rows = gpu_off_policy.Replay(200, 3 if algo == "SAC" else 4, 1, torch.device("cpu"))
        learner = gpu.off_policy_learner(algo, torch.device("cpu"), rows, in_graph, 8)
        make = [partial(gym.make, env)] * 2
        envs = gym.vector.SyncVectorEnv(make, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
        options = {"frames": 260, "random_frames": 40, "every": 4, "updates": 1}
        assert gpu_off_policy.train_off_policy(learner, envs, in_graph, **options) > 0
        envs.close()
        found.append(torch.cat([p.detach().flatten() for p in learner.parameters]))
        assert rows.filled == 200 and rows.rows[: rows.filled].isfinite().all() and rows.rows[:, -2].any()
    assert found[0].isfinite().all() and float((found[0] - found[1]).abs().max()) < 1e-4


def test_runs_and_episodes_are_timed_beside_a_loop_by_hand(monkeypatch):
    monkeypatch.setitem(gpu.RECIPES, "ppo_exact", gpu.RECIPES["ppo_exact"]._replace(tiny=512))
    result = measured("parts=train,eval")
    assert not result["refused"]
    assert sides(result, "train") == {gpu.AUTO, gpu.OFF, gpu.EAGER, gpu.GRAPH}
    assert sides(result, "eval") == {gpu.AUTO}


def test_a_side_that_fails_is_told_and_others_go_on(monkeypatch):
    def out_of_memory(*given):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpu_sides, "PPO", out_of_memory)
    monkeypatch.setitem(gpu.PARTS, "replay", ("sample", out_of_memory))
    result = measured("parts=replay,update", "strict=False")
    assert sides(result, "update, Nature CNN") == {gpu.AUTO, gpu.OFF} < sides(result, "update")
    told = {name for name, why in result["refused"].items() if "out of memory" in why}
    assert f"update, Nature CNN: {gpu.GRAPH}" in told and "replay, all: the rest" in told


def test_a_side_that_does_something_else_is_an_error(monkeypatch):
    monkeypatch.setattr(gpu_sides.PPO, "__call__", lambda self, columns, epochs: None)
    with refused(NumericsError, "same"):
        measured("parts=update")


def test_time_that_is_gone_is_told(monkeypatch):
    monkeypatch.setattr(gpu.Part, "left", property(lambda self: 0.0))
    left_out = measured("parts=update")["refused"]
    assert left_out and {*left_out.values()} == {gpu.NO_TIME}


def test_parts_and_recipes_that_are_none_are_sentences():
    with refused(ConfigError, "updaet update"):
        measured("parts=updaet")
    with refused(ConfigError, "recipe"):
        measured("parts=train", "recipes=ppo_pnog")
