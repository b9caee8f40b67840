"""`collector.trajs_per_batch` and `collector.split_trajs`: from the words typed to what the estimator is given."""

from __future__ import annotations

import pytest
import torch

from rlcli.keys import ADVANTAGE, DONE, MASK, TRAJ_IDS, TRUNCATED
from rlcli.objectives.value import GAE

ONE_EPOCH = ["optim.epochs=1", "total_frames=2048"]


@pytest.fixture
def learned_from(short_run, monkeypatch):
    """`learned_from(*overrides) -> (batches that the estimator completed, the run)`."""

    def run(*overrides: str):
        batches, forward = [], GAE.forward

        def recorded(self, td):
            forward(self, td)
            if td["observation"].any():  # the plan's, made before the run, are zeros
                batches.append(td.clone())
            return td

        with monkeypatch.context() as patch:
            patch.setattr(GAE, "forward", recorded)
            return batches, short_run(*ONE_EPOCH, *overrides)

    return run


@pytest.mark.parametrize("memory", ["full", "exact", "compact"])
def test_every_update_sees_so_many_whole_trajectories(learned_from, memory):
    batches, run = learned_from("collector.trajs_per_batch=5", f"memory={memory}")
    seen = []
    for batch in batches:
        done = batch.get(DONE).squeeze(-1)
        assert batch.ndim == 1 and bool(done[-1]) and int(done.sum()) == 5
        ids = batch.get(TRAJ_IDS)
        assert torch.equal(ids[1:] != ids[:-1], done[:-1])
        seen += ids[done].tolist()
    assert len(set(seen)) == len(seen) > 20
    frames = sum(batch.numel() for batch in batches)
    (warning,) = [w for w in run.summary["warnings"] if w["kind"] == "leftovers"]
    assert warning["text"].startswith(f"{2048 - frames:,} frames") and run.summary["frames"] == 2048


def test_leftovers_are_learned_from_on_request(learned_from):
    batches, run = learned_from("collector.trajs_per_batch=5", "collector.deliver_leftovers=true")
    assert sum(batch.numel() for batch in batches) == 2048 and bool(batches[-1].get(TRUNCATED).any())
    assert not [w for w in run.summary["warnings"] if w["kind"] == "leftovers"]


@pytest.mark.filterwarnings("ignore:split_trajectories pads")
@pytest.mark.parametrize("memory", ["full", "exact", "compact"])
def test_padded_trajectories_have_the_advantages_of_the_rows_they_are(learned_from, memory):
    plain, padded = (
        learned_from("total_frames=512", f"memory={memory}", *more)[0][0]
        for more in ([], ["collector.split_trajs=true"])
    )
    assert padded.shape[0] > 8 and not bool(padded[MASK].all())
    rows = padded[padded[MASK]]
    assert torch.equal(rows["observation"], plain["observation"].flatten(0, 1))
    assert torch.allclose(rows[ADVANTAGE], plain[ADVANTAGE].flatten(0, 1), atol=1e-5)


def test_chunked_values_are_the_values(learned_from):
    whole, *parts = (
        learned_from("total_frames=512", *more)[0][0]
        for more in ([], ["value.num_chunks=4"], ["value.value_chunk_size=3"])
    )
    for part in parts:
        assert torch.allclose(part[ADVANTAGE], whole[ADVANTAGE], atol=1e-5)
