"""However a run ends, its report says how, its collector is shut down, and the first error is the one that is told."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from face import configure, open_run, refused

import rlcli
from rlcli.build import collect, train
from rlcli.collectors import Collector
from rlcli.config.resolved import to_dict
from rlcli.errors import ConfigError, EnvError, ResourceError
from rlcli.processes.memory import process_memory
from rlcli.report import closing, peaks, reporter
from rlcli.runs.session import new_run

WORDS = ["total_frames=512", "collector.frames_per_batch=128", "console=off", "run.dir=r"]


@pytest.fixture(params=["train", "collect"])
def start(request, tmp_path, monkeypatch):
    """`start(error)`: a run whose second batch raises it; how often its collector was shut down is `start.closed`."""
    monkeypatch.chdir(tmp_path)
    stepped, shutdown = Collector._stepped, Collector.shutdown
    shut = []

    def count(self):
        shut.append(self)
        shutdown(self)

    def start(error: BaseException):
        def fails(self, *args, **options):
            if self.frames >= 128:
                raise error
            return stepped(self, *args, **options)

        monkeypatch.setattr(Collector, "_stepped", fails)
        monkeypatch.setattr(Collector, "shutdown", count)
        if request.param == "train":
            words = [*WORDS, "sampler.batch_size=64", "run.eval_episodes=0"]
            train(configure("train", words), words)
        else:
            words = ["recipe=collect_random", *WORDS]
            collect(configure("collect", words), words)

    start.shut = shut
    return start


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt(), "interrupted"), (EnvError("it broke"), "failed")], ids=["ctrl-c", "env"]
)
def test_the_report_says_what_ended_the_run(start, error, status):
    with pytest.raises(type(error)) as caught:
        start(error)
    assert caught.value is error and len(start.shut) == 1
    summary = open_run("r").summary
    assert summary["status"] == status and summary["frames"] == 128
    assert set(summary["commands"]) == {"read" if summary["verb"] == "collect" else "evaluate", "resume"}


@pytest.mark.parametrize("verb", ["train", "collect"])
def test_a_run_that_is_done_names_no_command_that_does_nothing(tmp_path, verb):
    words = ["total_frames=512", "console=off", f"run.dir={tmp_path / 'r'}", "collector.frames_per_batch=512"]
    run = rlcli.train([*words, "run.eval_episodes=0"]) if verb == "train" else rlcli.collect(words)
    assert list(run.summary["commands"]) == ["evaluate" if verb == "train" else "read"]


def test_a_report_that_cannot_be_written_takes_no_errors_place(start, monkeypatch):
    def full(folder, summary):
        raise ResourceError("cannot write the closing report")

    monkeypatch.setattr(closing, "write", full)
    error = EnvError("it broke")
    with pytest.raises(EnvError) as caught:
        start(error)
    assert caught.value is error and len(start.shut) == 1


@pytest.mark.parametrize(("epochs", "warned"), [(2, True), (1, False)])
def test_passes_that_a_loss_cannot_weigh_are_warned_of(tmp_path, epochs, warned):
    overrides = [
        "loss=a2c",
        f"optim.epochs={epochs}",
        "total_frames=256",
        "collector.frames_per_batch=256",
        "env.num=2",
    ]
    run = rlcli.train([*overrides, "console=off", "logger=none", "run.eval_episodes=0", f"run.dir={tmp_path / 'run'}"])
    assert any("has no importance ratio" in warning["text"] for warning in run.summary["warnings"]) is warned


@pytest.mark.parametrize("verb", ["train", "collect"])
@pytest.mark.parametrize("given", [False, True], ids=["new folder", "the user's folder"])
def test_a_run_that_could_not_begin_takes_back_what_it_made_and_no_more(verb, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "mine" / "r"
    if given:
        folder.mkdir(parents=True)
    words = ["console=off", f"run.dir={folder}", "env.kwargs={no_such_argument: 1}"]
    refused(ConfigError, "no_such_argument", lambda: (rlcli.train if verb == "train" else rlcli.collect)(words))
    assert list(tmp_path.glob("mine/r/*")) == [] and folder.exists() == given


def test_an_empty_file_of_somebody_else_stays_in_a_folder_that_was_given(tmp_path):
    (tmp_path / "r").mkdir()
    cfg = configure("train", [f"run.dir={tmp_path / 'r'}"])
    with refused(ResourceError, "room"), new_run(to_dict(cfg), "train", []) as (run, _):
        (run.path / ".keep").touch()
        raise ResourceError("no room")
    assert [path.name for path in run.path.iterdir()] == [".keep"]


# ---- memory ---------------------------------------------------------------------------------------------------------
SHORT = [*WORDS[:3], "sampler.batch_size=64", "run.eval_episodes=0", "logger=none"]


def test_a_run_reports_its_own_peak_and_leaves_its_process_the_highest_that_it_has_had(tmp_path, capsys):
    """A sweep's jobs share a process, and so do two calls of `rlcli.train`, with a program that measures itself."""
    rlcli.train([*SHORT, f"run.dir={tmp_path / 'first'}"])
    before = np.ones(400 << 17)  # 400 MiB
    held = process_memory()[1]
    del before
    run = rlcli.train([*SHORT, "console=plain", f"run.dir={tmp_path / 'run'}"])
    memory = run.summary["memory"]["process"]
    assert memory["now"] <= memory["peak"] < held - (200 << 20) and memory["sampled"]
    assert process_memory()[1] >= held - (1 << 20)
    assert "process RSS, sampled" in (tmp_path / "run" / "report.md").read_text()
    assert ", sampled (planned" in capsys.readouterr().out


def test_a_peak_that_passes_the_mark_is_known(monkeypatch):
    readings = iter([(5, 9), (6, 9), (4, 12), (4, 12)])
    monkeypatch.setattr(peaks, "process_memory", lambda: next(readings))
    found = peaks.ProcessPeak()
    assert (found.peak, found.sampled) == (5, True)
    found.read()
    assert (found.peak, found.sampled) == (6, True)
    for _ in range(2):
        found.read()
        assert (found.now, found.peak, found.sampled) == (4, 12, False)


def test_no_line_of_the_metrics_repeats_what_was_measured_for_another(tmp_path, monkeypatch):
    """The ledger is read once a second; a line between two readings has what the process holds, and no more."""
    monkeypatch.setattr(reporter, "LEDGER_EVERY", 1e9)
    count = itertools.count(1)
    monkeypatch.setattr(peaks, "process_memory", lambda: (next(count),) * 2)
    lines = [line["memory"] for line in rlcli.train([*SHORT, f"run.dir={tmp_path / 'run'}"]).metrics()]
    assert len({line["rss"] for line in lines}) == len(lines) == 4
    assert ["rollout" in line and "saved" in line for line in lines] == [True, False, False, True]
