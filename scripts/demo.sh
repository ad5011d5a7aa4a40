#!/usr/bin/env bash
# The main job from nothing: profile a convolutional network, plan it for two workers, train it as a
# pipeline of two processes on real handwritten digits. Ends with where everything lies.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

run=runs/digits
least_accuracy=0.95
begun=$SECONDS
rm -rf "$run"

step() {
    echo
    echo "== $1"
    shift
    echo "\$ $*"
    "$@"
}

step "1/3 measure: what does each layer of the network cost, with two workers on this machine?" \
    pd-profile configs/digits.yaml --workers 2 -o $run/profile
step "2/3 decide: which layers go to which of the two? (--straight: a pipeline, no replicas)" \
    pd-optimize $run/profile/graph.txt --cluster auto --straight -o $run/plan
step "3/3 train: two processes, one stage each, weight stashing" \
    pd-train $run/plan/plan.json --config configs/digits.yaml --workers 2 -o $run/run

echo
python - "$run" "$least_accuracy" <<'PYTHON'
import json
import sys
from pathlib import Path

run, least = Path(sys.argv[1]), float(sys.argv[2])
summary = json.loads((run / "run/summary.json").read_text())
picture = next(path for path in (run / "plan/graph.svg", run / "plan/graph.gv") if path.exists())
accuracy = summary["held_out_accuracy"]
print(f"held-out accuracy  {accuracy:.1%}")
print(f"plan picture       {picture}")
print(f"timeline           {run / 'run/timeline.png'}")
print(f"checkpoint         {max((run / 'run/checkpoints').iterdir())}")
if accuracy < least:
    sys.exit(f"demo.sh: held-out accuracy {accuracy:.1%} is below {least:.0%}")
PYTHON
echo "demo took          $((SECONDS - begun)) s after the install"
echo "To use pd-profile, pd-optimize and pd-train in your shell: source .venv/bin/activate"
