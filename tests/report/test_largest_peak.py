"""A stage is measured at its largest batch, changes nothing, and costs nothing at others."""

import pytest
import torch

import rlcli
from rlcli.report.largest_peak import LargestPeak


def test_what_stays_is_not_counted():
    stage = LargestPeak()
    with stage.of(8):
        kept = torch.zeros(100)
        torch.zeros(1000).add(1)
    assert stage.bytes == 8000 and kept.numel() == 100


def test_only_the_first_and_larger_batches_are_measured(monkeypatch):
    stage = LargestPeak()
    for rows in (4, 8):
        with stage.of(rows):
            torch.zeros(10 if rows == 8 else 5)
    assert stage.bytes == 40
    monkeypatch.setattr("rlcli.report.largest_peak.LiveBytes", None)  # would fail where it is needed
    with stage.of(8):
        torch.zeros(1000)
    assert stage.bytes == 40


def test_a_stage_that_failed_is_measured_the_next_time():
    stage = LargestPeak()
    with pytest.raises(ZeroDivisionError), stage.of(8):
        torch.zeros(1000)
        1 / 0  # noqa: B018
    assert stage.bytes is None
    with stage.of(8):
        torch.zeros(10)
    assert stage.bytes == 40
    torch.zeros(1000)  # no longer watched
    assert stage.bytes == 40


def test_a_devices_allocator_is_asked():
    class Cuda:
        peak = 900

        def reset_peak_memory_stats(self, device):
            self.peak = 100

        def max_memory_allocated(self, device):
            return self.peak

        def memory_allocated(self, device):
            return 130

    cuda = Cuda()
    stage = LargestPeak("cuda:0", cuda)
    with stage.of(8):
        cuda.peak = 500
    with stage.of(8):
        cuda.peak = 5000
    assert stage.bytes == 370


@pytest.mark.parametrize("memory", ["exact", "compact"])
def test_a_measured_run_learns_what_an_unmeasured_one_learns(memory, tmp_path, monkeypatch):
    overrides = [f"memory={memory}", "value.shifted=true", "value.num_chunks=2", "total_frames=512", "env.num=4"]
    overrides += ["collector.frames_per_batch=256", "optim.epochs=2", "console=off", "logger=none"]
    overrides += ["run.eval_episodes=0"]
    measured = rlcli.train([*overrides, f"run.dir={tmp_path / 'a'}"]).summary
    monkeypatch.setattr(LargestPeak, "__enter__", lambda self: self)
    monkeypatch.setattr(LargestPeak, "__exit__", lambda self, *exc: None)
    plain = rlcli.train([*overrides, f"run.dir={tmp_path / 'b'}"]).summary
    assert measured["memory"]["value_stage"]["measured"] > 0 and plain["memory"]["value_stage"]["measured"] is None
    assert measured["learning"] == plain["learning"]
