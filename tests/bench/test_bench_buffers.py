"""The benches of buffers compare sides that hold and draw the same; that part of them is tested, times are not."""

import pytest
import torch
from face import refused

from rlcli.data import TensorDictReplayBuffer
from rlcli.errors import ConfigError, NumericsError
from tests.bench import extend
from tests.bench.buffer_loops import LENGTH, image_rows, numbers_of, seven_keys, small_rows
from tests.bench.settings import BENCHES

pytestmark = pytest.mark.slow

EXTEND = ["rows=50", "capacity=1000", "images=2", "calls=1"]
SAMPLE = ["rows=10_000", "large=100_000", "small=10_000", "images=256", "batch_size=4", "calls=1"]


def test_rows_say_where_they_belong():
    rows = small_rows(390, 30)
    assert torch.equal(numbers_of(rows), torch.arange(390, 420))
    assert torch.equal(rows["collector", "traj_ids"], torch.arange(390, 420) // LENGTH)
    assert rows["next", "done"].nonzero()[:, 0].tolist() == [9] and len(list(seven_keys(0, 2).keys(True, True))) == 7
    assert sum(x.nbytes for x in seven_keys(0, 1).values(True, True)) == 47
    images = image_rows(250, 2)
    assert images["observation"].amax().item() == 250 and images["next", "observation"][0].amax().item() == 0


def test_extend_measures_every_side_that_is_installed():
    pytest.importorskip("torchrl")
    pytest.importorskip("cpprb")
    result = BENCHES.measure("extend", EXTEND).as_dict()
    names = {side["name"] for side in result["sides"]}
    assert names == {"by hand", "rlcli", "rlcli, exact", "torchrl", "cpprb", extend.COPY, extend.BIG, extend.BIG_EXACT,
                     extend.DISK, extend.THEIR_DISK}  # fmt: skip
    assert {"rows that torchrl holds", "rows that cpprb holds", "rows that rlcli, exact holds"} <= set(result["checks"])


def test_a_buffer_that_holds_something_else_is_an_error(monkeypatch):
    write = TensorDictReplayBuffer.extend
    monkeypatch.setattr(TensorDictReplayBuffer, "extend", lambda self, batch: write(self, batch.flip(0)))
    refused(NumericsError, "hold", lambda: BENCHES.measure("extend", [*EXTEND, "peers=false", "memmap=false"]))


def test_sample_checks_what_every_side_draws():
    pytest.importorskip("torchrl")
    result = BENCHES.measure("sample", SAMPLE).as_dict()
    assert {"slices of rlcli, 10,000 rows", "slices of torchrl, 10,000 rows"} <= set(result["checks"])
    assert [r["bar"] for r in result["ratios"] if r["bar"]] == [">= 50", "<= 1.3", ">= 5"]


def test_slices_that_are_not_consecutive_are_an_error(monkeypatch):
    draw = TensorDictReplayBuffer.sample
    monkeypatch.setattr(TensorDictReplayBuffer, "sample", lambda self, *a: draw(self, *a).flip(0))
    refused(NumericsError, "consecutive", lambda: BENCHES.measure("sample", [*SAMPLE, "peers=false"]))
    with pytest.raises(ConfigError, match="slice_len is 201"):
        BENCHES.measure("sample", [*SAMPLE, "slice_len=201"])


def test_a_mistake_is_answered_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr("tests.bench.sample._slices", lambda *_, **__: pytest.fail("it was measured"))
    refused(ConfigError, "less", lambda: BENCHES.measure("sample", ["small=200_000", "large=100_000"]))


def test_a_peer_that_is_missing_is_left_out_with_a_line(monkeypatch):
    for name in ("torchrl", "cpprb"):
        monkeypatch.setattr(f"tests.bench.peers.buffers.{name}_buffer", lambda *a, **k: None)
    result = BENCHES.measure("extend", [*EXTEND, "memmap=false"]).as_dict()
    assert [side["name"] for side in result["sides"]][:3] == ["by hand", "rlcli", "rlcli, exact"]
    assert sum("not installed" in note for note in result["notes"]) == 2
    assert "not installed" in BENCHES.measure("sample", SAMPLE).as_dict()["notes"][0]
