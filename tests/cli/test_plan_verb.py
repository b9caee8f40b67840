"""`rlcli plan` as it is typed."""

import json

import pytest

from rlcli.cli.completion import candidates


def test_a_plan_is_printed_and_nothing_is_written(rlcli, tmp_path):
    code, out, _ = rlcli("plan train recipe=ppo_exact logger=none")
    assert code == 0 and "= RAM" in out and "exact *" in out and "compact" in out and "every episode that ends" in out
    assert not (tmp_path / "runs").exists() and max(map(len, out.splitlines())) <= 100


def test_json_holds_the_same(rlcli):
    code, out, _ = rlcli("plan collect recipe=collect_random --json")
    data = json.loads(out)
    assert code == 0 and data["verb"] == "collect" and data["fits"]
    assert {m["name"] for m in data["modes"]} >= {"full", "exact", "compact"}
    assert sum(e["bytes"] for e in data["entries"] if e["component"] == "rollout") == data["modes"][1]["bytes"]


def test_what_does_not_fit_exits_with_5(rlcli, monkeypatch):
    monkeypatch.setattr("rlcli.planning.fit.free_memory", lambda: (1 << 20, 1 << 30))
    code, out, _ = rlcli("plan recipe=ppo_full collector.frames_per_batch=1_000_000 logger=none")
    assert code == 5 and "NO" in out and "-> " in out


def test_a_limit_is_planned_for_whatever_the_machine_has(rlcli):
    words = "plan recipe=ppo_full collector.frames_per_batch=1_000_000 logger=none"
    code, out, _ = rlcli(f"{words} --limit 400MiB")
    assert code == 5 and "400 MiB   400 MiB    NO" in out and "-> collector.frames_per_batch=" in out
    assert rlcli(f"{words} --limit=1TiB")[0] == 0
    code, _, err = rlcli("plan --limit lots")
    assert code == 2 and "'lots' is no size" in err and "--limit 2GiB" in err


def test_a_mistake_is_answered_as_train_answers_it(rlcli):
    code, _, err = rlcli("plan train env.nmu=3")
    assert code == 2 and "did you mean env.num" in err
    assert rlcli("plan --help")[0] == 0


@pytest.mark.parametrize(
    ("line", "some"),
    [("rlcli pl", ["plan"]), ("rlcli plan ", ["train", "collect"]), ("rlcli plan train env.nu", ["env.num="])],
)
def test_a_tab_completes_plans(line, some):
    assert set(some) <= set(candidates(line))
