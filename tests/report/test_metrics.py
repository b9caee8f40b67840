"""metrics.jsonl is valid line by line, survives crashes and resumes, and says when the disk refuses."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import closing

import numpy as np
import psutil
import pytest
import torch
from face import configure, refused

from rlcli.errors import ConfigError, ResourceError
from rlcli.report import events
from rlcli.report.metrics import MetricsWriter, read_metrics, wants_tensorboard


def strict(text: str):
    def refuse(name: str):
        raise ValueError(name)

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_figures_of_every_kind_become_strict_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsWriter(path)) as writer:
        writer.write(
            {
                "frames": 10,
                "nan": float("nan"),
                "inf": torch.tensor(float("-inf")),
                "tensor": torch.tensor(0.5),
                "numpy": np.float32(2.0),
                "int": np.int64(3),
                "stages": {"collect": 1.5, "nan": np.nan},
            }
        )
    assert strict(path.read_text()) == [
        {
            "frames": 10,
            "nan": None,
            "inf": None,
            "tensor": 0.5,
            "numpy": 2.0,
            "int": 3,
            "stages": {"collect": 1.5, "nan": None},
        }
    ]


def test_a_record_is_there_as_soon_as_it_is_written(tmp_path):
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.write({"frames": 1})
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"frames": 1}]
    writer.close()


@pytest.mark.parametrize("tail", ["", '{"frames": 50, "los', '{"frames": 50}', "\x00\x00\x00"])
def test_a_resumed_run_continues_after_its_checkpoint(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"frames": f}) + "\n" for f in (10, 20, 30, 40)) + tail)
    with closing(MetricsWriter(path, resume_at=20)) as writer:
        writer.write({"frames": 30, "again": True})
    assert strict(path.read_text()) == [{"frames": 10}, {"frames": 20}, {"frames": 30, "again": True}]


def test_every_cut_of_the_file_resumes_to_a_prefix(tmp_path):
    whole = "".join(json.dumps({"frames": f, "x": f / 7}) + "\n" for f in range(10, 60, 10))
    path = tmp_path / "metrics.jsonl"
    for cut in range(len(whole)):
        path.write_text(whole[:cut])
        writer = MetricsWriter(path, resume_at=30)
        assert path.read_text() == whole[:cut]  # what is refused yet leaves the file as it was
        writer.begin()
        writer.close()
        kept = path.read_text()
        assert whole.startswith(kept) and (not kept or kept.endswith("\n"))
        assert all(record["frames"] <= 30 for record in strict(kept))


def test_a_torn_line_does_not_swallow_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"frames": 1}\n{"fra')
    with closing(MetricsWriter(path)) as writer:
        writer.write({"frames": 2})
    assert read_metrics(path) == [{"frames": 1}, {"frames": 2}]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_refused_with_the_bytes_needed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    with (
        closing(MetricsWriter(path)) as writer,
        refused(ResourceError, "left needed") as caught,
    ):
        writer.write({"frames": 1})
    assert caught.value.exit_code == 5


def test_a_line_that_only_half_fits_is_taken_back(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.write({"frames": 1})

    class HalfFull:
        """The disk takes four more bytes."""

        def __init__(self, file):
            self.file, self.left = file, 4

        def write(self, data):
            if not self.left:
                raise OSError(28, "No space left on device")
            taken, self.left = self.file.write(data[: self.left]), 0
            return taken

        def fileno(self):
            return self.file.fileno()

    monkeypatch.setattr(writer, "_file", HalfFull(writer._file))
    with pytest.raises(ResourceError):
        writer.write({"frames": 2})
    monkeypatch.undo()
    writer.close()
    assert path.read_text() == '{"frames":1}\n'


def test_a_folder_that_vanished_is_noticed(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with closing(MetricsWriter(folder / "metrics.jsonl")) as writer:
        shutil.move(folder, tmp_path / "elsewhere")
        refused(ResourceError, "removed", lambda: writer.write({"frames": 1}))


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    refused(ResourceError, "metrics.jsonl", lambda: MetricsWriter(tmp_path / "no" / "metrics.jsonl"))


def test_tensorboard_is_optional_unless_asked_for(monkeypatch):
    monkeypatch.setattr("rlcli.report.metrics.has", lambda package: False)
    assert wants_tensorboard("auto") is False
    monkeypatch.setattr("rlcli.config.installed.has", lambda package: False)
    for logger in ("wandb", "tensorboard"):
        with refused(ConfigError, logger):
            configure("train", [f"logger={logger}"])


def test_tensorboard_reads_back_what_a_resumed_run_kept(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    # files of one second are read in the order of their names, in which a process's tenth comes before its ninth
    monkeypatch.setattr(event_file_writer, "_global_uid", type(event_file_writer._global_uid)(0))
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsWriter(path, logger="tensorboard")) as writer:
        for frames in (10, 20, 30):
            writer.write({"frames": frames, "kl": frames / 10, "bad": float("nan"), "stages": {"env": 0.5}})
    with closing(MetricsWriter(path, logger="auto", resume_at=20)) as writer:
        writer.write({"frames": 30, "kl": 9.0})
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("learning/kl")] == [(10, 1.0), (20, 2.0), (30, 9.0)]
    assert "stages/env" in events.Tags()["scalars"] and "bad" not in events.Tags()["scalars"]


def test_tensorboard_gets_sections_the_settings_and_the_closing_evaluation(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with closing(MetricsWriter(tmp_path / "metrics.jsonl", logger="tensorboard")) as writer:
        writer.settings({"env.id": "CartPole-v1", "optim.lr": 1e-3, "policy.hidden": [64, 64], "loss.target_kl": None})
        record = {
            "frames": 10,
            "kl": 1.0,
            "return": 2.0,
            "approximated": 0,
            "frames_per_second": 9.0,
            "eval_return": 5.0,
        }
        writer.write(record | {"memory": {"rollout": 3}})
        writer.evaluation(10, {"mean_return": 7.0, "returns": [7.0], "cut": 0})
    events = EventAccumulator(str(tmp_path)).Reload()
    sections = {"learning/kl", "episodes/return", "rows/approximated", "throughput/frames_per_second", "memory/rollout"}
    assert sections < set(events.Tags()["scalars"])
    assert [event.value for event in events.Scalars("evaluation/return")] == [5.0, 7.0]
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"env.id" in content and b"CartPole-v1" in content and b"[64, 64]" in content


@pytest.mark.parametrize("error", [ResourceError("no text"), OSError(28, "No space left on device")])
def test_what_is_open_is_closed_where_the_events_are_refused(tmp_path, monkeypatch, error):
    opened = []

    def refuse(*args):
        opened.extend(held_open())
        raise error

    monkeypatch.setattr(events, "EventsWriter", refuse)
    with pytest.raises(ResourceError):
        MetricsWriter(tmp_path / "metrics.jsonl", logger="auto")
    assert str(tmp_path / "metrics.jsonl") in opened
    assert str(tmp_path / "metrics.jsonl") not in held_open()


@pytest.mark.parametrize("method", ["settings", "write", "flush", "close"])
def test_a_logger_that_raises_is_named_once_and_ends_nothing(tmp_path, method):
    called, warned = [], []

    class Mine:
        def __getattr__(self, name):
            def call(*arguments):
                called.append(name)
                if name == method:
                    raise RuntimeError("the server is gone")

            return call

    with closing(MetricsWriter(tmp_path / "metrics.jsonl", logger=lambda *given: Mine(), warn=warned.append)) as writer:
        writer.settings({"seed": 1})
        for frames in (1, 2):
            writer.write({"frames": frames})
            writer.flush()
        writer.evaluation(2, {})
    assert called.count(method) == 1 and called[-1] == method
    failed = "failed: RuntimeError: the server is gone; metrics.jsonl has all figures"
    assert warned == [f"the logger is off from here on, Mine.{method} {failed}"]
    assert [record["frames"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def held_open() -> list[str]:
    return [file.path for file in psutil.Process().open_files()]
