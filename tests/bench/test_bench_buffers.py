"""The benches of buffers compare sides that hold and draw the same; that part of them is tested, times are not."""

import pytest
import torch

from rlcli import bench
from rlcli.bench import extend
from rlcli.bench.buffer_loops import LENGTH, image_rows, numbers_of, seven_keys, small_rows
from rlcli.bench.harness import Figure
from rlcli.data import TensorDictReplayBuffer
from rlcli.errors import ConfigError, NumericsError

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
    result = bench.measure("extend", EXTEND).as_dict()
    names = {side["name"] for side in result["sides"]}
    assert names == {"by hand", "rlcli", "rlcli, exact", "torchrl", "cpprb", extend.COPY, extend.BIG, extend.BIG_EXACT,
                     extend.DISK, extend.THEIR_DISK}  # fmt: skip
    assert {"rows that torchrl holds", "rows that cpprb holds", "rows that rlcli, exact holds"} <= set(result["checks"])


def test_a_buffer_that_holds_something_else_is_an_error(monkeypatch):
    write = TensorDictReplayBuffer.extend
    monkeypatch.setattr(TensorDictReplayBuffer, "extend", lambda self, batch: write(self, batch.flip(0)))
    with pytest.raises(NumericsError, match="does not hold what was written"):
        bench.measure("extend", [*EXTEND, "peers=false", "memmap=false"])


def test_sample_checks_what_every_side_draws():
    pytest.importorskip("torchrl")
    result = bench.measure("sample", SAMPLE).as_dict()
    assert {"slices of rlcli, 10,000 rows", "slices of torchrl, 10,000 rows"} <= set(result["checks"])
    assert [r["bar"] for r in result["ratios"] if r["bar"]] == [">= 50", "<= 1.3", ">= 5"]


def test_slices_that_are_not_consecutive_are_an_error(monkeypatch):
    draw = TensorDictReplayBuffer.sample
    monkeypatch.setattr(TensorDictReplayBuffer, "sample", lambda self, *a: draw(self, *a).flip(0))
    with pytest.raises(NumericsError, match="does not draw slices of consecutive rows"):
        bench.measure("sample", [*SAMPLE, "peers=false"])
    with pytest.raises(ConfigError, match="slice_len is 201"):
        bench.measure("sample", [*SAMPLE, "slice_len=201"])


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("sample", "small=200_000 large=100_000", "small must be less than large"),
        ("memory", "recipes=ppo_exact,ppo_nothing", "unknown recipe 'ppo_nothing'"),
        ("memory", "recipes=collect_random", "collect"),
        ("memory", "games=Pong,Pnog recipes=", "ALE/Pnog-v5"),
        ("collect", "envpool=NoSuchEnv-v0", "NoSuchEnv-v0"),
    ],
)
def test_a_mistake_is_answered_before_anything_is_measured(monkeypatch, name, words, said):
    pytest.importorskip({"games": "ale_py", "envpool": "envpool"}.get(words.partition("=")[0], "torch"))
    for part in ("memory._cartpole", "sample._slices", "collect._against_hand"):
        monkeypatch.setattr(f"rlcli.bench.{part}", lambda *_, **__: pytest.fail("it was measured"))
    with pytest.raises(ConfigError, match=said):
        bench.measure(name, words.split())


def test_a_peer_that_is_missing_is_left_out_with_a_line(monkeypatch):
    for name in ("torchrl", "cpprb"):
        monkeypatch.setattr(f"rlcli.bench.peers.buffers.{name}_buffer", lambda *a, **k: None)
    result = bench.measure("extend", [*EXTEND, "memmap=false"]).as_dict()
    assert [side["name"] for side in result["sides"]][:3] == ["by hand", "rlcli", "rlcli, exact"]
    assert sum("not installed" in note for note in result["notes"]) == 2
    assert "not installed" in bench.measure("sample", SAMPLE).as_dict()["notes"][0]


def test_memory_counts_rows_and_compares_what_comes_back():
    pytest.importorskip("ale_py")
    result = bench.measure(
        "memory", ["games=Pong", "frames=1000", "recipes=", "calls=1", "batch_size=8", "trained=false"]
    ).as_dict()
    figures = {figure["name"]: figure["value"] for figure in result["figures"]}
    pong = [figures[f"ALE/Pong-v5, {tier}"] for tier in ("compressed", "exact, each frame once", "exact, stacks whole")]
    assert sorted(pong) == pong and pong[1] < 8000 and pong[2] < 30_000
    assert figures["CartPole row, exact, packed"] < figures["CartPole row, exact"] < 60
    assert "rows of ALE/Pong-v5" in result["checks"]


def test_a_figure_meets_its_bar_or_not():
    assert Figure("a", 29.0, "B", "<= 30").met and not Figure("a", 31.0, "B", "<= 30").met
    assert Figure("a", 5.0, "x", ">= 5").met and Figure("a", 1.0, "B").met is None
