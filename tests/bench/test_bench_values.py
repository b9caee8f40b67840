"""The benches of advantages and of the value stage compare sides that agree; that part is tested, times are not."""

import pytest

from rlcli.errors import NumericsError
from tests.bench import gae, value
from tests.bench.settings import BENCHES

pytestmark = pytest.mark.slow

VALUE = ["envs=4", "steps=32", "observation=3", "widths=[8]", "num_chunks=2"]


def test_gae_measures_every_shape_against_both_functions():
    pytest.importorskip("torchrl")
    result = BENCHES.measure("gae", ["scale=64"]).as_dict()
    names = {side["name"] for side in result["sides"]}
    shapes = ["[64, 512]", "[256, 2048]", "[4096, 32]", "[200000]"]
    kinds = ("rlcli", "torchrl, loop", "torchrl, vectorised")
    assert names == {f"{shape}: {kind}" for shape in shapes for kind in kinds} | {"skewed: rlcli"}
    bars = [ratio["bar"] for ratio in result["ratios"]]
    assert bars.count("") == 4 and {">= 50", ">= 20", ">= 2", ">= 200"} < set(bars)


def test_gae_does_not_time_a_side_that_is_wrong(monkeypatch):
    wrong = {"torchrl, loop": lambda gamma, lmbda, *columns: gae.generalized_advantage_estimate(gamma, 0.5, *columns)}
    monkeypatch.setattr(gae, "torchrl_estimates", lambda: wrong)
    with pytest.raises(NumericsError, match="not the reference's"):
        BENCHES.measure("gae", ["scale=64"])


def test_value_reports_time_and_peak_of_every_way():
    result = BENCHES.measure("value", VALUE).as_dict()
    assert {side["name"] for side in result["sides"]} == {
        f"8 wide: {way}" for way in (value.TWO, value.ONE, value.SHIFTED, value.CHUNKED, value.BOTH, value.LOWER)
    }
    peaks = {figure["name"]: figure["value"] for figure in result["figures"] if figure["name"].endswith("peak")}
    assert peaks[f"8 wide: {value.CHUNKED}: peak"] < peaks[f"8 wide: {value.TWO}: peak"]


def test_value_refuses_chunks_that_change_a_number(monkeypatch):
    stage = value._stage
    monkeypatch.setattr(
        value, "_stage",
        lambda net, batch, options: stage(net, batch.apply(lambda x: x + 1 if x.is_floating_point() else x), options)
        if "num_chunks" in options else stage(net, batch, options),
    )  # fmt: skip
    with pytest.raises(NumericsError, match="advantages differ"):
        BENCHES.measure("value", VALUE)
