"""Triton's kernels of losses in the interpreter, or on a device, and through the compiler for a GPU."""

import importlib
import re
import sys

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = {torch.float32: "fp32", torch.float64: "fp64", torch.int64: "i64", torch.uint8: "u8"}
pytestmark = [
    # numpy's, of -inf and NaN
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]


def fresh(monkeypatch, package):
    """The package's kernels anew: one is the interpreter's or the compiler's from its definition on."""
    for name in ("rlcli.kernels.loss_parts", f"{package.__name__}.triton"):
        room, _, file = name.rpartition(".")
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setattr(sys.modules[room], file, None, raising=False)
        del sys.modules[name]
        delattr(sys.modules[room], file)
    return importlib.import_module(f"{package.__name__}.triton")


def runnable(monkeypatch, package):
    """The kernels in the interpreter, or on a device."""
    from triton import language as tl

    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        # kernels of Triton's own, which were the compiler's when it was imported
        for reduction, combine in (("sum", tl.standard._sum_combine), ("max", tl.standard._elementwise_max)):
            monkeypatch.setattr(tl, reduction, lambda x, axis, combine=combine: tl.reduce(x, axis, combine))
    return fresh(monkeypatch, package)


def spread(x):
    """The same numbers as a column of packed rows, where others lie between them."""
    return torch.stack([x, x.flip(0), x.flip(0)], 1)[:, 0]


class Launches(list):
    """What a call would launch, in place of a kernel."""

    def __init__(self, kernel):
        super().__init__()
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args, **options: self.append((args, options))


def launches(monkeypatch, tmp_path, package, names, call):
    """What `call(kernels)` would launch of each kernel, which the compiler is to take."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DUMP_PTXAS_LOG", "1")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    file = fresh(monkeypatch, package)
    found = [Launches(getattr(file, name)) for name in names]
    for name, one in zip(names, found, strict=True):
        monkeypatch.setattr(file, name, one)
    call(file)
    return found


def need_no_spills(found, capfd):
    """Compile all that is launched for sm_90."""
    for one in found:
        for args, options in [*one]:
            assert compiled(one.kernel, args, options).metadata.shared <= 8192
            said = "".join(capfd.readouterr())
            assert re.findall(r"(\d+) bytes spill", said) == ["0", "0"], said


def compiled(kernel, args, options):
    """The kernel for sm_90."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    warps = {"num_warps": options.pop("num_warps")} if "num_warps" in options else {}
    given = dict(zip(kernel.arg_names, args, strict=False))
    constants = {k: x for k, x in given.items() if isinstance(x, int) and x == 1} | options
    numbers = {int: "i32", float: "fp32"}
    types = {k: f"*{NAMES[x.dtype]}" if isinstance(x, torch.Tensor) else numbers[type(x)] for k, x in given.items()}
    types = {k: "constexpr" if k in constants else types[k] for k in kernel.arg_names}
    aligned = [i for i, k in enumerate(types) if types[k][0] == "*" or (types[k] == "i32" and given[k] % 16 == 0)]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(kernel, types, constexprs=constants, attrs=attributes)
    return compile(source, target=GPUTarget("cuda", 90, 32), options=warps)
