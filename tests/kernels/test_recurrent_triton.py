"""The GRU and LSTM in Triton's interpreter: outputs and gradients against the loop, whether weights fit or not.

On a machine with a CUDA device the same cases run compiled, on the device; without one the compiler runs all the same,
for a GPU that is not there.
"""

import importlib
import os
import re
import sys
import time

import pytest
import torch

from rlcli.errors import ArgumentError
from rlcli.kernels import recurrent
from rlcli.kernels.recurrent import Weights, reference

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CELLS = ("gru", "lstm")
MODULES = (f"{recurrent.__name__}.triton", f"{recurrent.__name__}.triton_kernels")
# The interpreter takes products of tf32 in float32. On a device its factors have 11 bits, those of bfloat16 8.
TOLERANCE = {"ieee": 1e-5, "tf32": 1e-5 if DEVICE == "cpu" else 4e-3, "bf16": 2e-2, "float64": 1e-12}


@pytest.fixture(scope="module")
def kernels():
    before = os.environ.get("TRITON_INTERPRET")
    if DEVICE == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    for name in MODULES:  # a kernel is the interpreter's or the compiler's from its definition on
        sys.modules.pop(name, None)
    yield importlib.import_module(MODULES[0])
    for name in MODULES:
        del sys.modules[name]
    os.environ.pop("TRITON_INTERPRET", None)
    if before is not None:
        os.environ["TRITON_INTERPRET"] = before


@pytest.fixture
def together(kernels, monkeypatch):
    """Programs have many sequences."""
    monkeypatch.setattr(kernels, "REGISTERS", 0)


@pytest.fixture(params=["alone", "resident", "streamed"])
def precision(kernels, monkeypatch, request):
    """A program has one sequence, or many and the weights, or many and none of the weights."""
    if request.param != "alone":
        monkeypatch.setattr(kernels, "REGISTERS", 0)
    return "ieee" if request.param == "streamed" else "tf32"


@pytest.fixture
def streamed(kernels, monkeypatch, together):
    """No weights fit a program."""
    monkeypatch.setattr(kernels, "SHARED", kernels.SCRATCH)


@pytest.fixture(params=["one", "sixteen"])
def split(kernels, monkeypatch, request):
    """Programs have some units of one sequence, or of 16; the precision."""
    if DEVICE == "cpu":  # a small GPU: half its registers hold a quarter of the weights of 33 units
        monkeypatch.setattr(kernels, "REGISTERS", 32 * 1024)
        monkeypatch.setattr(kernels, "SHARED", kernels.SCRATCH + 20 * 1024)
        monkeypatch.setattr(kernels, "PROCESSORS", 4 if request.param == "sixteen" else 132)
    return "tf32" if request.param == "sixteen" else "ieee"


def split_call(cell, precision, begins=0.3):
    """A call whose units are split by that fixture."""
    return (
        Call(cell, 3, 4, 2, 33, begins)
        if DEVICE == "cpu"
        else Call(cell, 3 if precision == "ieee" else 100, 64, 2, 256, begins)
    )


class Call:
    """Arguments of one call. `begins` is a rate, or where trajectories begin besides the first step."""

    def __init__(self, cell, B, T, I, H, begins=0.3, S=None, bias=True, dtype=torch.float32, seed=0):  # noqa: E741
        g = torch.Generator().manual_seed(seed)
        gates, S = (4 if cell == "lstm" else 3) * H, S or B + 3

        def new(*shape, scale=1.0):
            return (torch.randn(*shape, generator=g, dtype=torch.float64) * scale).to(DEVICE, dtype).requires_grad_()

        self.cell, self.x = cell, new(B, T, I)
        self.states = [new(S, H) for _ in range(2 if cell == "lstm" else 1)]
        biases = (new(gates), new(gates)) if bias else (None, None)
        self.weights = Weights(new(gates, I, scale=I**-0.5), new(gates, H, scale=H**-0.5), *biases)
        starts = torch.rand(B, T, generator=g) < begins if isinstance(begins, float) else torch.zeros(B, T).bool()
        if not isinstance(begins, float):
            starts[:, begins] = True
        starts[:, 0] = True
        self.source = torch.where(starts, torch.randint(0, S, (B, T), generator=g), -1).to(DEVICE)

    @property
    def inputs(self):
        return [x for x in (self.x, *self.states, *self.weights) if x is not None]

    def run(self, module, **options):
        backend = "reference" if module is reference else "triton"
        return list(recurrent.unroll(self.x, tuple(self.states), self.source, self.weights, backend=backend, **options))

    def everything(self, module, **options):
        """Outputs, then gradients."""
        outputs = self.run(module, **options)
        g = torch.Generator().manual_seed(1)
        of = [torch.randn(y.shape, generator=g, dtype=torch.float64).to(y) for y in outputs]
        return [*outputs, *torch.autograd.grad(outputs, self.inputs, of)]


def furthest(got, want):
    """The largest error of any output or gradient, against the size of what it is of."""
    assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in want]
    return max((a - b).abs().max().item() / (1 + b.abs().max().item()) for a, b in zip(got, want, strict=True))


def check(kernels, call, precision, **options):
    got, want = call.everything(kernels, precision=precision, **options), call.everything(reference)
    assert furthest(got, want) <= TOLERANCE["float64" if call.x.dtype == torch.float64 else precision]


# ---- results --------------------------------------------------------------------------------------------------------
SIZES = [(1, 1, 1, 5), (3, 4, 7, 16), (2, 5, 3, 33), (18, 2, 4, 5), (2, 3, 5, 130)]
BEGINS = {"none": [], "all": slice(None), "first": [1], "last": [-1]}


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.every(3)
def test_outputs_and_gradients_are_the_references(kernels, cell, size, precision, recompute):
    check(kernels, Call(cell, *size, seed=sum(size)), precision, recompute=recompute)


@pytest.mark.parametrize("begins", BEGINS)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.every(3)
def test_trajectories_begin_anywhere(kernels, cell, begins, precision):
    check(kernels, Call(cell, 3, 5, 2, 5, BEGINS[begins]), precision)


@pytest.mark.parametrize("cell", CELLS)
def test_weights_that_fit_give_what_weights_that_do_not_give(kernels, streamed, cell):
    assert not kernels._blocks(torch.empty(3, 6, 4), 4, 33, "tf32", backward=False)["RESIDENT"]
    check(kernels, Call(cell, 3, 6, 4, 33), "tf32")


@pytest.mark.parametrize("begins", [0.3, [], slice(None), [-1]], ids=["some", "none", "all", "last"])
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.every(3)
def test_units_are_split_over_programs(kernels, split, cell, begins):
    call = split_call(cell, split, begins)
    sizes = kernels._blocks(call.x, kernels.GATES[cell], call.states[0].shape[1], split, backward=True)
    assert sizes["RESIDENT"] and sizes["ROWS"] == (16 if split == "tf32" else 1) and sizes["COLUMNS"] < sizes["DEPTH"]
    check(kernels, call, split, recompute=begins == [])


@pytest.mark.parametrize("split", ["sixteen"], indirect=True)
@pytest.mark.parametrize("cell", CELLS)
def test_units_are_split_in_bf16_too(kernels, split, cell):
    check(kernels, split_call(cell, split), "bf16")


def one_program(kernel, programs, place, given, constants):
    """Interpret one program of a launch in a process of its own, and end."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    dimensions, index = builder.set_grid_dim, builder.set_grid_idx
    builder.set_grid_dim, builder.set_grid_idx = lambda *_: dimensions(*programs, 1), lambda *_: index(*place, 0)
    interpreter.GridExecutor._restore_args_dev = lambda *_: None
    try:
        kernel[1, 1](*given, **constants)
        os._exit(0)
    finally:
        os._exit(1)


def at_once(kernel, programs, *given, **constants):
    """Launch every program in a process of its own."""
    for tensor in given:
        if isinstance(tensor, torch.Tensor):
            tensor.share_memory_()
    until, children = time.monotonic() + 120, set()
    for place in [(x, y) for x in range(programs[0]) for y in range(programs[1])]:
        children.add(os.fork())
        if 0 in children:
            one_program(kernel, programs, place, given, constants)
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        assert status == 0
        assert time.monotonic() < until
        children.discard(pid)


@pytest.mark.skipif(DEVICE != "cpu", reason="on a device programs do run at once")
@pytest.mark.parametrize("cell", CELLS)
def test_programs_wait_for_each_other(kernels, monkeypatch, split, cell):
    launch, call = kernels._launch, Call(cell, 1 if split == "ieee" else 3, 4, 2, 33)
    meeting = (kernels.walk_forward, kernels.walk_backward)
    monkeypatch.setattr(kernels, "MEETING", True)
    monkeypatch.setattr(
        kernels, "_launch", lambda k, *given, **c: (at_once if k in meeting else launch)(k, *given, **c)
    )
    check(kernels, call, split)


def test_no_kernel_calls_itself(kernels):
    """Triton 3.3, which torch 2.7 comes with, does not end on one that does."""
    functions = {name: f.fn for name, f in vars(sys.modules[MODULES[1]]).items() if hasattr(f, "fn")}
    assert len(functions) > 10 and not [name for name, fn in functions.items() if name in fn.__code__.co_names]


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("cell", CELLS)
def test_float64_is_whole(kernels, cell, recompute):
    check(kernels, Call(cell, 3, 6, 4, 33, dtype=torch.float64), None, recompute=recompute)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("H", [5, 33], ids=["resident", "streamed"])
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.every(2)
def test_bf16_stays_within_its_error(kernels, monkeypatch, cell, H, recompute):
    if H == 33:
        monkeypatch.setattr(kernels, "SHARED", kernels.SCRATCH)
    call = Call(cell, 3, 4, 4, H)
    error = furthest(call.everything(kernels, precision="bf16", recompute=recompute), call.everything(reference))
    assert 1e-4 < error <= TOLERANCE["bf16"]  # the lower end: it is not float32


@pytest.mark.parametrize("cell", CELLS)
def test_without_biases(kernels, cell):
    check(kernels, Call(cell, 2, 3, 4, 5, bias=False), "ieee")


@pytest.mark.parametrize("cell", CELLS)
def test_a_state_may_be_shared_by_all(kernels, cell, precision):
    check(kernels, Call(cell, 3, 5, 2, 5, S=1), precision)


@pytest.mark.parametrize("cell", CELLS)
def test_any_strides(kernels, cell):
    call = Call(cell, 3, 5, 4, 6)
    for name in ("x", "source"):
        old = getattr(call, name).detach()
        new = old.transpose(0, 1).contiguous().transpose(0, 1)
        setattr(call, name, new.requires_grad_(old.is_floating_point()))
    call.states = [s.detach().t().contiguous().t().requires_grad_() for s in call.states]
    check(kernels, call, "ieee")
    outcomes = []
    for module, options in ((kernels, {"precision": "ieee"}), (reference, {})):
        out = call.run(module, **options)[0]
        gradient = torch.linspace(0, 1, 90, device=DEVICE).view(6, 3, 5).permute(1, 2, 0)  # and one that is spread out
        outcomes.append([*torch.autograd.grad(out, call.inputs, gradient, retain_graph=True),
                         *torch.autograd.grad(out.sum(), call.inputs)])  # fmt: skip
    assert furthest(*outcomes) <= TOLERANCE["ieee"]


def test_either_output_of_an_lstm_alone(kernels, precision):
    call = Call("lstm", 2, 4, 3, 5)
    for n in range(2):
        got, want = (
            torch.autograd.grad(call.run(module, **options)[n].square().sum(), call.inputs)
            for module, options in ((kernels, {"precision": precision}), (reference, {}))
        )
        assert furthest(got, want) <= TOLERANCE[precision]


@pytest.mark.parametrize("n", range(6), ids=["x", "state", "ih", "hh", "bias_ih", "bias_hh"])
def test_a_gradient_of_one_input_alone(kernels, n):
    call = Call("gru", 2, 4, 3, 5)
    for m, each in enumerate(call.inputs):
        each.requires_grad_(m == n)
    got, want = (
        torch.autograd.grad(call.run(module, **options)[0].square().sum(), call.inputs[n])
        for module, options in ((kernels, {"precision": "ieee"}), (reference, {}))
    )
    assert furthest(got, want) <= TOLERANCE["ieee"]


@pytest.mark.parametrize("cell", CELLS)
def test_a_second_backward_pass_finds_the_same(kernels, cell, precision):
    call = Call(cell, 3, 5, 2, 5)
    loss = sum(y.square().sum() for y in call.run(kernels, precision=precision))
    first, second, third = (torch.autograd.grad(loss, call.inputs, retain_graph=True) for _ in range(3))
    assert furthest(second, first) <= TOLERANCE[precision]
    assert all(map(torch.equal, second, third))


@pytest.mark.parametrize("cell", CELLS)
def test_a_gradient_can_be_differentiated(kernels, cell):
    call = Call(cell, 2, 4, 3, 5)
    outcomes = []
    for module, options in ((kernels, {"precision": "ieee"}), (reference, {})):
        loss = sum(y.sum() for y in call.run(module, **options))
        of_loss = torch.autograd.grad(loss, call.inputs, create_graph=True)
        outcomes.append(torch.autograd.grad(sum(g.square().sum() for g in of_loss), call.inputs))
    assert furthest(*outcomes) <= TOLERANCE["ieee"]


@pytest.mark.parametrize("cell", CELLS)
def test_nan_stays_in_its_trajectory(kernels, cell, precision):
    call = Call(cell, 2, 6, 3, 5, begins=[3])
    with torch.no_grad():
        call.x[0, 1] = float("nan")
        call.x[1, 4] = float("nan")
    outputs = call.run(kernels, precision=precision)
    for y in outputs:
        spoilt = y.isnan().all(-1)
        assert torch.equal(spoilt, y.isnan().any(-1))
        assert spoilt.nonzero().tolist() == [[0, 1], [0, 2], [1, 4], [1, 5]]
    (found,) = torch.autograd.grad(sum(y.nan_to_num().sum() for y in outputs), call.x)
    assert found.isnan().any(-1).nonzero().tolist() == [[0, 0], [0, 1], [0, 2], [1, 3], [1, 4], [1, 5]]


@pytest.mark.parametrize("cell", CELLS)
def test_without_gradients_the_numbers_are_the_same(kernels, cell, precision):
    call = Call(cell, 3, 5, 2, 5)
    with torch.no_grad():
        plain = call.run(kernels, precision=precision)
    assert all(map(torch.equal, plain, call.run(kernels, precision=precision)))


# ---- what is kept ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("precision", ["ieee", "bf16"])
@pytest.mark.parametrize("cell", CELLS)
def test_what_is_kept_for_the_backward_pass(kernels, cell, precision, recompute):
    call = Call(cell, 3, 5, 4, 8)
    given = {id(x) for x in (*call.inputs, call.source)}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        call.run(kernels, precision=precision, recompute=recompute)
    ours = [x for x in kept if id(x) not in given]
    steps = 3 * 5 * 8
    outputs = len(call.states) * steps * 4
    gates = 0 if recompute else 4 * steps * (2 if precision == "bf16" else 4)
    assert sum(x.untyped_storage().nbytes() for x in ours) == outputs + gates


# ---- what it refuses ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("dtype", "precision", "why"),
    [
        (torch.float16, None, "it takes float32 and float64, and the tensors are torch.float16"),
        (torch.float32, "fp8", "it has no precision 'fp8', but ieee, tf32, bf16"),
        (torch.float64, "tf32", "tf32 is a precision of float32, and the tensors are float64"),
    ],
)
def test_why_it_refuses_a_call(kernels, dtype, precision, why):
    call = Call("gru", 2, 2, 2, 3, dtype=dtype)
    assert kernels.refusal(call.x, call.weights, precision) == why
    with pytest.raises(ArgumentError, match=f"the triton backend cannot be used here: {why}"):
        call.run(kernels, precision=precision)


def test_it_refuses_a_cpu_without_the_interpreter_and_weights_it_cannot_count(kernels, monkeypatch):
    x, hh = torch.empty(1, 1, 1, device="meta"), torch.empty(3 * 30000, 30000, device="meta")
    why = kernels.refusal(x, Weights(hh, hh, None, None))
    assert why == "it counts recurrent weights in 32 bits, and 30000 units have 2700000000 of them"
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    why = kernels.refusal(torch.empty(1, 1, 1), Call("gru", 1, 1, 1, 1).weights)
    assert why == "it runs on CUDA devices, and the tensors are on cpu"


@pytest.mark.parametrize("told", ["tf32", "ieee"])
def test_the_precision_is_that_of_torchs_own_on_a_gpu(kernels, monkeypatch, told):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", told == "tf32")
    assert kernels._default_precision(torch.empty(1)) == told
    assert kernels._default_precision(torch.empty(1, dtype=torch.float64)) == "ieee"


# ---- the compiler ---------------------------------------------------------------------------------------------------
INTEGERS = ("begin", "end", "rows", "steps", "size", "pitch", "wide", "one", "h0", "h1", "h2", "c0", "c1", "c2")


@pytest.fixture
def for_a_gpu(monkeypatch, tmp_path):
    """The kernels as the compiler takes them."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    monkeypatch.setattr(recurrent, "triton", None, raising=False)
    del recurrent.triton
    return importlib.import_module(MODULES[0])


def compiled(kernels, kernel, float_, precision, H, is_lstm, *, B, **constants):
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    x = torch.empty(B, 1, 1, dtype=getattr(torch, float_), device="meta")
    sizes = kernels._blocks(x, 4 if is_lstm else 3, H, precision, backward=kernel == "walk_backward")
    warps = sizes.pop("num_warps")
    constants |= {"LSTM": is_lstm, "IH": True, "HH": True, **sizes}
    types = {name: "constexpr" for name in constants}
    kind = "bf16" if precision == "bf16" else {"float32": "fp32", "float64": "fp64"}[float_]
    fn = getattr(kernels, kernel)
    for name in fn.arg_names:
        whole = "i32" if name in INTEGERS else {"source": "*i64", "counters": "*i32"}.get(name)
        factor = name in ("gates", "weight")
        types.setdefault(name, whole or "*" + (kind if factor else {"float32": "fp32", "float64": "fp64"}[float_]))
    types = {name: types[name] for name in fn.arg_names}
    aligned = [
        name for name in types if types[name][0] == "*" or name == "pitch" or (name in ("size", "wide") and H % 16 == 0)
    ]
    attributes = {(list(types).index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn, types, constexprs=constants, attrs=attributes)
    options = {"num_warps": warps, "launch_cooperative_grid": sizes["RESIDENT"] and sizes["COLUMNS"] < sizes["DEPTH"]}
    found = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert found.metadata.shared <= kernels.SHARED, (kernel, precision, H, found.metadata.shared)
    return found, sizes


def barriers(found):
    return len(re.findall(r"(?:gpu|ttg)\.barrier", found.asm["ttgir"]))


@pytest.mark.skipif(DEVICE != "cpu", reason="the other tests compile")
@pytest.mark.parametrize(
    ("is_lstm", "float_", "precision", "H", "B"),
    [
        (False, "float64", "ieee", 64, 999), (False, "float32", "tf32", 128, 999), (False, "float32", "bf16", 256, 999),
        (False, "float32", "tf32", 130, 16), (True, "float32", "bf16", 128, 999), (True, "float32", "ieee", 5, 9999),
        (True, "float32", "bf16", 256, 16), (True, "float32", "tf32", 33, 999), (False, "float32", "ieee", 64, 999),
        (False, "float32", "tf32", 128, 64), (True, "float32", "bf16", 64, 128), (True, "float32", "ieee", 64, 8),
        (False, "float32", "tf32", 256, 128), (True, "float32", "tf32", 256, 256), (True, "float32", "bf16", 512, 64),
        (False, "float32", "ieee", 256, 8),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.every(4)
def test_the_compiler_takes_it_for_a_gpu(for_a_gpu, is_lstm, float_, precision, H, B):
    keep, spilt = H % 2 == 0, re.compile(r"\b(LDL|STL)\b")
    meets = re.compile(r"\.gpu\.(release|acquire)\.|\.(release|acquire)\.gpu\.")
    found, sizes = compiled(for_a_gpu, "walk_forward", float_, precision, H, is_lstm, B=B, KEEP=keep)
    split = sizes["RESIDENT"] and sizes["COLUMNS"] < sizes["DEPTH"]
    if sizes["RESIDENT"]:  # loaded before the loop over steps, and never in it
        before, loop = found.asm["ttgir"].split("scf.for", 1)
        parts, depth = sizes["PARTS"], sizes["DEPTH"]
        depth = f"{parts}x{depth // parts}" if split and sizes["ROWS"] > 1 else depth
        side = f"tensor<{depth}x{sizes['COLUMNS']}x!tt.ptr"
        assert side in before and side not in loop
    else:  # threads wait for what others stored; the interpreter has one thread, so no result shows it
        assert barriers(found) == 1 + keep
    assert len(meets.findall(found.asm["ptx"])) == (2 if split else 0)
    held = sizes["RESIDENT"] or (precision, float_) == ("ieee", "float32")
    assert not (held and spilt.search(found.asm["sass"]))
    found, sizes = compiled(for_a_gpu, "walk_backward", float_, precision, H, is_lstm, B=B, AGAIN=not keep, STARTS=keep,
                            OF_H=True, OF_C=keep)  # fmt: skip
    assert barriers(found) == (3 if split else 1 if sizes["RESIDENT"] else 4)
    assert len(meets.findall(found.asm["ptx"])) == (2 if split else 0)
    assert not (held and spilt.search(found.asm["sass"]))
