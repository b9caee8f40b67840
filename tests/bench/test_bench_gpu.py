"""The bench of a GPU walks its whole way on a CPU: sides run, agree, and a part that fails does not stop the others."""

import dataclasses
import json

import pytest
import torch
from face import refused

from rlcli.collectors import collector
from rlcli.errors import ConfigError, NumericsError
from rlcli.graphs import graph, host
from tests.bench import gpu, gpu_sides
from tests.bench.settings import BENCHES
from tests.graphs.standin import StandIn

SMALL = ["device=cpu", "peers=False", "strict=True"]


@pytest.fixture(autouse=True)
def there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Graphs of ours and of the hand-written sides are recorded by the stand-in, and the host asks for nothing."""
    place, made = collector.place, []

    def record(call):
        made.append(StandIn.record(call))
        return made[-1]

    def placed(*given):  # a run without graphs stands for one on the CPU
        elsewhere = {"policy": torch.device("cpu"), "policy_is_elsewhere": True} if graph._mode != "off" else {}
        return dataclasses.replace(place(*given), **elsewhere)

    monkeypatch.setattr(host, "may_ask", lambda x: False)
    monkeypatch.setattr(graph, "recorder_of", lambda device: record if graph._mode != "off" else None)
    monkeypatch.setattr(gpu_sides, "recorder", lambda device: record)
    monkeypatch.setattr(collector, "place", placed)
    return made


def measured(*words):
    return BENCHES.measure("gpu", [*SMALL, *words]).as_dict()


def sides(result, part):
    return {side["name"].rpartition(": ")[2] for side in result["sides"] if side["name"].startswith(f"{part}, ")}


def test_acting_and_updates_as_on_a_gpu_give_the_same_numbers_on_all_sides(as_on_a_gpu):
    result = measured("parts=act,update")
    assert not result["refused"]
    ours = {gpu.AUTO, gpu.OFF}
    assert sides(result, "act") == {*ours, gpu.EAGER, gpu.GRAPH, gpu.RANDOM}
    assert sides(result, "update") == {*ours, gpu.EAGER, gpu.GRAPH}
    assert len(result["checks"]) == 2 * (1 + 4) + 2 * 3 + 1
    assert len(as_on_a_gpu) >= 2 * 2 + 2 * 2 + 1  # nets: ours and by hand, twice; SAC's
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
    result = measured("parts=values,rnn,replay,env")
    assert sides(result, "values") >= {gpu.AUTO, "rlcli, in a graph"}
    assert sides(result, "rnn") == {gpu.AUTO, "rlcli, in a graph", "torch.nn, no resets"}
    assert len(sides(result, "replay")) == 4
    assert {*result["refused"].values()} == {"not built yet"} and len(result["refused"]) == 2
    for part in ("values", "rnn", "replay", "env"):
        assert json.loads((tmp_path / f"runs/bench/gpu/{part}.json").read_text())["bench"] == f"gpu, {part}"
    assert "missed" in capsys.readouterr().out


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
    result = measured("parts=replay,update,env", "strict=False")
    assert sides(result, "update") == {gpu.AUTO, gpu.OFF}
    told = {name for name, why in result["refused"].items() if "out of memory" in why}
    assert f"update, Nature CNN: {gpu.GRAPH}" in told and "replay, all: the rest" in told
    assert "env, envs on the device: rlcli" in result["refused"]


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
