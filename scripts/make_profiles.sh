#!/usr/bin/env bash
# Measures the profiles in profiles/ anew, on this machine: `scripts/make_profiles.sh [NAME]...`
# With DEVICE=cuda on a GPU, into profiles/NAME-cuda, at larger batches. Lists them in
# profiles/README.md, or with OUT=FOLDER writes them there and lists nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export OMP_NUM_THREADS=1
device=${DEVICE:-cpu}
out=${OUT:-profiles}

measure() { # NAME, batch on a CPU, batch on a GPU, MODEL and options
    local name=$1 batch=$2
    [ "$device" = cpu ] || batch=$3 name=$1-cuda
    shift 3
    [ ${#wanted[@]} = 0 ] || [[ " ${wanted[*]} " == *" ${name%-cuda} "* ]] || return 0
    PYTHONPATH=configs ${PYTHON:-python3} -m pipedream.profiler.cli "$@" --device "$device" \
        --batch-size "$batch" -o "$out/$name"
    # What pd-optimize and pd-profile --show, --diff read; the pictures can be had again.
    rm -f "$out/$name"/{operators.json,layers.png,layers.csv,graph.svg,graph.gv}
}

wanted=("$@")
measure vgg16 2 64 torchvision:vgg16
measure resnet50 16 64 torchvision:resnet50
measure resnet101 4 64 torchvision:resnet101
measure inception_v3 4 64 torchvision:inception_v3 --arg aux_logits=false
measure vit_b_16 2 32 torchvision:vit_b_16
measure gpt2 2 16 transformers:gpt2
measure bert-base 2 32 transformers:bert
measure gnmt 2 32 gnmt:model --arg vocabulary=32000 --arg width=1024 --arg layers=8 \
    --arg dropout=0.2 --input 32:int64:32000 --input 32:int64:32000
[ "$out" != profiles ] || ${PYTHON:-python3} scripts/list_profiles.py
