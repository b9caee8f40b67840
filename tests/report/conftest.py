"""One snapshot with every part filled, for the views' tests."""

from __future__ import annotations

import pytest

from rlcli.report.clock import Spent
from rlcli.report.view import MemoryRow, Snapshot

KIB = 1024


@pytest.fixture
def snapshot() -> Snapshot:
    own = {
        ("collect", "env"): 900_000_000,
        ("collect", "policy"): 950_000_000,
        ("collect",): 90_000_000,
        ("values",): 83_000_000,
        ("update",): 2_000_000_000,
        ("other",): 40_000_000,
    }
    return Snapshot(
        title="ppo_exact",
        env="CartPole-v1",
        seed=1,
        frames=62_000,
        total_frames=100_000,
        elapsed=9.2,
        spent=Spent(62_000, own),
        memory=[
            MemoryRow("obs", 256 * KIB),
            MemoryRow("next.obs exact", 3 * KIB, None, 253 * KIB),
            MemoryRow("params+optim", 110 * KIB),
            MemoryRow("process RSS", 412 * KIB * KIB, 420 * KIB * KIB),
        ],
        learning={"kl": 0.006, "explained variance": 0.71, "clip fraction": 0.11},
        returns=[1, 2, 5, 20, 50, 100, 250, 312, 400],
        mean_return=312.4,
        mean_length=312.0,
        best=500.0,
        episodes=431,
        approximated=0,
        warnings=[("the last batch was cut to 1,696 frames", 1)],
    )
