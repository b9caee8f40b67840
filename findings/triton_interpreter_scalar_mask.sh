#!/usr/bin/env bash
# Triton 3.9.0 with NumPy 2.4.6: a mask that is a block's comparison AND a comparison of a scalar argument, as a loop over
# time has it, compiles for a GPU (sm_90), and fails in Triton's own interpreter: "mask has unsupported dtype". With a
# comparison of two blocks it runs. So a kernel that is only tested interpreted seems wrong where it is right.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet "triton==3.9.0" "numpy==2.4.6" "torch==2.13.0"
cat > "$work/kernel.py" <<'PY'
import triton
import triton.language as tl


@triton.jit
def total(x, y, steps, SCALAR: tl.constexpr):
    unit = tl.arange(0, 8)
    found = tl.zeros((8,), tl.float32)
    for step in tl.range(0, steps):
        if SCALAR:
            there = (unit < 5) & (step < steps)
        else:
            there = (unit < 5) & (unit * 0 + step < steps)
        found += tl.load(x + step * 8 + unit, there, other=0.0)
    tl.store(y + unit, found)
PY
cd "$work"
"$work/venv/bin/python" - <<'PY'
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernel import total

types = {"x": "*fp32", "y": "*fp32", "steps": "i32", "SCALAR": "constexpr"}
found = triton.compile(ASTSource(total, types, constexprs={"SCALAR": True}), target=GPUTarget("cuda", 90, 32))
print(f"triton {triton.__version__}: compiled for sm_90, {len(found.asm['cubin'])} bytes")
PY
TRITON_INTERPRET=1 "$work/venv/bin/python" - <<'PY'
import torch

from kernel import total

x, y = torch.ones(3, 8), torch.zeros(8)
total[1,](x, y, 3, False)
assert y.tolist() == [3.0] * 5 + [0.0] * 3
try:
    total[1,](x, y, 3, True)
except Exception as error:
    assert "mask has unsupported dtype" in str(error), error
    print(f"interpreted: {type(error).__name__}: {error}")
else:
    raise SystemExit("it was interpreted")
PY
