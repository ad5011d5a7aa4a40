#!/usr/bin/env bash
# What only a machine with a GPU can check: the GPU tests, a real profile, and what
# pd-train costs on one worker.
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
"$python" -m pipedream.profiler.cli torchvision:resnet50 --device cuda --batch-size 64 \
    -o "$out/resnet50"
"$python" scripts/bench_one_worker.py
