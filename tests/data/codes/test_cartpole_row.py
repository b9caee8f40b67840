"""Bytes of a stored step of a real CartPole: 8 envs, ids, one-hot actions, root flags, index and side pool included."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule

from rlcli.collectors import Collector
from rlcli.data import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer, full_next_obs
from rlcli.envs import GymEnv, SerialEnv

LIMIT = 30


class _Balance(torch.nn.Module):
    """Keeps the pole up for all 500 steps."""

    def forward(self, observation):
        lean = observation @ torch.tensor([0.05, 0.1, 1.0, 0.5])
        return torch.nn.functional.one_hot((lean > 0).long(), 2)


@pytest.mark.parametrize(
    "frames", [pytest.param(8_000, id="few"), pytest.param(100_000, id="many", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("play", ["random", "balance"])
def test_a_row_takes_at_most_thirty_bytes(play, frames, tmp_path):
    policy = None
    if play == "balance":
        policy = TensorDictModule(_Balance(), in_keys=["observation"], out_keys=["action"])
    env = SerialEnv(8, lambda: GymEnv("CartPole-v1"))
    collector = Collector(env, policy, frames_per_batch=1000, total_frames=frames, next_obs="exact", seed=0)
    kept = LazyMemmapStorage(frames, scratch_dir=tmp_path / "rows")
    kinds = (LazyTensorStorage(frames), LazyTensorStorage(frames, ndim=2), LazyMemmapStorage(frames), kept)
    buffers = [TensorDictReplayBuffer(storage=storage, batch_size=256, codes={"action": 2}) for storage in kinds]
    written = 0
    for batch in collector:
        wanted = full_next_obs(batch).reshape(-1)
        for rb in buffers:
            rows = rb.extend(batch).numpy()
            held = rb.ring.columns(rows)
            for key, column in held.items():
                expected = wanted.get(key)
                assert column.dtype == expected.dtype and torch.equal(column, expected), key
        written += len(rows)
    collector.shutdown()
    for rb in buffers:
        assert len(rb) == written == frames
        if isinstance(rb.storage, LazyTensorStorage):
            assert rb.storage.nbytes == 22 * frames
            assert frames < 100_000 or rb.ring.nbytes <= LIMIT * frames, rb.ring.nbytes / frames
