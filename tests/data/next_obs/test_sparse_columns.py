"""Columns of which few rows are kept, over many writes."""

import math

import numpy as np
import torch

from rlcli.data.next_obs.sparse import Sparse, SparseColumns


def test_a_ring_that_goes_round_keeps_room_for_little_more_than_is_live():
    columns, live, width = SparseColumns(), 400, 16
    for first in range(0, 4000, 20):
        numbers = np.arange(first, first + 20)
        rows = torch.full((20, width), float(first)) + torch.arange(1, 21).unsqueeze(1)
        columns.put({"state": Sparse(torch.arange(20), rows, math.nan)}, numbers, max(0, first + 20 - live))
        assert columns["state"].nbytes <= 1.5 * max(min(first + 20, live), 20) * (4 * width + 16)
    read = columns.read("state", np.arange(3600, 4000), torch.device("cpu")).full()
    expected = torch.arange(3600, 4000) // 20 * 20 + torch.arange(3600, 4000) % 20 + 1
    assert torch.equal(read, expected.float().unsqueeze(1).expand(400, width))
