#!/usr/bin/env bash
# tensordict 0.14.3: TensorDict.unflatten takes -1 for a size, as Tensor.unflatten does, and splits the tensors rightly,
# but writes -1 into its own batch size. Nothing is raised until somebody asks for a length, or reshapes; flattening it
# again gives a batch size of -2.
# Seen: [8, 5] unflattened to (2, -1): tensors of [2, 4, 5] in a TensorDict of [2, -1, 5].
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 tensordict==0.14.3 numpy
"$folder/venv/bin/python" - <<'PY'
import tensordict
import torch
from tensordict import TensorDict

rows = TensorDict({"reward": torch.zeros(8, 5)}, [8, 5])
split = rows.unflatten(0, (2, -1))
print(f"tensordict {tensordict.__version__}: tensors of {[*split['reward'].shape]} in a TensorDict of {[*split.shape]}")
assert split["reward"].shape == torch.zeros(8, 5).unflatten(0, (2, -1)).shape == (2, 4, 5)
assert split.shape == (2, -1, 5), split.shape
again = split.flatten(0, 1)
print(f"flattened again: tensors of {[*again['reward'].shape]} in a TensorDict of {[*again.shape]}")
assert again.shape == (-2, 5), again.shape
PY
