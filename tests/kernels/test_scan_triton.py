"""The Triton scan in its interpreter: any shape, stride and block size against the reference; gradients; NaN.

On a machine with a CUDA device the same cases run compiled, on the device; without one the kernel of contiguous rows is
compiled all the same, and launched for a GPU that is not there.
"""

import importlib
import os
import re
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlcli.kernels import scan as package
from rlcli.kernels.scan import reference, scan
from rlcli.objectives.value.functional import generalized_advantage_estimate, td_lambda_return_estimate
from rlcli.objectives.value.reading import Ends

pytest.importorskip("triton")
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def kernels():
    before = os.environ.get("TRITON_INTERPRET")
    if DEVICE == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    from rlcli.kernels.scan import triton

    yield triton
    os.environ.pop("TRITON_INTERPRET", None)
    if before is not None:
        os.environ["TRITON_INTERPRET"] = before


KERNELS = [("rows", torch.float32), ("lanes", torch.float32), ("lanes", torch.float64)]


@pytest.fixture(params=["one block", "carries"])
def small(request, kernels, monkeypatch):
    """Blocks of their own sizes, and of a few steps."""
    if request.param == "carries":
        monkeypatch.setattr(kernels, "STEPS", 8)
        monkeypatch.setattr(kernels, "ROWS", 16)
        if DEVICE == "cpu":  # a compiled kernel has its constants for good
            monkeypatch.setattr(kernels, "LONGEST", type(kernels.LONGEST)(8))
    kernels._sizes.cache_clear()
    yield
    kernels._sizes.cache_clear()


def by(kernels, monkeypatch, which):
    """Let one of the kernels run: that of contiguous rows by what it takes, the other for all."""
    if which == "lanes":
        monkeypatch.setattr(kernels, "_is_plain", lambda *_: False)


def batch(seed, shape, dtype, end_rate=0.2):
    g = torch.Generator().manual_seed(seed)
    cut = torch.rand(shape, generator=g) < end_rate
    terminated = cut & (torch.rand(shape, generator=g) < 0.5)
    reward, value, next_value = (torch.randn(shape, generator=g, dtype=dtype) for _ in range(3))
    return [x.to(DEVICE) for x in (reward, terminated, cut, value, next_value.masked_fill(terminated, float("nan")))]


def close(a, b, dtype):
    return (a - b).abs().max().item() <= TOLERANCE[dtype] * (1 + b.abs().max().item())


def expected(x, *rates):
    lanes = [y if y.ndim == 3 else y.unsqueeze(0) for y in x]
    return [y.reshape(x[0].shape) for y in reference(*lanes, *rates)]


SHAPES = [(1, 1, 1), (3, 7, 2), (5, 9, 1), (33, 4, 1), (2, 70, 1), (40, 1)]


@pytest.mark.parametrize(("which", "dtype"), KERNELS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.every(3)
def test_it_is_the_reference(kernels, monkeypatch, small, shape, which, dtype):
    by(kernels, monkeypatch, which)
    x = batch(sum(shape), shape, dtype)
    for got, want in zip(scan(*x, 0.97, 0.9, backend="triton"), expected(x, 0.97, 0.9, 1.0), strict=True):
        assert got.dtype == dtype and close(got, want, dtype)


def test_carries_pass_through_two_levels_of_blocks(kernels, monkeypatch):
    monkeypatch.setattr(kernels, "STEPS", 4)
    monkeypatch.setattr(kernels, "ROWS", 4)
    x = batch(1, (1, 70, 1), torch.float64, end_rate=0.02)
    got, _ = scan(*x, 0.99, 0.98, backend="triton")
    assert close(got, expected(x, 0.99, 0.98, 1.0)[0], torch.float64)


def test_every_step_has_its_own_rates_and_any_strides(kernels):
    x = [y.transpose(0, 1).contiguous().transpose(0, 1) for y in batch(4, (4, 9, 2), torch.float64)]
    rates = [torch.rand(9, 4, 2, dtype=torch.float64, device=DEVICE).transpose(0, 1) for _ in range(3)]
    for got, want in zip(scan(*x, *rates, backend="triton"), reference(*x, *rates), strict=True):
        assert close(got, want, torch.float64)


@pytest.mark.parametrize(("which", "dtype"), KERNELS)
def test_what_lies_behind_a_cut_may_be_nan(kernels, monkeypatch, small, which, dtype):
    by(kernels, monkeypatch, which)
    x = batch(1, (2, 20, 1), dtype)
    x[2][:, 9] = True
    poisoned = [x[0].clone(), *x[1:]]
    poisoned[0][:, 10:] = float("nan")
    clean, got = (scan(*y, 0.9, 0.8, backend="triton")[0][:, :10] for y in (x, poisoned))
    assert torch.equal(clean, got)


@pytest.mark.parametrize(("which", "dtype"), KERNELS)
@pytest.mark.parametrize("decay", [0.0, 0.9, "some are 0"])
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 9))])
@pytest.mark.every(3)
def test_nan_and_infinity_reach_what_they_reach_in_the_reference(
    kernels, monkeypatch, small, seed, decay, which, dtype
):
    by(kernels, monkeypatch, which)
    g = torch.Generator().manual_seed(seed)
    x = [y.cpu() for y in batch(seed, (3, 14, 1), dtype)]
    for i, bad in ((0, float("nan")), (3, float("nan")), (4, float("inf"))):
        x[i] = x[i].masked_fill(torch.rand(x[i].shape, generator=g) < 0.08, bad)
    if decay == "some are 0":
        decay = torch.rand(x[0].shape, generator=g, dtype=dtype)
        decay = decay.masked_fill(torch.rand(decay.shape, generator=g) < 0.3, 0.0).to(DEVICE)
    x = [y.to(DEVICE) for y in x]
    for got, want in zip(scan(*x, 0.97, decay, backend="triton"), expected(x, 0.97, decay, 1.0), strict=True):
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())
        assert close(got.nan_to_num(0, 0, 0), want.nan_to_num(0, 0, 0), dtype)


def test_gradients_are_those_of_the_reference(kernels):
    x = batch(5, (3, 6, 1), torch.float64)
    rates = [torch.rand(3, 6, 1, dtype=torch.float64, device=DEVICE) for _ in range(3)]
    weights = torch.randn(2, 3, 6, 1, dtype=torch.float64, device=DEVICE)
    found = []
    for backend in ("triton", "reference"):
        inputs = [y.clone().requires_grad_() for y in (x[0], x[3], x[4].nan_to_num(), *rates)]
        out = scan(inputs[0], x[1], x[2], *inputs[1:], backend=backend)
        found.append(torch.autograd.grad(sum((w * y).sum() for w, y in zip(weights, out, strict=True)), inputs))
    for got, want in zip(*found, strict=True):
        assert close(got, want, torch.float64)


def test_a_batch_without_steps_gives_none(kernels):
    assert scan(*batch(0, (2, 0, 1), torch.float32), 0.9, 0.9, backend="triton")[0].shape == (2, 0, 1)


# ---- contiguous rows ------------------------------------------------------------------------------------------------
def ends_at(x, ends):
    reward, terminated, cut, value, next_value = x
    if ends == "truncated":  # the next values count
        return [reward, torch.zeros_like(cut), cut, value, next_value.nan_to_num(0.5)]
    if ends == "everywhere":
        return [reward, terminated, torch.ones_like(cut), value, next_value]
    return x if ends == "some" else [reward, *[torch.zeros_like(cut)] * 2, value, next_value.nan_to_num(0.5)]


@pytest.mark.parametrize("ends", ["some", "everywhere", "truncated", "none"])
@pytest.mark.parametrize("programs", [264, 1])
@pytest.mark.parametrize("size", [(1, 1), (7, 1), (1, 9), (3, 33), (19, 10)], ids=str)
@pytest.mark.every(3)
def test_contiguous_rows_are_the_reference_of_float64_and_the_other_kernel(
    kernels, monkeypatch, small, size, programs, ends
):
    monkeypatch.setattr(kernels, "PROGRAMS", programs)
    x = ends_at(batch(sum(size), (*size, 1), torch.float32, 0.1), ends)
    got = kernels.scan(*x, 0.99, 0.9405, 1.0)
    whole = [y.double() if y.is_floating_point() else y for y in x]
    for a, b in zip(got, reference(*whole, 0.99, 0.9405, 1.0), strict=True):
        assert close(a.double(), b, torch.float32)
    by(kernels, monkeypatch, "lanes")
    for a, b in zip(got, kernels.scan(*x, 0.99, 0.9405, 1.0), strict=True):
        assert close(a, b, torch.float32)


@pytest.mark.parametrize("decay", [0.0, 0.9405, 1.0])
def test_long_rows_go_on_from_block_to_block(kernels, decay):
    x = batch(0, (1, 2 * kernels.LONGEST.value + 3, 1), torch.float32, 0.0005)
    whole = [y.double() if y.is_floating_point() else y for y in x]
    for a, b in zip(kernels.scan(*x, 0.99, decay, 1.0), reference(*whole, 0.99, decay, 1.0), strict=True):
        assert close(a.double(), b, torch.float32)


@pytest.fixture
def launched(kernels, monkeypatch):
    """Calls that contiguous rows were served by."""
    calls, launch = [], kernels._launch
    monkeypatch.setattr(kernels, "_launch", lambda *inputs: (calls.append(inputs), launch(*inputs)))
    return calls


def test_advantages_and_returns_take_the_kernel_of_contiguous_rows(kernels, launched):
    reward, _, _, value, next_value = (y.nan_to_num(0) for y in batch(0, (3, 8, 1), torch.float32))
    terminated = torch.zeros(3, 8, dtype=torch.bool, device=DEVICE)
    cut, terminated = Ends(terminated, terminated.clone()).flags(reward)
    ends = {"done": cut, "terminated": terminated, "backend": "triton"}
    generalized_advantage_estimate(0.99, 0.95, value, next_value, reward, **ends)
    td_lambda_return_estimate(0.99, 0.95, next_value, reward, **ends)
    assert len(launched) == 2


def away(x):
    """The same numbers, at an address that is no multiple of 16 bytes."""
    return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)


OTHERS = {
    "features": lambda x: [y.expand(3, 8, 2).contiguous() for y in x],
    "float64": lambda x: [y.double() if y.is_floating_point() else y for y in x],
    "strides": lambda x: [y.transpose(0, 1).contiguous().transpose(0, 1) for y in x],
    "address": lambda x: [away(y) for y in x],
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_columns_take_the_other_kernel(kernels, launched, what):
    x = OTHERS[what](batch(0, (3, 8, 1), torch.float32))
    for a, b in zip(kernels.scan(*x, 0.9, 0.8, 1.0), reference(*x, 0.9, 0.8, 1.0), strict=True):
        assert close(a, b, torch.float32)
    assert not launched


@pytest.mark.parametrize("rates", [(0.9, 0.8, 0.5), (0.9, 1.1, 1.0), (0.9, "one a step", 1.0)], ids=str)
def test_other_rates_take_the_other_kernel(kernels, launched, rates):
    x = batch(0, (3, 8, 1), torch.float32)
    rates = [torch.full_like(x[0], 0.8) if isinstance(y, str) else y for y in rates]
    for a, b in zip(kernels.scan(*x, *rates), reference(*x, *rates), strict=True):
        assert close(a, b, torch.float32)
    assert not launched


@pytest.mark.skipif(DEVICE == "cpu", reason="graphs are a GPU's")
def test_a_graph_holds_it(kernels):
    x = batch(0, (64, 128, 1), torch.float32)
    kernels.scan(*x, 0.99, 0.9405, 1.0)  # compiles
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        got = kernels.scan(*x, 0.99, 0.9405, 1.0)
    for old, new in zip(x, batch(1, (64, 128, 1), torch.float32), strict=True):
        old.copy_(new)
    graph.replay()
    assert all(map(torch.equal, got, kernels.scan(*x, 0.99, 0.9405, 1.0)))


# ---- the compiler ---------------------------------------------------------------------------------------------------
class Absent:
    """The driver of an H100 that is not there: it takes what is launched."""

    def __init__(self):
        from triton.backends.compiler import GPUTarget

        self.launches, self.utils, self._target = [], self, GPUTarget("cuda", 90, 32)

    def get_current_target(self):
        return self._target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_device_properties(self, device):
        return {"max_shared_mem": 227 * 1024}

    def load_binary(self, *_):
        return object(), 1, 32, 0, 1024  # module, function, registers, spills, threads

    def unload_module(self, module):
        pass

    def launcher_cls(self, src, metadata):
        before = 9  # grid, stream, function, metadata, hooks
        return lambda *given: self.launches.append((given[:3], given[before:]))


@pytest.fixture
def absent(monkeypatch, tmp_path):
    """The kernels as the compiler takes them, and the driver."""
    if DEVICE != "cpu":
        pytest.skip("the other tests compile")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    name = f"{package.__name__}.triton"
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(package, "triton", None, raising=False)
    del sys.modules[name], package.triton
    from triton.runtime import driver

    monkeypatch.setattr(driver, "_active", absent := Absent())
    kernels = importlib.import_module(name)
    yield kernels, absent
    for kernel in kernels._handles.values():
        kernel.module = None  # which no other driver can unload


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_a_call_is_one_launch_and_two_allocations(absent):
    kernels, driver = absent
    for rows in (2, 1, 16):  # of one class: the second and third go to the driver as they are
        x = batch(0, (rows, 64, 1), torch.float32)
        with Operations() as seen:
            outputs = kernels.scan(*x, 0.99, 0.9405, 1.0)
        assert seen.names == ["empty_like"] * 2
        grid, arguments = driver.launches.pop()
        assert not driver.launches and len(kernels._handles) == 1
        assert len(arguments) <= 14 and grid == (-(-rows // 2), 1, 1)
        addresses = [y if isinstance(y, int) else y.data_ptr() for y in arguments[:7]]
        assert addresses == [y.data_ptr() for y in (x[0], *x[3:], *x[1:3], *outputs)]
        assert arguments[7:11] == (0.99, 0.9405, rows, 4)


@pytest.mark.parametrize(
    ("size", "vectors", "shuffles"),
    [((64, 512), 3, 7), ((1024, 128), 3, 7), ((256, 1000), 6, 5.5), ((1024, 1024), 14, 4.75), ((2, 65536), 28, 5.25)],
)
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_what_it_is_compiled_to(absent, size, vectors, shuffles):
    kernels, _ = absent
    kernels.scan(*batch(0, (*size, 1), torch.float32), 0.99, 0.9405, 1.0)
    (found,) = kernels._handles.values()
    _, warps, (_, side, block) = kernels._sizes(*size)

    def count(pattern, of="ptx"):
        return len(re.findall(pattern, found.asm[of]))

    elements = side * block // (32 * warps)  # of a thread
    assert count(r"ld\.global\S*\.v4") >= vectors and count(r"st\.global\S*\.v4") >= elements // 2
    assert count(r"shfl\.") <= shuffles * elements
    assert not count(r"(div|rem)\.[su]64") and not count(r"(STL|LDL)", of="sass")
