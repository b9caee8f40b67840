#!/usr/bin/env bash
# jax 0.10.2, torch 2.13.0 on a CPU: whether jax.numpy.from_dlpack shares a tensor's memory hangs on the tensor's
# address. Where that is a multiple of 64 bytes the array is an alias, and a later write in torch changes an array that
# JAX calls immutable; a slice of the same tensor that begins elsewhere is copied without a word. Both are accepted with
# the default copy=None, so a loop that hands rows of one block to JAX sees some of them change and others not.
# Seen: after the block is filled with ones, the rows at 0 and 64 bytes read 1.0, those at 4, 16 and 32 bytes read 0.0.
# With copy=False the latter raise a ValueError, which is the way to find out.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 jax==0.10.2 jaxlib==0.10.2 numpy
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
import torch

block = torch.zeros(64)
assert block.data_ptr() % 64 == 0  # torch's allocator on a CPU
starts = (0, 1, 4, 8, 16)
arrays = {start: jnp.from_dlpack(block[start : start + 16]) for start in starts}
for array in arrays.values():
    array.block_until_ready()
block.fill_(1)
read = {4 * start: float(array[0]) for start, array in arrays.items()}
print(f"jax {jax.__version__}, torch {torch.__version__}: first number by offset in bytes: {read}")
assert read == {0: 1.0, 4: 0.0, 16: 0.0, 32: 0.0, 64: 1.0}, read
try:
    jnp.from_dlpack(block[1:17], copy=False)
except ValueError as error:
    print(f"copy=False: {error}")
else:
    raise SystemExit("copy=False took a tensor that is not aligned")
PY
