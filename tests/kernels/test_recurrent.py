"""GRU and LSTM whose state resets inside the sequence: every backend against the loop, the loop against torch.nn."""

from itertools import pairwise

import pytest
import torch
from face import refused
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.autograd import forward_ad

from rlcli.errors import ArgumentError
from rlcli.kernels import recurrent
from rlcli.kernels.recurrent import Weights

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
CELLS = ("gru", "lstm")
FAST = ("cpu", "pad", "scan")


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
        return recurrent.unroll(self.x, self.states, self.source, self.weights, backend=backend, **options)

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


@pytest.fixture
def set_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


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


@pytest.mark.parametrize("backend", ["auto", *FAST, "reference"])
@pytest.mark.parametrize("cell", CELLS)
def test_autocast_leaves_the_state_in_the_dtype_of_the_weights(backend, cell):
    call = Call(20, cell, B=3, T=7, I=5, H=6)
    call.x = call.x.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        found = call.run(backend)
    of_found = call.gradients(found)
    assert of_found[0].dtype == torch.bfloat16
    call.x = call.x.detach().float().requires_grad_()
    expected = call.run()
    assert all(close(y, e) for y, e in zip(found, expected, strict=True))
    assert all(close(g, e) for g, e in zip(of_found[1:], call.gradients(expected)[1:], strict=True))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_threads(cell, recompute, set_threads):
    set_threads(3)
    equal(Call(18, cell, B=50, T=70, I=60, H=70, S=4, rate=0.03), "cpu", recompute=recompute)
    equal(Call(19, cell, B=3, T=7, I=5, H=6), "cpu", recompute=recompute)


VIEWS = {  # of which a reshape to rows is one again, where it can be
    "part of a row": lambda draw: draw(3, 8, 9)[..., 2:6],
    "every other number": lambda draw: draw(3, 8, 8)[..., ::2],
    "every other step": lambda draw: draw(1, 16, 4)[:, ::2],
    "one step": lambda draw: draw(5, 3, 4)[:, 1:2],
    "turned": lambda draw: draw(4, 8, 3).permute(2, 1, 0),
    "one row for all": lambda draw: draw(4).expand(3, 8, 4),
    "one sequence for all": lambda draw: draw(1, 8, 4).expand(3, 8, 4),
    "one number for a row": lambda draw: draw(3, 8, 1).expand(3, 8, 4),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.every(3)
def test_inputs_may_be_views(cell, view, recompute, threads, set_threads):
    set_threads(threads)
    g = torch.Generator().manual_seed(0)
    x = VIEWS[view](lambda *shape: torch.randn(shape, generator=g))
    call = Call(21, cell, *x.shape, H=5)
    call.x = x.requires_grad_()
    for backend in FAST:
        equal(call, backend, recompute=recompute)


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


SIZES = [  # B, T, I, H
    (3, 7, 4, 5), (1, 1, 2, 3), (5, 1, 3, 16), (1, 12, 7, 4), (33, 40, 9, 37),
]  # fmt: skip


def equal(call, backend, **options):
    """Outputs and every gradient are the reference's, and so are outputs that nobody differentiates."""
    expected, found = call.run(), call.run(backend, **options)
    assert all(close(y, e) for y, e in zip(found, expected, strict=True))
    with torch.no_grad():
        assert all(close(y, e) for y, e in zip(call.run(backend, **options), expected, strict=True))
    if any(x.requires_grad for x in call.inputs):
        gradients = call.gradients(found)
        assert all(close(g, e) for g, e in zip(gradients, call.gradients(expected), strict=True))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("backend", FAST)
class TestEqualsTheReference:
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.every(3)
    def test_sizes(self, backend, cell, dtype, recompute, size):
        equal(Call(6, cell, *size, dtype=dtype), backend, recompute=recompute)

    @pytest.mark.parametrize("where", ["none", "all", "first", "last"])
    def test_places_of_beginnings(self, backend, cell, dtype, recompute, where):
        call = Call(7, cell, B=4, T=9, I=3, H=6, rate=float(where == "all"), dtype=dtype)
        at = {"first": 1, "last": -1}.get(where)
        if at is not None:
            call.source[::2, at] = 2
        equal(call, backend, recompute=recompute)

    def test_one_state_for_all(self, backend, cell, dtype, recompute):
        equal(Call(8, cell, B=3, T=8, I=3, H=6, S=1, dtype=dtype), backend, recompute=recompute)

    def test_states_that_nobody_uses(self, backend, cell, dtype, recompute):
        call = Call(8, cell, B=3, T=8, I=3, H=6, S=40, dtype=dtype)
        call.source.clamp_(max=4)
        equal(call, backend, recompute=recompute)
        assert not call.gradients(call.run(backend))[1][5:].any()

    def test_without_bias(self, backend, cell, dtype, recompute):
        call = Call(9, cell, B=3, T=8, I=3, H=6, bias=False, dtype=dtype)
        equal(call, backend, recompute=recompute)
        bias = torch.randn_like(call.weights.ih[:, 0])
        for name in ("bias_ih", "bias_hh"):
            both = call.weights
            call.weights = both._replace(**{name: bias.requires_grad_()})
            equal(call, backend, recompute=recompute)
            call.weights = both

    def test_strides(self, backend, cell, dtype, recompute):
        call = Call(10, cell, B=3, T=8, I=6, H=5, dtype=dtype)
        with torch.no_grad():
            call.x = call.x.transpose(0, 1).contiguous().transpose(0, 1)[..., ::2]
            call.states = tuple(s.t().contiguous().t() for s in call.states)
            call.weights = call.weights._replace(ih=call.weights.ih[:, ::2], hh=call.weights.hh.t().contiguous().t())
            call.source = call.source.t().contiguous().t()
        for x in call.inputs:
            x.requires_grad_()
        equal(call, backend, recompute=recompute)

    def test_gradients_of_some(self, backend, cell, dtype, recompute):
        call = Call(11, cell, B=3, T=8, I=4, H=5, dtype=dtype)
        for wanted in call.inputs:
            for x in call.inputs:
                x.requires_grad_(x is wanted)
            equal(call, backend, recompute=recompute)

    def test_a_gradient_of_one_output(self, backend, cell, dtype, recompute):
        call = Call(12, cell, B=3, T=8, I=4, H=5, dtype=dtype)
        for i in range(len(call.states)):
            of_expected = torch.autograd.grad(call.run()[i].sum(), call.inputs)
            of_found = torch.autograd.grad(call.run(backend, recompute=recompute)[i].sum(), call.inputs)
            assert all(close(g, e) for g, e in zip(of_found, of_expected, strict=True))

    def test_backward_twice(self, backend, cell, dtype, recompute):
        call = Call(13, cell, B=3, T=8, I=4, H=5, dtype=dtype)
        total = sum(y.sum() for y in call.run(backend, recompute=recompute))
        once = torch.autograd.grad(total, call.inputs, retain_graph=True)
        again = torch.autograd.grad(total, call.inputs)
        assert all(torch.equal(g, e) for g, e in zip(again, once, strict=True))


@pytest.mark.parametrize("backend", ["cpu", "pad"])
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_a_gradient_can_be_differentiated(cell, bias, alone, backend):
    call = Call(22, cell, B=3, T=6, I=4, H=5, bias=bias, dtype=torch.float64)
    if alone:
        for x in call.inputs[1:]:
            x.requires_grad_(False)
        call.states = tuple(s.detach() for s in call.states)
    wanted = [x for x in call.inputs if x.requires_grad]
    found = []
    for by in (backend, "reference"):
        loss = call.run(by)[-1].sum()
        of_loss = torch.autograd.grad(loss, wanted, create_graph=True)
        found.append(torch.autograd.grad(loss + sum(g.square().sum() for g in of_loss), wanted))
    assert all(close(g, e) for g, e in zip(*found, strict=True))


def test_the_gradient_of_a_gradient_counts_what_is_made_of_an_input_once():
    call = Call(23, "gru", B=3, T=6, I=5, H=5, S=3, dtype=torch.float64)
    found = []
    for backend in ("cpu", "reference"):
        call.states = (call.x[:, 0].tanh(),)
        loss = call.run(backend)[0].square().sum()
        (of_x,) = torch.autograd.grad(loss, call.x, create_graph=True)
        found.append([of_x, *torch.autograd.grad(of_x.square().sum(), [call.x, call.weights.hh])])
    assert all(close(g, e) for g, e in zip(*found, strict=True))


@pytest.mark.parametrize("cell", CELLS)
def test_what_torch_func_and_forward_differentiation_see(cell):
    call = Call(24, cell, B=3, T=6, I=4, H=5)
    x, source = call.x.detach(), call.source
    states, weights = ([y.detach() for y in given] for given in (call.states, call.weights))

    def features(x, source=source, weights=weights, backend="auto"):
        return recurrent.unroll(x, tuple(states), source, Weights(*weights), backend=backend)[0]

    many = [torch.stack([w, 2 * w]) for w in weights]
    over_weights = torch.vmap(lambda *weights: features(x, weights=weights))(*many)
    assert close(over_weights[1], features(x, weights=[2 * w for w in weights]))
    over_data = torch.vmap(features)(torch.stack([x, -x]), torch.stack([source, source.flip(0)]))
    assert close(over_data[1], features(-x, source.flip(0)))
    of_x = torch.func.grad(lambda x: features(x).sum())(x)
    assert close(of_x, torch.autograd.grad(call.run("cpu")[0].sum(), call.x)[0])
    with torch.no_grad(), forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(features(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
    assert close(tangent.sum(), of_x.sum())
    with refused(ArgumentError, "cpu backend torch.func"):
        torch.func.grad(lambda x: features(x, backend="cpu").sum())(x)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("backend", FAST)
@given(
    st.integers(0, 10_000), st.tuples(st.integers(1, 5), st.integers(1, 12), st.integers(1, 6), st.integers(1, 20)),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.booleans(), st.booleans(), st.sampled_from(list(TOLERANCE)),
)  # fmt: skip
@pytest.mark.every(2)
def test_every_backend_is_the_loop(backend, cell, seed, size, rate, bias, recompute, dtype):
    equal(Call(seed, cell, *size, rate=rate, bias=bias, dtype=dtype), backend, recompute=recompute)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("backend", FAST)
@pytest.mark.every(2)
def test_sizes_that_take_the_big_products(backend, cell):
    equal(Call(14, cell, B=40, T=70, I=100, H=130, rate=0.03), backend)
    equal(Call(15, cell, B=70, T=20, I=130, H=100, rate=0.03), backend, recompute=True)


def test_a_backend_that_cannot_serve_says_why():
    call = Call(3, "gru", B=2, T=3, I=4, H=5)
    with pytest.raises(ArgumentError, match=r"unknown backend 'cuda'\. Choose one of auto, reference, pad"):
        call.run("cuda")
    half = Call(3, "gru", B=2, T=3, I=4, H=5, dtype=torch.bfloat16)
    for backend in FAST:
        with pytest.raises(ArgumentError) as caught:
            half.run(backend)
        assert str(caught.value) == (
            f"the {backend} backend cannot be used here: it takes float32 and float64, and the tensors are "
            "torch.bfloat16. Use backend='auto'"
        )
    assert half.run("auto")[0].dtype == torch.bfloat16


def test_which_backend_is_taken():
    call = Call(3, "gru", B=2, T=3, I=4, H=5)
    assert recurrent.backend_for("auto", call.x, call.weights) == "cpu"
    assert recurrent.backend_for("auto", call.x.half(), call.weights) == "reference"
    assert recurrent.backend_for("pad", call.x, call.weights) == "pad"


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.every(2)
def test_what_torch_compile_traces(cell):
    call = Call(16, cell, B=3, T=6, I=4, H=5)
    compiled = torch.compile(lambda: call.run("auto"), backend="aot_eager", fullgraph=True)
    expected, found = call.run(), compiled()
    assert all(close(y, e) for y, e in zip(found, expected, strict=True))
    assert all(close(g, e) for g, e in zip(call.gradients(found), call.gradients(expected), strict=True))
    with torch.no_grad():
        assert all(close(y, e) for y, e in zip(compiled(), expected, strict=True))
    refused(ArgumentError, "pad backend", lambda: torch.compile(lambda: call.run("pad"), backend="aot_eager")())


@pytest.mark.parametrize("cell", CELLS)
def test_shapes_without_numbers(cell):
    call = Call(4, cell, B=2, T=3, I=4, H=5)
    real = call.gradients(call.run("auto"))
    call.x, call.source = call.x.to("meta").detach().requires_grad_(), call.source.to("meta")
    call.states = tuple(s.to("meta").detach().requires_grad_() for s in call.states)
    call.weights = Weights(*(w.to("meta").detach().requires_grad_() for w in call.weights))
    for backend in ("auto", *FAST, "reference"):
        outputs = call.run(backend)
        assert all(y.is_meta and y.shape == (2, 3, 5) for y in outputs)
        planned = torch.autograd.grad(sum(y.sum() for y in outputs), call.inputs)
        assert [g.shape for g in planned] == [g.shape for g in real]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_what_is_saved_for_the_backward_pass(cell, recompute):
    """Floats a step and unit besides inputs, outputs and weights: the gates and what a GRU's r multiplies, or none."""
    sizes = {}
    for device in ("cpu", "meta"):
        call = Call(17, cell, B=8, T=16, I=32, H=32, S=8)
        x, source = call.x.detach().to(device), call.source.to(device)
        states = [s.detach().to(device).requires_grad_() for s in call.states]
        weights = Weights(*(w.detach().to(device).requires_grad_() for w in call.weights))
        seen = {}

        def pack(y, seen=seen):
            seen[id(y)] = y
            return y

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y):
            outputs = recurrent.unroll(x, tuple(states), source, weights, backend="cpu", recompute=recompute)
        sizes[device] = sorted(y.numel() for y in seen.values())
        assert outputs is not None
    assert sizes["cpu"] == sizes["meta"]
    steps = 8 * 16 * 32
    kept = sum(sizes["cpu"]) - x.numel() - source.numel() - sum(y.numel() for y in (*states, *weights))
    assert kept == steps * (len(states) + (0 if recompute else 4))


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_nothing_gives_nothing(cell, shape):
    call = Call(5, cell, *shape, I=4, H=5)
    assert all(y.shape == (*shape, 5) for y in call.run("auto"))


def test_states_and_weights_are_of_the_inputs_dtype_and_device():
    for change, what in ((torch.Tensor.double, "float64 on cpu"), (lambda y: y.to("meta"), "float32 on meta")):
        state, bias = Call(3, "gru", B=2, T=3, I=4, H=5), Call(3, "gru", B=2, T=3, I=4, H=5)
        state.states = tuple(map(change, state.states))
        bias.weights = bias.weights._replace(bias_hh=change(bias.weights.bias_hh))
        for call in (state, bias):
            with refused(ArgumentError, f"{what} x is float32 on cpu"):
                call.run("auto")
