#!/usr/bin/env bash
# torch 2.13.0, plain eager mode on a CPU: `loss.backward()` of a scalar imports nothing; `y.backward(gradient)`, the same
# pass with its gradient given, imports sympy, a computer algebra system, and hundreds of modules with it, by asking
# whether a size is symbolic. So do sums, stacks and cats of meta tensors. Each worker
# process that takes one such step has the time and the memory of that import.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
look() {
    "$folder/venv/bin/python" - "$1" <<'EOF2'
import sys

import torch

x = torch.ones(3, requires_grad=True)
before = len(sys.modules)
assert "sympy" not in sys.modules
exec(sys.argv[1])
print(f"torch {torch.__version__}: {sys.argv[1]:<52} sympy {'sympy' in sys.modules!s:<5}", len(sys.modules) - before, "modules")
sys.exit(10 if "sympy" in sys.modules else 11)
EOF2
}
expect() {
    local got=0
    look "$2" || got=$?
    [ "$got" = "$1" ]
}
expect 11 '(x * 2).sum().backward()'
expect 10 '(x * 2).backward(torch.ones(3))'
expect 10 'torch.stack([torch.empty(4, device="meta")] * 2)'
expect 10 'torch.cat([torch.empty(4, device="meta")] * 2)'
expect 10 'torch.empty(4, device="meta") + 1'
