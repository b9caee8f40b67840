"""However a run ends, its report says how, its collector is shut down, and the first error is the one that is told."""

from __future__ import annotations

import pytest

import rlcli
from rlcli.collectors import Collector
from rlcli.config.compose import configure
from rlcli.errors import EnvError, ResourceError
from rlcli.jobs import collect, train
from rlcli.report import closing
from rlcli.runs.folder import open_run

WORDS = ["total_frames=512", "collector.frames_per_batch=128", "console=off", "run.dir=r"]


@pytest.fixture(params=["train", "collect"])
def start(request, tmp_path, monkeypatch):
    """`start(error)`: a run whose second batch raises it; how often its collector was shut down is `start.closed`."""
    monkeypatch.chdir(tmp_path)
    rollout, shutdown = Collector.rollout, Collector.shutdown
    shut = []

    def count(self):
        shut.append(self)
        shutdown(self)

    def start(error: BaseException):
        def fails(self, *args, **options):
            if self.frames >= 128:
                raise error
            return rollout(self, *args, **options)

        monkeypatch.setattr(Collector, "rollout", fails)
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
    saved = summary["verb"] == "collect"  # training has saved no checkpoint yet: nothing can be resumed or evaluated
    assert set(summary["commands"]) == ({"read", "resume"} if saved else set())


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
    assert any("ratio of policies" in warning["text"] for warning in run.summary["warnings"]) is warned
