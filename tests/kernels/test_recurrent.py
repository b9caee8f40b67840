"""GRU and LSTM whose state resets inside the sequence: every backend against the loop, the loop against torch.nn."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from rlcli.errors import ArgumentError
from rlcli.kernels import recurrent
from rlcli.kernels.recurrent import Weights

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
CELLS = ("gru", "lstm")


class Call:
    """Arguments of one call, with everything that can have a gradient."""

    def __init__(self, seed, cell, B, T, I, H, S=None, rate=0.2, bias=True, dtype=torch.float32):  # noqa: E741
        g = torch.Generator().manual_seed(seed)
        S = B + 3 if S is None else S
        gates = recurrent.GATES[cell]

        def new(*shape, scale=1.0):
            return (torch.randn(*shape, generator=g, dtype=dtype) * scale).requires_grad_()

        self.cell, self.x = cell, new(B, T, I)
        self.states = tuple(new(S, H) for _ in range(2 if cell == "lstm" else 1))
        self.weights = Weights(
            new(gates * H, I, scale=I**-0.5), new(gates * H, H, scale=H**-0.5),
            *((new(gates * H), new(gates * H)) if bias else (None, None)),
        )  # fmt: skip
        begins = torch.rand(B, T, generator=g) < rate
        begins[:, :1] = True
        self.source = torch.where(begins, torch.randint(0, S, (B, T), generator=g), -1)

    def run(self, backend="reference", **options):
        found = getattr(recurrent, self.cell)(
            self.x, *self.states, self.source, self.weights, backend=backend, **options
        )
        return found if isinstance(found, tuple) else (found,)

    @property
    def inputs(self):
        return [x for x in (self.x, *self.states, *self.weights) if x is not None]

    def gradients(self, outputs, seed=0):
        g = torch.Generator().manual_seed(seed)
        of = [torch.randn(y.shape, generator=g, dtype=y.dtype) for y in outputs]
        wanted = [x for x in self.inputs if x.requires_grad]
        return torch.autograd.grad(outputs, wanted, of)


def close(a, b):
    assert a.shape == b.shape and a.dtype == b.dtype
    return not b.numel() or (a - b).abs().max() <= TOLERANCE[b.dtype] * (1 + b.abs().max())


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("bias", [True, False])
def test_the_reference_is_torchs_own_on_each_trajectory(cell, bias):
    call = Call(1, cell, B=3, T=11, I=4, H=5, bias=bias, dtype=torch.float64)
    net = getattr(nn, cell.upper())(4, 5, bias=bias, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        for own, given in zip(net.parameters(), (w for w in call.weights if w is not None), strict=True):
            own.copy_(given)
    outputs = call.run()
    for b in range(3):
        begins = [*(call.source[b] >= 0).nonzero().flatten().tolist(), 11]
        for start, end in pairwise(begins):
            row = call.source[b, start]
            first = tuple(s[row][None, None] for s in call.states)
            h, last = net(call.x[b : b + 1, start:end], first if cell == "lstm" else first[0])
            assert close(outputs[0][b, start:end], h[0])
            if cell == "lstm":
                assert close(outputs[1][b, end - 1], last[1][0, 0])
    assert (call.source[:, 1:] >= 0).any() and (call.source[:, 1:] < 0).any()


@pytest.mark.parametrize("cell", CELLS)
def test_nothing_before_a_beginning_reaches_what_follows(cell):
    call = Call(2, cell, B=2, T=9, I=3, H=4, rate=0.0)
    call.source[:, 0], call.source[:, 5] = 0, 4
    clean = [y[:, 5:] for y in call.run("auto")]
    with torch.no_grad():
        call.x[:, :5] = float("nan")
    outputs = call.run("auto")
    assert outputs[0][:, :5].isnan().all()
    assert all(torch.equal(y[:, 5:], kept) for y, kept in zip(outputs, clean, strict=True))
    of_state = call.gradients([y[:, 5:] for y in outputs])[1]
    assert of_state[4].isfinite().all()


def wrong(**changes):
    call = Call(3, changes.pop("cell", "gru"), B=2, T=3, I=4, H=5)
    for name, change in changes.items():
        if name in Weights._fields:
            call.weights = call.weights._replace(**{name: change(getattr(call.weights, name))})
        elif name in ("state", "memory"):
            at = ("state", "memory").index(name)
            call.states = tuple(change(s) if i == at else s for i, s in enumerate(call.states))
        else:
            setattr(call, name, change(getattr(call, name)))
    with pytest.raises(ArgumentError) as caught:
        call.run("auto")
    return str(caught.value)


def test_a_call_that_cannot_be_says_why():
    assert wrong(x=lambda x: x[0]) == "x has the wrong shape: [B, T, I] is wanted, got [3, 4]"
    assert wrong(x=lambda x: x.long()) == "x is torch.int64: a recurrent net's inputs are floats. Use x.float()."
    assert wrong(x=lambda x: x[..., :3]) == "weights.ih has the wrong shape: [15, 3] is wanted, got [15, 4]"
    assert wrong(hh=lambda w: w[:9]) == "weights.hh has the wrong shape: [3 H, H] is wanted for a GRU, got [9, 5]"
    assert wrong(bias_hh=lambda b: b[:9]) == "weights.bias_hh has the wrong shape: [15] is wanted, got [9]"
    assert wrong(state=lambda s: s[0]) == "state has the wrong shape: [5, 5] is wanted, got [5]"
    assert wrong(state=lambda s: s[:0]) == "state has no rows: every sequence begins from one"
    said = wrong(cell="lstm", memory=lambda s: s[:1])
    assert said == "cell has the wrong shape: [5, 5] is wanted, got [1, 5]"
    assert wrong(state=lambda s: s.double()) == (
        "state is torch.float64: torch.float32 is wanted. Use state.to(torch.float32)."
    )
    assert wrong(source=lambda s: s.int()).startswith("source is torch.int32: torch.int64 is wanted")
    assert wrong(source=lambda s: s[:, :2]) == "source has the wrong shape: [2, 3] is wanted, got [2, 2]"
    assert wrong(source=lambda s: s.clamp(max=-1)) == (
        "source is -1 at a sequence's first step: there is no step before it to go on from"
    )
    assert wrong(source=lambda s: s.clamp(min=5)) == "source names row 5 of state: there are 5, and -1 for none"
    assert wrong(state=lambda s: s.to("meta")) == "state is on meta, but x is on cpu"


def test_a_backend_that_cannot_serve_says_why():
    call = Call(3, "gru", B=2, T=3, I=4, H=5)
    with pytest.raises(ArgumentError, match=r"unknown backend 'cuda'\. Choose one of auto, reference, pad"):
        call.run("cuda")


@pytest.mark.parametrize("cell", CELLS)
def test_shapes_without_numbers(cell):
    call = Call(4, cell, B=2, T=3, I=4, H=5)
    call.x, call.source = call.x.to("meta"), call.source.to("meta")
    call.states = tuple(s.to("meta") for s in call.states)
    call.weights = Weights(*(w.to("meta") for w in call.weights))
    assert all(y.is_meta and y.shape == (2, 3, 5) for y in call.run("auto"))


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_nothing_gives_nothing(cell, shape):
    call = Call(5, cell, *shape, I=4, H=5)
    assert all(y.shape == (*shape, 5) for y in call.run("auto"))
