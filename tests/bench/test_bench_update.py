"""The update bench compares updates that do the same; that part of it is tested."""

import pytest
from face import refused

from rlcli.errors import NumericsError
from tests.bench import update
from tests.bench.settings import BENCHES

pytestmark = pytest.mark.slow

SMALL = ["collector.frames_per_batch=48", "sampler.batch_size=20", "policy.hidden=[8]", "rounds=7"]


@pytest.mark.parametrize("action", [["actions=3"], ["action=box", "actions=2"]])
def test_all_sides_end_with_the_same_weights(action):
    pytest.importorskip("torchrl")
    result = BENCHES.measure("update", [*SMALL, *action]).as_dict()
    assert {side["name"] for side in result["sides"]} == {
        update.OURS,
        update.GENERAL,
        update.HAND,
        update.FUSED,
        "torchrl",
    }
    assert len(result["checks"]) == 4 and len(result["sides"][0]["seconds"]) == 7


def test_a_side_that_does_something_else_is_an_error(monkeypatch):
    monkeypatch.setattr("rlcli.learning.optimizer.Step.__call__", lambda self, figures: {})
    refused(NumericsError, "same", lambda: BENCHES.measure("update", [*SMALL, "peers=False"]))


def test_a_peer_that_is_missing_is_left_out_with_a_line(monkeypatch):
    monkeypatch.setattr("tests.bench.update.torchrl_update", lambda *a, **k: None)
    result = BENCHES.measure("update", SMALL).as_dict()
    assert "torchrl" not in [side["name"] for side in result["sides"]]
    assert "not installed" in result["notes"][0]
