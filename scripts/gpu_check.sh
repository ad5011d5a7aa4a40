#!/usr/bin/env bash
# What only a machine with a GPU can check: the GPU tests, real profiles, one of a model that does not
# fit, messages between two ranks, and what pd-train costs on one worker.
# Uses the python on PATH and the packages that it has; installs nothing but, if need be, pipedream.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export OMP_NUM_THREADS=1
python=${PYTHON:-python3}
"$python" -c 'import torch; assert torch.cuda.is_available(), "torch sees no GPU"'
"$python" -c 'import pipedream.runtime' 2>/dev/null ||
    "$python" -m pip install -q --no-deps --no-build-isolation -e . \
        --config-settings editable_mode=strict

"$python" -m pytest tests/gpu -m gpu
out=${OUT:-runs/gpu}
PYTHON=$python DEVICE=cuda OUT=$out scripts/make_profiles.sh
"$python" -m pipedream.profiler.cli transformers:llama --meta --device cuda --batch-size 1 \
    --input 512:int64 -o "$out/llama"  # 27 GB of weights, one layer of them at a time
"$python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    -m pipedream.profiler.cli --network --device cuda -o "$out/network"
"$python" scripts/bench/one_worker.py
