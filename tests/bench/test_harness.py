"""How benches are run and reported; times themselves are never asserted."""

import json
import time

from face import refused

from rlcli.bench.harness import Figure, Ratio, Report, Side, claim, fill, interleave, publish, ratio
from rlcli.errors import ResourceError


def test_sides_alternate_and_warm_up_rounds_do_not_count():
    order = []
    sides = interleave({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=8, warmup=2)
    assert order == ["b", "a", "a", "b"] * 5
    assert [len(side.seconds) for side in sides] == [8, 8]


def test_there_are_at_least_seven_rounds():
    (side,) = interleave({"a": lambda: None}, rounds=1)
    assert len(side.seconds) == 7


def test_a_side_fills_its_share_of_a_round():
    calls = {"slow": 0, "quick": 0}

    def slow():
        calls["slow"] += 1
        time.sleep(0.03)

    def quick():
        calls["quick"] += 1

    sides = fill({"slow": slow, "quick": quick}, rounds=7, seconds=0.01, per=4)
    assert [len(side.seconds) for side in sides] == [7, 7]
    assert sides[0].per == 4 and calls["slow"] == 2 + 8  # once and once to see how long it takes; a warm-up round
    assert sides[1].per > 4 and calls["quick"] == 2 + 8 * sides[1].per // 4


def test_ratios_pair_the_rounds_and_count_units_of_work():
    sides = [Side("slow", [4.0, 6.0, 20.0], per=2), Side("fast", [1.0, 1.0, 1.0], per=1)]
    r = ratio(sides, "slow", "fast", "<= 3")
    assert r.rounds == [2.0, 3.0, 10.0] and r.median == 3.0 and r.met
    assert not Ratio("a", "b", [2.0], ">= 2.2").met and Ratio("a", "b", [2.0]).met is None


def test_the_file_holds_every_round_and_the_machine(tmp_path, capsys):
    sides = [Side("a", [1e-6, 2e-3, 3.0]), Side("b", [1.0, 1.0, 1.0])]
    report = Report("x", {"n": 1}, "step", sides, [ratio(sides, "a", "b", "<= 1")], {"equal": "yes"}, ["a note"])
    publish(report, tmp_path / "bench.json")
    data = json.loads((tmp_path / "bench.json").read_text())
    assert data["sides"][0]["seconds"] == [1e-6, 2e-3, 3.0] and data["ratios"][0]["median"] == 2e-3
    assert {"torch", "cpu", "torch_threads"} <= set(data["machine"])
    shown = capsys.readouterr().out
    assert "met" in shown and "2 ms" in shown and "a note" in shown


def test_the_table_has_a_side_for_each_case_and_those_that_cannot_be_measured(tmp_path, capsys):
    names = ["small: b", "large: a", "small: a", "large: b"]
    report = Report("x", {}, "step", [Side(name, [float(i)] * 7) for i, name in enumerate(names, 1)])
    report.refused["small: c"] = "it needs a GPU"
    publish(report, tmp_path / "bench.json")
    shown = capsys.readouterr().out
    found = [line.split("│")[1].strip() for line in shown.splitlines() if line.startswith("│")]
    assert found == ["small: b", "small: a", "small: c: it needs a GPU", "large: a", "large: b"]
    assert json.loads((tmp_path / "bench.json").read_text())["refused"] == report.refused


def test_a_line_that_is_true_of_many_cases_is_said_once():
    report = Report("x", {}, "step")
    for peer in ("torchrl", "SB3", "torchrl"):
        report.leave_out(peer)
    assert [note.split()[0] for note in report.notes] == ["torchrl", "SB3"]


def test_a_folder_that_cannot_be_written_is_a_sentence_before_and_after(tmp_path):
    for write in (lambda path: claim(path), lambda path: publish(Report("x", {}, "step"), path)):
        with refused(ResourceError, "file/bench.json"):
            (tmp_path / "file").touch()
            write(tmp_path / "file" / "bench.json")
    claim(tmp_path / "runs" / "bench" / "new.json")
    assert list((tmp_path / "runs" / "bench").iterdir()) == []
    (tmp_path / "bench.json").write_text("the last one")
    claim(tmp_path / "bench.json")
    assert (tmp_path / "bench.json").read_text() == "the last one"


def test_a_figure_meets_its_bar_or_not():
    assert Figure("a", 29.0, "B", "<= 30").met and not Figure("a", 31.0, "B", "<= 30").met
    assert Figure("a", 5.0, "x", ">= 5").met and Figure("a", 1.0, "B").met is None


def test_a_framework_that_is_not_here_is_left_out_with_a_note():
    def absent(env_id: str):
        raise ImportError(env_id)

    report = Report("collect", {"peers": True}, unit="frame")
    assert report.peer("nobody", str.upper, "a") == "A"
    assert report.peer("nobody", absent, "a") is None
    assert report.notes == ['nobody is not installed: left out (pip install "rlcli[peers]")']
    assert Report("collect", {"peers": False}, unit="frame").peer("nobody", absent, "a") is None
