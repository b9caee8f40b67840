#!/usr/bin/env bash
# tensordict 0.14.3, without pandas: each tensor that a TensorDictModule writes has the import system search for pandas,
# through every folder of sys.path, in every call; the answer is kept nowhere. Conversion from pandas is an option of
# `from_any`, to which a written tensor goes. A policy that writes two keys asks twice a step, on whatever file system the
# packages are. Seen: 100 calls of a module with two out_keys ask 200 times.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 tensordict==0.14.3 numpy
"$folder/venv/bin/python" - <<'EOF'
import importlib.util

import tensordict
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

assert tensordict.__version__.startswith("0.14.3"), tensordict.__version__
assert importlib.util.find_spec("pandas") is None, "this is about an environment without pandas"
module = TensorDictModule(lambda x: (x, x + 1), in_keys=["x"], out_keys=["a", "b"])
data = TensorDict({"x": torch.zeros(3)}, [3])
module(data.clone())  # whatever is only asked once is asked by now

asked, find = [], importlib.util.find_spec


def counting(name, *more):
    asked.append(name)
    return find(name, *more)


importlib.util.find_spec = counting
for _ in range(100):
    module(data.clone())
pandas = asked.count("pandas")
print(f"tensordict {tensordict.__version__}, torch {torch.__version__}: 100 calls that write 2 keys each looked for pandas {pandas} times")
assert pandas == 200, pandas
EOF
