"""Work arrays are kept for the sizes in use, not for every size that ever was."""

import torch
from torch import nn

from rlcli.kernels.mlp import Replay, layers_of
from rlcli.kernels.recent import SIZES, Recent


def test_the_oldest_goes():
    kept = Recent()
    for n in range(SIZES + 3):
        kept[n] = n
    kept[SIZES] = -1
    assert list(kept) == list(range(3, SIZES + 3)) and kept[SIZES] == -1


def test_batches_of_many_lengths_leave_few_work_arrays():
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    replay = Replay(layers_of(net), trained=False)
    for n in range(1, 200):
        x = torch.randn(n, 3)
        torch.testing.assert_close(replay.forward(x), net(x).detach())
    assert len(replay._work) == SIZES
