"""Live bytes are counted the same with and without memory behind the tensors."""

import pytest
import torch
from torch import nn

from rlcli.report.live_bytes import GIVEN_BACK, LiveBytes


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
    peaks = []
    for reorders in (False, True):
        with LiveBytes(reorders=reorders) as live:
            conv(x).sum().backward()
        peaks.append(live.peak)
    assert peaks[1] > peaks[0]
