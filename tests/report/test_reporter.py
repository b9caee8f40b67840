"""The reporter: one call a batch gives metrics, views and a closing report that agree with each other."""

from __future__ import annotations

import io
import json
import sys

import numba
import pytest
import torch
from face import Reporter, refused
from rich.console import Console
from tensordict import TensorDict

from rlcli.errors import ResourceError
from rlcli.report import closing
from rlcli.report.ledger import LedgerEntry
from rlcli.report.memory import Expected
from rlcli.report.metrics import read_metrics
from rlcli.report.peaks import device_peaks
from rlcli.report.reporter import Facts
from rlcli.report.tally import Curve, ValueRows

N, T = 2, 10
FACTS = Facts("ppo_compact", "CartPole-v1", 100, seed=3, next_obs="compact")


def batch(ends: int = 1) -> TensorDict:
    done = torch.zeros(N, T, 1, dtype=torch.bool)
    done[:, 4 : 4 + ends] = True
    return TensorDict(
        {"observation": torch.zeros(N, T, 4), "next": {"reward": torch.ones(N, T, 1), "done": done}}, [N, T]
    )


def a_run(folder, batches: int = 3, **options) -> tuple[Reporter, dict]:
    reporter = Reporter(FACTS, folder=folder, **{"console": "off", **options})
    net = torch.nn.Linear(4, 2)
    reporter.memory.watch({"net": net}, torch.optim.Adam(net.parameters()))
    reporter.start("threads 1 (auto)")
    for _ in range(batches):
        with reporter.clock("collect"):
            reporter.clock.split("collect", env=0.5, policy=0.25)
        with reporter.clock("update"):
            pass
        reporter.batch(
            batch(),
            {"kl_approx": torch.tensor(0.01), "loss_policy": float("nan")},
            valued=ValueRows(N * T, approximated=4),
        )
    reporter.warn("rounded", "total_frames was cut")
    return reporter, reporter.close("done", {"evaluate": "rlcli eval RUN"}, verb="train")


def test_each_batch_is_one_record_that_adds_up(tmp_path):
    a_run(tmp_path)
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["frames"] for record in records] == [20, 40, 60]
    last = records[-1]
    assert last["episodes"] == 6 and last["kl_approx"] == pytest.approx(0.01) and last["loss_policy"] is None
    assert (last["return"], last["best"]) == (pytest.approx((5 + 5 + 4 * 10) / 6), 10.0)
    assert last["approximated"] == 12 and last["boundary_rows"] == 3 * 4
    assert sum(sum(record["stages"].values()) for record in records) == pytest.approx(last["seconds"], abs=1e-4)
    memory = records[0]["memory"]  # the ledger is read once a second: no line repeats what was read for another
    assert memory["rollout"] == N * T * (16 + 4 + 1) and memory["saved"] == N * T * 16
    assert set(last["memory"]) == {"rss"}


def test_the_summarys_stages_add_up_to_its_seconds(tmp_path):
    _, summary = a_run(tmp_path)
    spent = summary["throughput"]
    assert sum(stage["seconds"] for stage in spent["stages"].values()) == pytest.approx(spent["seconds"], rel=1e-9)
    for stage in spent["stages"].values():
        if stage["parts"]:
            assert sum(stage["parts"].values()) == pytest.approx(stage["seconds"], rel=1e-9, abs=1e-12)


def test_the_closing_files_say_what_the_summary_says(tmp_path):
    _, summary = a_run(tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert summary["status"] == "done" and summary["verb"] == "train" and summary["frames"] == 60
    kinds = {warning["kind"]: warning["count"] for warning in summary["warnings"]}
    assert kinds == {"rounded": 1, "approximated": 12}
    report = (tmp_path / "report.md").read_text()
    for part in (
        "CartPole-v1, seed 3: done at 60 of 100 frames",
        "next.observation (not stored)",
        "(12 times)",
    ):
        assert part in report
    assert "`rlcli eval RUN`" in report and "| = rollout |" in report


def test_the_report_tells_what_the_last_evaluation_found(tmp_path):
    _, summary = a_run(None)
    assert "## Evaluation" not in closing.to_markdown(summary)
    played = {"mean_return": 487.5, "std_return": 12.5, "returns": [475.0, 500.0], "lengths": [475, 500], "cut": 0}
    report = closing.to_markdown(summary | {"evaluation": played})
    for row in ("episodes | 2", "mean return | 488", "std return | 12.5", "lowest return | 475", "mean length | 488"):
        assert f"| {row} |" in report


def test_plain_closing_lines_have_at_most_120_columns_and_commands_stay_whole():
    _, summary = a_run(None)
    command = f"rlcli eval runs/{'deep/' * 30} --episodes 20"
    warning = {"kind": "odd", "text": "an env that says much of itself " * 9, "count": 3}
    told = closing.to_text(summary | {"warnings": [warning], "commands": {"evaluate": command}}).splitlines()
    assert told[-1].endswith(command) and max(map(len, told[:-1])) <= 120
    assert " ".join(" ".join(told).split()).count("an env that says much of itself") == 9


def test_a_terminal_is_told_the_result_first_and_what_to_type_last(tmp_path):
    _, summary = a_run(tmp_path)
    played = {"mean_return": 487.5, "std_return": 12.5, "returns": [475.0, 500.0], "lengths": [475, 500], "cut": 0}
    told = closing.to_text(summary | {"evaluation": played, "run": "runs/x"}).splitlines()
    labels = [text.split()[0] for text in told if not text.startswith("!")][1:]
    assert labels == ["evaluation", "training", "time", "memory", "report", "evaluate"]
    assert (
        "return 488 +- 12.5 over 2 episodes (475 to 500), deterministic actions" in told[-6]
        and "rlcli eval RUN" in told[-1]
    )
    assert len(told) < 12
    rich = Console(file=io.StringIO(), width=200)
    rich.print(closing.to_terminal(summary | {"evaluation": played, "run": "runs/x"}))
    assert [text.rstrip() for text in rich.file.getvalue().splitlines()] == told


def test_the_report_explains_its_own_terms(tmp_path):
    a_run(tmp_path)
    report = (tmp_path / "report.md").read_text()
    assert "- V(s) in place of V(s'): rows whose next" in report and "- dropped" not in report


def test_compiling_is_a_stage_of_its_own_and_said_once(tmp_path):
    reporter = Reporter(FACTS, console="plain", stream=(stream := io.StringIO()))
    with reporter:
        reporter.start()
        with reporter.clock("update"):
            for _ in range(2):
                numba.njit(lambda x: x + 1)(1)
        reporter.clock.lap(1)
    spent = reporter.clock.total()
    assert stream.getvalue().count("compiling kernels, once") == 1
    assert (
        set(spent.stages()) == {"update", "compile", "other"} and spent.stages()["compile"] > spent.stages()["update"]
    )
    numba.njit(lambda x: x + 1)(1)  # nobody listens any more
    reporter.clock.lap()
    assert reporter.clock.total().stages()["compile"] == spent.stages()["compile"]


def test_a_resumed_run_continues_its_totals(tmp_path):
    first, _ = a_run(tmp_path, batches=2)
    state = json.loads(json.dumps(first.state_dict()))
    second = Reporter(FACTS, folder=tmp_path, console="off", resume_at=40)
    second.warn("checkpoint", "one was damaged")
    second.load_state_dict(state)
    second.start()
    second.batch(batch())
    assert second.snapshot().warnings == [("total_frames was cut", 1), ("one was damaged", 1)]
    second.close()
    whole, _ = a_run(None, batches=3)
    assert second.tally.frames == whole.tally.frames == 60
    assert second.tally.episodes.state_dict() == whole.tally.episodes.state_dict()
    assert second.clock.total().seconds > first.clock.total().seconds
    assert [record["frames"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [20, 40, 60]


def test_a_logger_that_fails_at_the_end_is_in_the_report(tmp_path):
    class Mine:
        def write(self, frames, scalars): ...

        def settings(self, settings): ...

        def flush(self): ...

        def close(self):
            raise OSError("gone")

    _, summary = a_run(tmp_path, logger=lambda *given: Mine())
    assert summary["status"] == "done" and "logger" in [warning["kind"] for warning in summary["warnings"]]
    assert "Mine.close failed" in (tmp_path / "report.md").read_text()


def test_rewards_given_apart_are_read_instead_of_the_batchs(tmp_path):
    reporter = Reporter(FACTS, console="off")
    reporter.batch(batch(), reward=torch.full((N, T, 1), 10.0))
    assert reporter.tally.episodes.mean_return == 50


def test_a_batch_without_rewards_or_ends_is_reported_all_the_same():
    reporter = Reporter(FACTS, console="off")
    reporter.batch(TensorDict({"observation": torch.zeros(N, T, 4)}, [N, T]))
    snapshot = reporter.snapshot()
    assert (snapshot.frames, snapshot.mean_return, reporter.tally.boundary) == (20, None, None)


def test_the_exact_kl_is_shown_where_it_is_known():
    reporter = Reporter(FACTS, console="off")
    reporter.batch(batch(), {"kl_approx": 0.5, "entropy": torch.tensor(2.0), "loss_policy": 1.0})
    assert reporter.snapshot().learning == {"kl": 0.5, "entropy": 2.0}
    reporter.batch(batch(), {"kl_approx": 0.5, "kl": 0.25})
    assert reporter.snapshot().learning == {"kl": 0.25}


def test_no_reference_to_a_batch_is_kept():
    reporter = Reporter(FACTS, console="off")
    td = batch()
    column = td["observation"]
    before = sys.getrefcount(column)
    reporter.batch(td)
    assert sys.getrefcount(column) == before


def test_a_warning_is_printed_once_and_counted(tmp_path):
    stream = io.StringIO()
    reporter = Reporter(FACTS, folder=tmp_path, console="plain", stream=stream)
    for _ in range(3):
        reporter.warn("restore", "this env cannot be restored exactly")
    summary = reporter.close("stopped")
    assert stream.getvalue().count("warning: this env") == 1
    assert summary["warnings"][0]["count"] == 3
    assert "\x1b" not in stream.getvalue() and stream.getvalue().isascii()


def test_a_run_that_stopped_before_its_first_batch_still_closes(tmp_path):
    summary = Reporter(FACTS, folder=tmp_path, console="plain", stream=io.StringIO()).close("stopped")
    assert summary["frames"] == 0 and (tmp_path / "report.md").exists()


def test_dropped_rows_and_the_value_stage_are_told_everywhere(tmp_path):
    reporter = Reporter(FACTS, folder=tmp_path, console="off")
    reporter.memory.expected = Expected(total=1000, imported=10, values=8000)
    for _ in range(2):
        with reporter.clock("values"), reporter.memory.values.of(N * T):
            kept = torch.zeros(1000) + 1
        reporter.batch(batch(), valued=ValueRows(2 * N * T, 4, 3))
    del kept
    last = read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert last["dropped"] == 6 and reporter.snapshot().dropped == 6
    assert (last["memory"]["value_stage"], last["memory"]["value_stage_planned"]) == (4000, 8000)
    summary = reporter.close()
    assert summary["dropped"] == 6 and summary["memory"]["value_stage"] == {"planned": 8000, "measured": 4000}
    report = (tmp_path / "report.md").read_text()
    for part in (
        "| V(s) in place of V(s') | 8 | 10.00 |",
        "| dropped | 6 | 7.50 |",
        "(6 times)",
        "| value estimates |",
        "planned -50.0 %",
    ):
        assert part in report


def test_what_cannot_be_dropped_or_measured_is_not_told(tmp_path):
    _, summary = a_run(tmp_path)
    assert summary["dropped"] is None and "value_stage" not in summary["memory"]
    record = read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert "dropped" not in record and "value_stage" not in record["memory"]
    report = (tmp_path / "report.md").read_text()
    assert "| dropped |" not in report and "value stage" not in report


def test_a_resumed_run_counts_dropped_rows_on_and_measures_anew(tmp_path):
    first = Reporter(FACTS, console="off")
    with first.memory.values.of(N * T):
        torch.zeros(10) + torch.zeros(10)
    first.batch(batch(), valued=ValueRows(N * T, dropped=2))
    state = json.loads(json.dumps(first.state_dict()))
    second = Reporter(FACTS, console="off")
    second.load_state_dict(state)
    assert second.memory.values.bytes is None
    with second.memory.values.of(N * T):
        torch.zeros(1000) + torch.zeros(1000)
    second.batch(batch(), valued=ValueRows(N * T, dropped=5))
    assert second.snapshot().dropped == 7 and (first.memory.values.bytes, second.memory.values.bytes) == (120, 12000)


def test_a_report_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    _, summary = a_run(tmp_path)
    before = (tmp_path / "report.md").read_bytes()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    refused(ResourceError, "space left", lambda: closing.write(tmp_path, summary))
    assert (tmp_path / "report.md").read_bytes() == before
    assert not list(tmp_path.glob("*.tmp"))


def test_a_curve_keeps_the_whole_history_in_bounded_memory():
    curve = Curve(capacity=8)
    for value in range(1000):
        curve.add(float(value))
    points = curve.points
    assert len(points) <= 8 and points == sorted(points)
    assert points[0] < 130 and points[-1] > 870
    again = Curve(capacity=8)
    again.load_state_dict(json.loads(json.dumps(curve.state_dict())))
    assert again.points == points


def test_a_devices_peak_is_kept_by_stage():
    class Cuda:
        peak = 0

        def memory_stats_as_nested_dict(self, device):
            return {"allocated_bytes": {"all": {"peak": self.peak}}}

        def reset_peak_memory_stats(self, device):
            self.peak = 5  # what stays allocated

    cuda, by_stage = Cuda(), {}
    reporter = Reporter(FACTS, console="off")
    reporter.clock.watch = device_peaks(torch.device("cuda:0"), by_stage, cuda)
    with reporter.clock("update"):
        cuda.peak = 100
    with reporter.clock("collect"):
        cuda.peak = 30
    with reporter.clock("update"):
        cuda.peak = 60
    assert by_stage == {"other": 5, "update": 100, "collect": 30}


def test_an_error_in_the_loop_gives_the_terminal_back(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with pytest.raises(ZeroDivisionError), Reporter(FACTS, console="live", stream=stream) as reporter:
        reporter.start()
        assert "\x1b[?25l" in stream.getvalue()  # the cursor is hidden
        raise ZeroDivisionError
    assert stream.getvalue().rstrip().endswith("\x1b[?25h")


def test_closing_twice_does_no_harm(tmp_path):
    with Reporter(FACTS, folder=tmp_path, console="off", logger="auto") as reporter:
        reporter.batch(batch())
        reporter.close("done")


def test_the_last_batch_is_read_though_nothing_is_due(tmp_path):
    with Reporter(Facts("a", "CartPole-v1", 3 * N * T, next_obs="full"), folder=tmp_path, console="off") as reporter:
        for size in (10, 20, 30):  # within one second
            reporter.batch(batch(), others=[LedgerEntry("buffer", "rows", size)])
        summary = reporter.close()
    (entry,) = [entry for entry in summary["memory"]["entries"] if entry["component"] == "buffer"]
    assert entry["bytes"] == 30


def test_the_last_batch_has_its_line_before_whatever_is_said_next():
    reporter = Reporter(FACTS, console="plain", stream=(stream := io.StringIO()))
    with reporter:
        reporter.start()
        while reporter.tally.frames < FACTS.total_frames:
            reporter.batch(batch())
        reporter.say("evaluating ...")
        reporter.close()
    lines = stream.getvalue().splitlines()
    assert lines[lines.index("evaluating ...") - 1].startswith("100%")
    assert sum(text.startswith("100%") for text in lines) == 1


def test_a_report_tells_the_pace_from_the_time_that_compiling_took_once(tmp_path):
    _, summary = a_run(tmp_path)
    spent = summary["throughput"]
    stages = {"compile": {"seconds": 9.0, "parts": {}}, "collect": {"seconds": 1.0, "parts": {"env": 1.0}}}
    slow = {**spent, "seconds": 10.0, "frames": 1000, "frames_per_second": 100.0, "stages": stages}
    report = closing.to_markdown(summary | {"throughput": slow})
    for row in ("collect: env | 1.00 | 10 | ", "all | 10.00 | 100 | 100", "without compile | 1.00 | 10 | 1.0k"):
        assert f"| {row} |" in report
    assert "1.0k frames/s, plus 0:00:09 of one-time compilation (collect 100%)" in closing.to_text(
        summary | {"throughput": slow}
    )


@pytest.mark.parametrize(("verb", "label"), [("train", "training"), ("collect", "episodes")])
def test_returns_of_training_and_of_collection_are_told_apart(tmp_path, verb, label):
    _, summary = a_run(tmp_path)
    told = closing.to_text(summary | {"verb": verb})
    assert f"\n{label:<12}return 8.33 over 6 episodes, best return 10" in told
    many = summary["learning"] | {"episodes": 1234}
    told = closing.to_text(summary | {"verb": verb, "learning": many})
    assert f"\n{label:<12}return 8.33 over the last 100 of 1,234 episodes, best return 10" in told
