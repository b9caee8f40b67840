#!/usr/bin/env bash
# torchrun 2.13.0: where every rank ends by itself with the same code, torchrun ends with 1, whatever that code was, and
# calls it a failure with a traceback. So a scheduler's rule on exit codes (75: saved, run me again; 2: a mistake, do not)
# cannot be kept through it: a job that stopped safely reads as one that crashed. The code stands in the printed table.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
for code in 0 2 75; do
    echo "import sys; sys.exit($code)" >"$folder/rank.py"
    ended=0
    "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/rank.py" >"$folder/said" 2>&1 || ended=$?
    traceback=$(grep -c '^Traceback' "$folder/said" || true)
    echo "torch 2.13.0: two ranks end with $code, torchrun with $ended, tracebacks: $traceback"
    [ "$ended" -eq $((code != 0)) ] && [ "$traceback" -eq $((code != 0)) ]
done
grep -o 'exitcode *: [0-9]*' "$folder/said" | sort -u
