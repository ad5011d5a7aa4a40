#!/usr/bin/env bash
# Checks pipedream on a GPU in under ten minutes, what tells most first: prints a table, and writes
# runs/gpu/check.json. Exits 1 if a bar is missed, 2 if there is no GPU. `--help` lists the options;
# `--device cpu` tries the commands on a CPU. With PROFILES=1 it measures the profiles of
# make_profiles.sh afterwards, and that of a model which does not fit: this takes much longer.
# Uses the python on PATH (or PYTHON) and the packages that it has; installs nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}

# The folders by the names that they would be installed by, ahead of any pipedream that is installed.
packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT
mkdir "$packages/pipedream"
ln -sfn "$PWD"/api/* "$PWD"/{graph,sharding,capture,schedule,comm,profiler,optimizer,runtime} \
    "$packages/pipedream"
export PYTHONPATH=$packages:$PWD/scripts${PYTHONPATH:+:$PYTHONPATH}

code=0
"$python" -m gpu_check "$@" || code=$?
if [ -n "${PROFILES:-}" ] && [ $code != 2 ]; then
    out=${OUT:-runs/gpu/profiles}
    PYTHON=$python DEVICE=cuda OUT=$out scripts/make_profiles.sh
    "$python" -m pipedream.profiler.cli transformers:llama --meta --device cuda --batch-size 1 \
        --input 512:int64 -o "$out/llama" # 27 GB of weights, one layer of them at a time
fi
exit $code
