"""The bench of recurrent layers compares sides that agree, and weighs what they keep; times are not tested."""

import types

import pytest
import torch
from face import refused

from rlcli.bench.settings import read
from rlcli.cli.bench import answer
from rlcli.errors import ConfigError, NumericsError
from tests.bench import rnn
from tests.bench.settings import BENCHES

pytestmark = pytest.mark.slow

TINY = ["sequences=[3]", "steps=[5]", "units=[4]", "resets=[20]", "seconds=0.001"]
NO_PEERS = [*TINY, "peers=False"]


def names(entries):
    return {entry["name"].rpartition(": ")[2] for entry in entries}


def test_every_backend_is_a_side_of_both_cells_or_says_why_it_cannot_be(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    result = BENCHES.measure("rnn", NO_PEERS).as_dict()
    for cell in ("gru", "lstm"):
        sides = names(side for side in result["sides"] if side["name"].startswith(f"{cell} B3 T5 H4, 20 %: "))
        refused = {name.rpartition(": ")[2] for name in result["refused"] if name.startswith(f"{cell} B3 T5 H4: ")}
        (taken,) = (note.split()[-1] for note in result["notes"] if note.startswith(f"{cell} B3 T5 H4: auto takes "))
        backends = {f"rlcli, {name}" for name in ("reference", "pad", "scan", "cpu", "triton")}
        assert sides | refused == {rnn.FLOOR, rnn.AUTO, rnn.RECOMPUTE, rnn.MODULE, *backends - {f"rlcli, {taken}"}}
        assert refused == {"rlcli, triton"}
    assert all(result["refused"].values())
    assert [ratio["bar"] for ratio in result["ratios"]] == ["<= 1.25", "", ""] * 2


def test_torchrl_runs_beside_and_the_bar_is_against_its_faster_backend():
    pytest.importorskip("torchrl")
    result = BENCHES.measure("rnn", [*TINY, "cell=gru", "backends="]).as_dict()
    theirs = [ratio for ratio in result["ratios"] if ": torchrl" in ratio["over"]]
    ran = {ratio["over"].rpartition(": ")[2] for ratio in theirs}
    assert ran == {"torchrl, pad", "torchrl, scan"}, result["refused"]
    median = {side["name"]: side["median"] for side in result["sides"]}
    faster, slower = sorted(theirs, key=lambda ratio: median[ratio["over"]])
    assert (faster["bar"], slower["bar"]) == (">= 1.5", "")


def test_a_peer_that_lacks_a_package_or_fails_says_so(monkeypatch):
    def fails(td):
        raise RuntimeError("too big for it")

    monkeypatch.setattr(rnn, "torchrl_recurrent", lambda layer: {"scan": "it needs hoptorch", "triton": fails})
    result = BENCHES.measure("rnn", [*TINY, "cell=lstm", "backends="]).as_dict()
    assert result["refused"] == {
        "lstm B3 T5 H4: torchrl, scan": "it needs hoptorch",
        "lstm B3 T5 H4: torchrl, triton": "RuntimeError: too big for it",
    }
    monkeypatch.setattr(rnn, "torchrl_recurrent", lambda layer: {})
    result = BENCHES.measure("rnn", [*TINY, "cell=lstm", "backends="]).as_dict()
    assert any("torchrl is not installed" in note for note in result["notes"])


@pytest.mark.parametrize("wrong", ["ours", "floor", "module"])
def test_a_side_that_computes_something_else_is_not_timed(wrong, monkeypatch):
    right = getattr(rnn.Batch, wrong)

    def off(self, *given, **options):
        outputs, (first, *gradients) = right(self, *given, **options)
        return rnn.Results(outputs, [1.01 * first, *gradients])

    monkeypatch.setattr(rnn.Batch, wrong, off)
    with pytest.raises(NumericsError, match="not the reference's"):
        BENCHES.measure("rnn", [*NO_PEERS, "cell=gru", "backends="])


def test_what_is_saved_is_each_storage_once_without_what_was_there():
    x = torch.randn(1000, requires_grad=True)

    def run():
        y = x.exp()  # keeps its output
        torch.autograd.grad((y * y.view(10, 100).view(-1) * x).sum(), x)  # and y * y, and x

    assert rnn._saved(run, types.SimpleNamespace(given=[x])) == 2 * 4000
    assert rnn._saved(run, types.SimpleNamespace(given=[])) == 3 * 4000
    assert rnn._peak(run, torch.device("cpu")) >= 2 * 4000


def test_memory_is_weighed_once_a_size_and_recompute_saves_less():
    words = ["sequences=[3]", "steps=[40]", "units=[16]", "resets=[20, 0]", "seconds=0.001", "peers=False", "backends="]
    figures = {f["name"]: f for f in BENCHES.measure("rnn", words).as_dict()["figures"]}
    for cell in ("gru", "lstm"):
        own = {name: f["value"] for name, f in figures.items() if name.startswith(f"{cell} B3 T40 H16: ")}
        assert len(own) == 2 * 4 + 2
        saved = {side: own[f"{cell} B3 T40 H16: {side}: saved for backward"] for side in (rnn.AUTO, rnn.RECOMPUTE)}
        assert 0 < saved[rnn.RECOMPUTE] < saved[rnn.AUTO]
    assert sum(f["bar"] == "<= 1.3" for f in figures.values()) == 4


def test_sizes_go_together_and_one_number_serves_all():
    settings = read(BENCHES.settings_of("rnn", []), ["sequences=[1,2]", "steps=[3]", "units=[4,5]"])
    assert rnn._sizes(settings) == [(1, 3, 4), (2, 3, 5)]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["sequences=[1,2,3]", "steps=[1,2]"], "steps has 2 numbers"),
        (["units=[]"], "units has 0 numbers"),
        (["resets=[]"], "resets has 0 numbers"),
        (["backends=cpu,tirton"], "did you mean triton?"),
        (["resets=[101]"], "between 0 and 100"),
    ],
)
def test_what_cannot_be_measured_is_a_sentence(words, sentence):
    with pytest.raises(ConfigError) as error:
        BENCHES.measure("rnn", words)
    assert sentence in str(error.value)


def test_on_a_gpu_a_pass_is_over_when_the_device_is_and_its_bars_are_others(monkeypatch):
    passes, waits = [], []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    names = (rnn.AUTO, rnn.RECOMPUTE, rnn.MODULE, rnn.FLOOR, rnn.PAD, "torchrl, triton")
    sides = {name: rnn.Side(lambda: passes.append(1), rnn.Results([], [])) for name in names}
    report = rnn.Report("rnn", {}, "pass")
    rnn._time(report, "x", sides, torch.device("cuda"), {"rounds": 7, "seconds": 1e-5})
    assert len(waits) == len(passes) > 0
    bars = {(ratio.over[3:], ratio.under[3:]): ratio.bar for ratio in report.ratios if ratio.bar}
    assert bars == {
        (rnn.AUTO, rnn.FLOOR): "<= 1.3",
        (rnn.PAD, rnn.AUTO): ">= 3",
        ("torchrl, triton", rnn.MODULE): ">= 1.5",
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_a_sentence():
    refused(ConfigError, "CUDA GPU", lambda: BENCHES.measure("rnn", ["device=cuda"]))


def test_a_gpu_has_sizes_of_its_own(capsys):
    assert read(BENCHES.settings_of("rnn", ["device=cuda"]), ["device=cuda"])["sequences"] == [128]
    assert answer(BENCHES, ["rnn", "--help", "device=cuda"]) == 0
    assert "units=[256]" in capsys.readouterr().out
