"""The bench of weights compares sides whose workers hold what was sent last; that is tested, and times are not."""

import pytest
from face import refused

from rlcli.errors import NumericsError
from rlcli.weight_update import WeightReceiver
from tests.bench import weights
from tests.bench.settings import BENCHES

pytestmark = pytest.mark.slow

QUICK = ["kilobytes=[40]", "calls=1", "stress=0.1", "rounds=7"]


def test_weights_measures_every_side_that_is_installed():
    pytest.importorskip("torchrl")
    result = BENCHES.measure("weights", QUICK).as_dict()
    sides = {weights.SHARED, weights.TOLD, weights.LEAST, weights.MESSAGES, *weights.THEIRS, weights.THEIRS_ACTING}
    sides |= {weights.CPU, weights.COPIES, weights.FLAT}
    assert {side["name"] for side in result["sides"]} == {f"{side}, 40 KB" for side in sides}
    assert {ratio["bar"] for ratio in result["ratios"]} == {">= 30", "<= 1.5", ""}
    held = {f"held by the workers, {name}" for name in ("shared 40 KB", "messages 40 KB", *weights.THEIRS)}
    assert {*result["checks"]} == {*held, "torn adoptions under stress, 40 KB"}


def test_workers_that_hold_something_else_are_an_error(monkeypatch):
    """The workers are forked, so that they have the receiver that adopts nothing."""
    monkeypatch.setattr(WeightReceiver, "receive", lambda self: 0)
    monkeypatch.setattr(weights, "Worker", lambda target: WORKER(target, start_method="fork"))
    refused(NumericsError, "hold", lambda: BENCHES.measure("weights", [*QUICK, "peers=false"]))


WORKER = weights.Worker
