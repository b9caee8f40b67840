"""What a person sees: both views show the same numbers, fit the width, cost nothing between redraws."""

from __future__ import annotations

import io
import re
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

import pytest
from face import Reporter
from rich.console import Console
from tensordict import TensorDict

from rlcli.report import figures
from rlcli.report.clock import Spent
from rlcli.report.figures import WIDTH
from rlcli.report.ledger import Ledger, LedgerEntry
from rlcli.report.live import LiveView, render
from rlcli.report.plain import PlainView, details, line
from rlcli.report.reporter import Facts, can_draw_live, open_view
from rlcli.report.view import EVALUATION, MemoryRow, Snapshot, View, WorkerRow, memory_rows, shown
from rlcli.report.workers import Workers


@pytest.fixture(autouse=True)
def a_usual_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def drawn(snapshot: Snapshot, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=False, highlight=False, markup=False)
    console.print(*render(snapshot, *console.size), sep="\n", no_wrap=True, overflow="ellipsis")
    return console.file.getvalue().rstrip("\n").split("\n")


@pytest.mark.parametrize("width", [200, 120, 119, 80, 79, 60, 40])
def test_every_line_fits_the_terminal_and_the_screen(snapshot, width):
    lines = drawn(snapshot, width)
    assert max(map(len, lines)) <= width
    assert len(lines) < 24


@pytest.mark.parametrize("width", [120, 80, 60])
def test_nothing_is_cut_off_at_usual_widths(snapshot, width):
    text = "\n".join(drawn(snapshot, width))
    assert "…" not in text
    for part in (
        "ppo_exact · CartPole-v1 · seed 1",
        "62%",
        "0:00:09 · ETA 0:00:02",
        "15.3k frames/s",
        "253 KiB",
    ):
        assert part in text
    for part in (
        "return 312",
        "best 500",
        "kl 0.006",
        "clip fraction 0.11",
        "explained variance 0.71",
        "! the last",
    ):
        assert part in text


def test_columns_stand_beside_each_other_where_there_is_room(snapshot):
    three, two, one = drawn(snapshot, 120), drawn(snapshot, 80), drawn(snapshot, 60)
    assert len(three) < len(two) < len(one)
    assert all(word in three[1] for word in ("throughput", "memory", "learning"))
    assert any(all(word in row for word in ("throughput", "memory")) for row in two)
    for stacked in (two, one):  # what a person looks for first
        first = stacked.index("learning")
        assert first <= 2 and "return 312" in stacked[first + 1]


def test_both_views_show_the_same_numbers(snapshot):
    def numbers(text: str) -> set[str]:
        return set(re.findall(r"\d[\d.,:]*", text))

    bare = replace(snapshot, env="", seed=None, warnings=())  # their own lines, at the start, in plain output
    live, plain = numbers("\n".join(drawn(bare, 120))), numbers(everything(bare))
    assert len(live) > 15 and live <= plain
    assert plain - live == {"62,000", "100,000"}


def everything(snapshot: Snapshot) -> str:
    """What plain output says at every tenth line."""
    return "\n".join([line(snapshot), *details(snapshot)])


def test_a_plain_line_says_first_what_a_person_looks_for(snapshot):
    assert line(snapshot) == (
        " 62%  62,000/100,000  15.3k frames/s  return 312  length 312  kl 0.006  explained variance 0.71  eta 0:00:02"
    )


@pytest.mark.parametrize("frames", [62_000, 6_200_000_000])
def test_plain_lines_have_at_most_120_columns(snapshot, frames):
    long = replace(snapshot, frames=frames, total_frames=10 * frames, mean_return=-123456.0, mean_length=30_000.0)
    assert WIDTH == 120 and max(len(text) for text in everything(long).split("\n")) <= WIDTH
    assert "eta" in line(long) and "return -123456" in line(long)


def test_a_long_warning_takes_several_plain_lines_and_loses_no_word():
    text = (
        "in evaluations the env's observation was outside its declared bounds; the worst: "
        + "-12.3456789 at [0, 1] " * 9
    )
    stream = io.StringIO()
    PlainView(stream).warn(text)
    lines = stream.getvalue().splitlines()
    assert len(lines) > 1 and max(map(len, lines)) <= WIDTH
    assert " ".join(stream.getvalue().split()) == " ".join(f"warning: {text}".split())
    assert all(line.startswith("  ") for line in lines[1:])


def test_every_tenth_plain_line_brings_stages_and_memory(snapshot):
    stream = io.StringIO()
    view = PlainView(stream)
    for _ in range(20):
        view.show(snapshot)
    shown = stream.getvalue().splitlines()
    assert [i for i, text in enumerate(shown) if "collect 48%" in text] == [10, 20 + len(details(snapshot))]
    assert shown[10].lstrip().startswith("time") and "process RSS 412 MiB peak 420 MiB" in shown[12]


def test_what_is_compiled_once_is_not_in_the_pace(snapshot):
    compiled = replace(snapshot, spent=Spent(62_000, {("compile",): 7_000_000_000, **snapshot.spent.own}))
    assert compiled.eta == pytest.approx(snapshot.eta) and "15.3k frames/s" in line(compiled)
    assert "compile 63%" in everything(compiled)


def test_columns_stay_where_they_are_when_a_stage_appears(snapshot):
    own = {**snapshot.spent.own, ("other", "checkpoint"): 10_000_000, ("other", "log"): 20_000_000}
    before, after = drawn(snapshot, 120), drawn(replace(snapshot, spent=Spent(62_000, own)), 120)
    assert before[1].index("memory") == after[1].index("memory")


LOSSES = {"lr": 1e-4, "policy loss": -0.02, "value loss": 3.5}


def test_losses_the_learning_rate_and_evaluations_are_shown_where_there_is_room(snapshot):
    full = replace(
        snapshot, learning={**snapshot.learning, **LOSSES, EVALUATION: 480.0}, evaluations=[1.0, 300.0, 480.0],
        success_rate=0.834, infos={"x": 1.5}, warnings=(),
    )  # fmt: skip
    least = ("lr 1e-04", "policy loss -0.020", "value loss 3.50", "▁▅█")
    told = ("evaluation return 480", "success 83 %", "x 1.50", "kl 0.006", "return 312")
    wide = "\n".join(drawn(full, 120))
    assert all(part in wide for part in (*least, *told))
    rest = 26 - len(drawn(full, 60))  # the screen is 25 lines high
    narrow = drawn(replace(full, warnings=[(f"warning {i}", 1) for i in range(rest)]), 60)
    assert len(narrow) == 25 and all(part in "\n".join(narrow) for part in told)
    assert not any(part in "\n".join(narrow) for part in least)
    assert "evaluation return 480" in line(full) and "success 83 %" in line(full)
    assert "value loss 3.50" in everything(full)


def test_the_loss_is_shown_by_its_parts_where_it_has_some():
    assert shown({"loss": 1.0, "loss_objective": 0.25, "loss_critic": 0.75, "lr": 0.5}) == {
        "lr": 0.5, "policy loss": 0.25, "value loss": 0.75,
    }  # fmt: skip
    assert shown({"loss": 1.0}) == {"loss": 1.0}


def test_what_is_next_to_nothing_is_not_shown(snapshot):
    text = "\n".join(drawn(snapshot, 120)) + everything(snapshot)
    assert "in place of V(s')" not in text
    assert "V(s) in place of V(s') 3" in everything(replace(snapshot, approximated=3))
    ledger = Ledger()
    ledger.read([LedgerEntry("buffer", "rows", 100, saved=10)])
    for process, saved in ((1000, 10), (1001, None)):
        assert memory_rows(ledger, [], {"process": {"now": process, "peak": process}})[0].saved == saved


@pytest.mark.parametrize("width", [200, 160, 100, 60])
def test_lines_that_a_narrower_terminal_has_wrapped_are_erased(snapshot, width):
    stream = Terminal()
    view = LiveView(stream)
    view.console.size = (160, 40)
    view.show(snapshot)
    lengths, before = [min(160, len(text)) for text in drawn(snapshot, 160)], len(stream.getvalue())
    view.console.size = (width, 40)
    view.show(snapshot)
    view.close()
    ups = stream.getvalue()[before:].partition("ppo_exact")[0].count("\x1b[1A")
    assert ups == sum(max(-(-length // width), 1) for length in lengths) - 1


def test_dropped_rows_are_shown_where_they_can_be(snapshot):
    assert "dropped" not in "\n".join(drawn(snapshot, 80)) + everything(snapshot)
    for text in ("\n".join(drawn(replace(snapshot, dropped=12), 80)), everything(replace(snapshot, dropped=12))):
        assert "dropped rows 12" in text


def test_the_value_stage_is_told_beside_what_the_plan_said():
    told = {"process": {"now": 90, "peak": 100, "planned": 80}, "value_stage": {"planned": 1000, "measured": 1010}}
    rows = memory_rows(Ledger(), [], told)
    assert [(row.label.strip(), row.now, row.peak) for row in rows] == [
        ("value estimates", None, 1010),
        ("planned +1.0 %", None, 1000),
        ("process RSS", 90, 100),
        ("planned +25.0 %", None, 80),
    ]
    shown = Snapshot(memory=rows)
    assert "value estimates 1010 B planned +1.0 % 1000 B  process RSS" in everything(shown)
    assert max(map(len, drawn(shown, 80))) <= 80 and "planned +25.0 %" in "\n".join(drawn(shown, 80))
    assert [row.label for row in memory_rows(Ledger(), [], {"process": {"now": 1, "peak": 1}})] == ["process RSS"]


def test_the_plain_line_is_one_line_of_ascii(snapshot, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    view = PlainView(stream)
    view.show(snapshot)
    text = stream.getvalue()
    assert text.count("\n") == 1 and text.isascii() and "\x1b" not in text


@pytest.mark.parametrize("state", [Snapshot(), Snapshot(total_frames=10, warnings=[("a [b]odd[/b] env", 3)])])
def test_a_run_that_has_not_begun_can_be_shown(state):
    assert drawn(state, 80) and line(state)
    assert "return -  best -  length -  episodes 0" in "\n".join(drawn(state, 80))
    assert not state.warnings or drawn(state, 80)[-1] == "! a [b]odd[/b] env (3 times)"


def test_plain_lines_thin_out_as_the_run_goes_on(snapshot):
    now = 0.0
    view = PlainView(io.StringIO(), now=lambda: now)
    shown = []
    while now < 7200:
        if view.due():
            view.show(snapshot)
            shown.append(now)
        now += 0.25
    gaps = [b - a for a, b in pairwise(shown)]
    assert min(gaps) >= 2 and max(gaps) <= 60.5
    assert sum(t < 3600 for t in shown) < 275


def test_the_last_state_is_always_printed_once(snapshot):
    stream = io.StringIO()
    view = PlainView(stream)
    view.show(snapshot)
    view.close(replace(snapshot, frames=100_000))
    view.close(replace(snapshot, frames=100_000))
    assert stream.getvalue().count("\n") == 2


def test_the_live_view_redraws_at_most_as_often_as_it_says():
    now = 0.0
    view = LiveView(Terminal(), per_second=4, now=lambda: now)
    view.show(Snapshot())
    assert not view.due()
    now = 0.24
    assert not view.due()
    now = 0.26
    assert view.due()
    view.close()


def test_a_slow_terminal_is_drawn_less_often(snapshot, monkeypatch):
    now = 0.0

    class Slow(Terminal):
        def write(self, text: str) -> int:
            nonlocal now
            now += 0.05
            return super().write(text)

    view = LiveView(Slow(), now=lambda: now)
    view.show(snapshot)
    now += 1.0
    assert not view.due()
    now += 1000.0
    assert view.due()
    view.close()


class Gone(Terminal):
    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("kind", [PlainView, LiveView])
def test_a_reader_that_hangs_up_does_not_stop_the_run(kind, snapshot):
    view = kind(Gone())
    view.show(snapshot)
    view.say("checkpoint saved")
    view.close(snapshot)


def test_auto_draws_on_a_utf8_terminal_and_writes_lines_elsewhere(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal()
    assert can_draw_live(terminal)
    assert not can_draw_live(io.StringIO())
    terminal.encoding = "ascii"
    assert not can_draw_live(terminal)
    monkeypatch.setenv("TERM", "dumb")
    terminal.encoding = "utf-8"
    assert not can_draw_live(terminal)
    assert type(open_view("off")) is View


def test_a_program_without_a_console_and_a_stream_that_is_no_terminal(monkeypatch):
    class Written:
        def write(self, text): ...
        def flush(self): ...

    assert not can_draw_live(Written())
    monkeypatch.setattr("sys.stdout", None)
    assert type(open_view("auto")) is View


def test_plain_text_survives_a_stream_that_cannot_encode_it():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    PlainView(stream).say("ähnlich")
    assert raw.getvalue() == b"?hnlich\n"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (253 * 1024, "253 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (None, "-"),
    ],
)
def test_sizes_read_in_binary_units(value, text):
    assert figures.size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.4, "0"), (312, "312"), (999.6, "1.0k"), (14_900, "14.9k"), (999_960, "1.0M"), (2.5e6, "2.5M")],
)
def test_rates_read_in_thousands(value, text):
    assert figures.rate(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (312.4, "312"),
        (21.46, "21.5"),
        (0.006, "0.006"),
        (3e-5, "3e-05"),
        (0.0, "0"),
        (-0.71, "-0.71"),
        (float("nan"), "-"),
    ],
)
def test_figures_read_with_about_three_digits(value, text):
    assert figures.number(value) == text


def test_durations_round_to_seconds():
    assert [figures.duration(s) for s in (0, 9.4, 59.6, 98_100)] == [
        "0:00:00",
        "0:00:09",
        "0:01:00",
        "27:15:00",
    ]
    assert figures.duration(None) == figures.duration(float("inf")) == "-"


def test_a_sparkline_spans_the_whole_history():
    assert figures.sparkline(range(8), 8) == "▁▂▃▄▅▆▇█"
    assert figures.sparkline([5.0, 5.0, 5.0]) == "▁▁▁"
    assert figures.sparkline([float("nan")]) == ""
    assert len(figures.sparkline(range(1000), 12)) == 12


@pytest.mark.parametrize("width", [80, 100, 120])
def test_nothing_of_the_memory_is_cut_off_where_it_has_a_column(snapshot, width):
    rows = [*snapshot.memory, MemoryRow("  planned +12.3 %", None, 400 * 1024**2)]
    lines = drawn(replace(snapshot, memory=rows, warnings=()), width)
    assert "253 KiB" in "\n".join(lines) and not any("…" in text for text in lines)


# ---- workers -----------------------------------------------------------------------------------------------------
def workers_of(count: int, **options) -> list[WorkerRow]:
    return [WorkerRow(1234.5 + 100 * index, **({"lag": index % 3} | options)) for index in range(count)]


@pytest.mark.parametrize("width", [120, 80, 60, 40])
@pytest.mark.parametrize("count", [1, 2, 16, 300])
@pytest.mark.parametrize("restarts", [0, 3])
def test_workers_take_four_lines_at_most_and_none_overflows(snapshot, width, count, restarts):
    lines = drawn(replace(snapshot, workers=workers_of(count, restarts=restarts), restarts=restarts * count), width)
    assert max(map(len, lines)) <= width and len(lines) < 24
    assert 1 <= len(lines) - len(drawn(snapshot, width)) <= 4


@pytest.mark.parametrize("width", [120, 80])
def test_of_very_many_workers_the_range_is_said(snapshot, width):
    lines = drawn(replace(snapshot, warnings=(), workers=workers_of(300, restarts=2), restarts=600), width)
    assert lines[-1] == "workers  300  each 1.2k to 31.1k/s  lag 0 to 2  restarts 600"


@pytest.mark.parametrize("width", [120, 40])
def test_restarts_of_processes_that_only_step_envs_are_said(snapshot, width):
    assert drawn(replace(snapshot, warnings=(), restarts=3), width)[-1] == "workers  restarts 3"
    assert "      workers   restarts 3\n" in everything(replace(snapshot, restarts=3))


@pytest.mark.parametrize("count", [2, 300])
@pytest.mark.parametrize("width", [80, 40])
def test_who_waited_is_said_after_the_workers(snapshot, count, width):
    lines = drawn(replace(snapshot, warnings=(), workers=workers_of(count, waited=(6.0, 1.5))), width)
    learner, batches = (figures.duration(count * seconds) for seconds in (6.0, 1.5))
    assert f"learner waited {learner} batches waited {batches}" in " ".join(" ".join(lines).split())
    assert max(map(len, lines)) <= width


def test_sixteen_workers_stand_in_columns(snapshot):
    lines = drawn(replace(snapshot, warnings=(), workers=workers_of(16)), 80)[-4:]
    assert lines[0].startswith("workers   0 1.2k/s lag 0   1 1.3k/s lag 1")
    starts = [[match.start() for match in re.finditer(r"\d+ [\d.]+k/s", text)] for text in lines]
    assert sum(map(len, starts)) == 16 and all(len(line) <= 80 for line in lines)


def test_workers_are_among_the_details_of_plain_output(snapshot):
    assert "workers" not in everything(snapshot)
    text = everything(replace(snapshot, workers=workers_of(2), learning={"lag": 1.5}))
    assert "      workers   0 1.2k/s lag 0  1 1.3k/s lag 1\n" in text
    assert "  lag 1.50  " in line(replace(snapshot, learning={"lag": 1.5}))
    assert max(map(len, everything(replace(snapshot, workers=workers_of(16))).split("\n"))) <= WIDTH


@dataclass
class Told:
    frames: int = 0
    lag: int | None = None
    restarts: int = 0
    waited: tuple[float, float] | None = None
    lost_frames: int = 0
    at_most: str = ""
    cause: str = "worker 1 was killed"


def test_rates_look_back_a_few_seconds_and_not_at_an_earlier_session():
    now = 0.0
    workers, told = Workers(lambda: now), [Told(1_000_000), Told(2_000_000, restarts=3, lost_frames=9)]
    workers.begin(told)
    assert [row.rate for row in workers.rows] == [None, None]
    for now in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0):
        told[0].frames += 100
        told[1].frames += 100 if now <= 3 else 0
        workers.read(told)
    assert [row.rate for row in workers.rows] == [100, 0]
    assert not list(workers.replaced(told))


@pytest.mark.parametrize("most", ["", "at most "])
def test_a_worker_that_was_replaced_is_warned_of_once(tmp_path, most):
    stream = io.StringIO()
    told = [Told(100, at_most=most), Told(100, None, 1, (65.0, 2.0), 7, most, "worker 1 was stopped")]
    batch = TensorDict({}, [1, 4])
    with Reporter(Facts("a", "b", 100), console="plain", stream=stream) as reporter:
        reporter.workers.begin(told)
        reporter.start()
        reporter.batch(batch, workers=told)
        told[1].restarts, told[1].lost_frames, told[1].cause = 3, 47, "worker 1 was killed"
        reporter.batch(batch, workers=told)
        reporter.batch(batch, workers=told)
        summary = reporter.close("done", workers=[asdict(each) | {"largest_lag": 2} for each in told])
    said = f"worker 1 was killed: restarted, {most}40 frames lost"
    assert stream.getvalue().count(f"warning: {said}\n") == 1 and "worker 1 was stopped" not in stream.getvalue()
    assert [(each["text"], each["count"]) for each in summary["warnings"]] == [(said, 2)]
    closing = f"workers 2, of 100 frames each; batches at most 2 weight versions behind; restarted 3 times, {most}47"
    closing += " frames lost; learner waited 0:01:05; batches waited 0:00:02"
    assert closing in " ".join(stream.getvalue().split())
