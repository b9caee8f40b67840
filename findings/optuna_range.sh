#!/usr/bin/env bash
# hydra-core 1.3.2 with hydra-optuna-sweeper 1.2.0: the override `x=range(0,3)` stands for 0, 1, 2 under Hydra's own
# sweeper, as in Python; under the optuna sweeper, chosen by one more override, the same words try 3 too.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "setuptools<80" hydra-core==1.3.2 hydra-optuna-sweeper==1.2.0
cat >"$folder/app.py" <<'EOF2'
import hydra


@hydra.main(version_base="1.3", config_path=None)
def app(cfg):
    with open(cfg.tried, "a") as file:
        print(cfg.x, file=file)
    return float(cfg.x)


app()
EOF2
cd "$folder"
"$folder/venv/bin/python" app.py -m "+tried=$folder/basic" "+x=range(0,3)" >"$folder/log1" 2>&1 || { cat "$folder/log1"; exit 1; }
"$folder/venv/bin/python" app.py -m hydra/sweeper=optuna hydra.sweeper.sampler.seed=1 hydra.sweeper.n_trials=30 \
    "+tried=$folder/optuna" "+x=range(0,3)" >"$folder/log2" 2>&1 || { cat "$folder/log2"; exit 1; }
basic=$(sort -nu basic | tr '\n' ' ') optuna=$(sort -nu optuna | tr '\n' ' ')
echo "hydra-core 1.3.2: basic sweeper tried $basic; hydra-optuna-sweeper 1.2.0 tried $optuna"
[ "$basic" = "0 1 2 " ] && [ "$optuna" = "0 1 2 3 " ]
