"""What code holds for a moment: counted operation by operation (on the meta device too), or asked of CUDA."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import rlcli
from rlcli.report.memory import MemoryReport
from rlcli.report.peaks import GIVEN_BACK, LargestPeak, LiveBytes


def test_what_is_made_is_counted_until_it_is_gone():
    with LiveBytes() as live:
        a = torch.zeros(1000)
        b = a + 1
        view = b[10:].view(-1, 2)
        assert live.now == 8000
        del b
        assert live.now == 8000  # the view holds it
        del view
        assert live.now == 4000
        a.add_(1)  # in place: nothing new
    assert live.peak == 8000 and live.kept == 8000


def test_what_was_there_before_is_not_counted():
    a = torch.zeros(1000)
    with LiveBytes() as live:
        a.mul_(2).view(10, 100)
    assert live.peak == 0


def test_large_blocks_are_given_back():
    with LiveBytes() as live:
        big = torch.empty(GIVEN_BACK, dtype=torch.uint8, device="meta")
        small = torch.empty(GIVEN_BACK - 1, dtype=torch.uint8, device="meta")
    assert live.peak == big.nbytes + small.nbytes and live.kept == small.nbytes


@pytest.mark.parametrize(
    ("net", "shape"),
    [
        (nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1)), (32, 4)),
        (nn.Sequential(nn.Conv2d(4, 8, 5, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 18 * 18, 3)), (6, 4, 40, 40)),
    ],
)
def test_on_meta_the_count_is_that_of_real_tensors(net, shape):
    peaks = []
    for device in ("cpu", "meta"):
        net = net.to(device) if device == "cpu" else net.to_empty(device=device)
        x = torch.empty(shape, device=device)
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
        with LiveBytes() as live:
            net(x).sum().backward()
        peaks.append((live.peak, live.kept))
    assert peaks[0] == peaks[1] and peaks[0][0] > 0


def test_a_convolution_that_reorders_holds_more():
    conv, x = nn.Conv2d(1, 1, 3, device="meta"), torch.empty(1, 1, 8, 8, device="meta")

    def peak(device, backward=True):
        with LiveBytes(device=device) as live:
            y = conv(x).sum()
            if backward:
                y.backward()
        return live.peak

    assert peak("cuda:0") >= peak("cpu") > peak("meta")
    assert peak("cuda:0", backward=False) > peak("cpu", backward=False) == peak("meta", backward=False)


def test_a_report_says_what_torch_has_taken_of_a_device_and_what_all_have():
    class Cuda:
        mem_get_info = staticmethod(lambda device: (30, 80))
        max_memory_reserved = staticmethod(lambda device: 20)

    report = MemoryReport([], "full", values=LargestPeak(torch.device("cuda:0"), Cuda()))
    report._stages["update"] = 15
    said = {"cuda:0 peak": 15, "cuda:0 reserved, with graphs": 20, "cuda:0 in use, by all processes": 50}
    assert said.items() <= report.summary()["devices"].items()
    assert {(row.label, row.peak) for row in report.rows()} >= set(said.items())


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
    monkeypatch.setattr("rlcli.report.peaks.LiveBytes", None)  # would fail where it is needed
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
    stage = LargestPeak(torch.device("cuda:0"), cuda)
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
    monkeypatch.setattr(LargestPeak, "of", lambda self, rows: contextlib.nullcontext())
    plain = rlcli.train([*overrides, f"run.dir={tmp_path / 'b'}"]).summary
    assert measured["memory"]["value_stage"]["measured"] > 0 and plain["memory"]["value_stage"]["measured"] is None
    assert measured["learning"] == plain["learning"]
