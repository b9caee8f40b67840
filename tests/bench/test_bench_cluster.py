"""The bench of clusters compares sides that collect the same frames; that is tested, and times are not."""

import pytest
from face import refused

from rlcli.errors import NumericsError
from tests.bench import cluster
from tests.bench.settings import BENCHES

pytestmark = pytest.mark.slow

QUICK = ["parts=cartpole", "frames=[64]", "round=64", "rounds=7", "peers=false"]


def test_workers_elsewhere_are_compared_with_those_of_this_machine(monkeypatch):
    monkeypatch.setattr(cluster, "KINDS", [cluster.LOCAL, cluster.GLOO])
    result = BENCHES.measure("cluster", QUICK).as_dict()
    assert [ratio["bar"] for ratio in result["ratios"]] == ["", ""]
    assert len(result["sides"]) == 4 and "CartPole, 64: frames of local, gloo" in result["checks"]
    call = cluster.Side.call
    monkeypatch.setattr(cluster.Side, "call", lambda self, *words: call(self, *words) + id(self))
    refused(NumericsError, "64", lambda: BENCHES.measure("cluster", QUICK))


@pytest.mark.parametrize("part", ["bytes", "weights"])
def test_what_travels_meets_its_bars(part):
    pytest.importorskip("ray")
    result = BENCHES.measure("cluster", [f"parts={part}", "calls=1"])
    assert all(figure.met for figure in result.figures) and "NOT empty" not in result.checks.values()
