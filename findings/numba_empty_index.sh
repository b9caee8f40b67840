#!/usr/bin/env bash
# numba 0.68.1, cache=True: an index file (*.nbi) of 0 bytes, as a power cut leaves it behind, is not taken for a cache that is
# missing. Every later call of the function raises EOFError; nothing is compiled anew and nothing removes the file.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet "numba==0.68.1" "numpy==2.4.6"
cat > "$work/kernel.py" <<'PY'
import numba


@numba.njit(cache=True)
def twice(x):
    return 2 * x
PY
cd "$work"
export NUMBA_CACHE_DIR="$work/cache"
"$work/venv/bin/python" -c "import kernel; assert kernel.twice(3) == 6"
find cache -name '*.nbi' -exec truncate -s 0 {} +
for attempt in 1 2; do
    "$work/venv/bin/python" - <<'PY'
import numba

import kernel

try:
    kernel.twice(3)
except EOFError as error:
    print(f"numba {numba.__version__}: {type(error).__name__}: {error}")
else:
    raise SystemExit("it was compiled anew")
PY
done
