#!/usr/bin/env bash
# Checks everything: lint, format, types, import contracts, the site, tests. Runs all of them, fails
# if any fails, or if they take more processor time than they should.
# First argument: --quick leaves out the tests marked `slow`, --all adds those marked `thorough`, and
# all of the random examples, without a limit of time. All other arguments go to pytest:
# `scripts/test.sh tests/graph -k plan`. With --torch VERSION before all of them, runs only the tests,
# with that torch: the types of torch are checked in the pinned version.
set -uo pipefail
if [ "${1:-}" = --torch ]; then
    torch_version=${2:?name a version of torch: test.sh --torch 2.15.0}
    shift 2
fi
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" || exit 1

# Whenever ranks connect, torch asks DNS for the name of 127.0.0.1. A server that drops the question
# would cost ten seconds each time.
export RES_OPTIONS="timeout:1 attempts:1"

# The tests start pipedream some hundred times: it need not be compiled each time.
unset PYTHONDONTWRITEBYTECODE

# Compiles the planner's kernels into numba's cache, which else each process of the tests would do.
compile_kernels() {
    local layer=(torch.nn:Linear --arg in_features=512 --arg out_features=512 --input 512
        --batch-size 64 --for h100)
    local machines=(-o "$scratch/planned" --machines 2,2 --bandwidth 1GB,500MB)
    pd-profile "${layer[@]}" -o "$scratch" &&
        pd-optimize "$scratch/graph.txt" "${machines[@]}" --intra-op exact --memory 4GB &&
        pd-optimize "$scratch/graph.txt" "${machines[@]}" --intra-op recursive &&
        pd-optimize tests/optimizer/translation.txt "${machines[@]}" --objective latency \
            --microbatches 4
} >/dev/null

scratch=$(mktemp -d)
output=$scratch/output
trap 'rm -rf "$scratch"' EXIT
check() {
    echo "== $*"
    "$@" || failed="${failed:-}$1 "
}

# Six minutes of two cores that nobody shares are 720 s. Parts, and all, take what they take.
budget=720 options=(-n 4 --dist worksteal --durations 40)
[ $# -eq 0 ] || budget=
case "${1:-}" in
--quick) shift && options+=(-m "not slow") ;;
--all) shift && export PIPEDREAM_TESTS=all ;;
esac

# Writes the tests as pytest compiles them, which else each of its processes would do.
[ $# -ne 0 ] || pytest -q --collect-only >"$scratch/tests" 2>&1 &

# Others who share a core make all that it does take up to twice the processor time.
core=$(python -c 'import os; print(min(os.sched_getaffinity(0)))' 2>"$scratch/none")
python scripts/bench/meshes/pace.py "$core" >"$scratch/pace" 2>"$scratch/none" &
pace=$!

# These run beside the tests, which leave cores idle while processes wait for each other.
# Their output is printed after that of the tests.
(
    [ -z "${torch_version:-}" ] || exit 0
    check ruff check --quiet
    check ruff format --quiet --check
    check mypy -p pipedream
    check lint-imports --no-logo
    export SITE_IN_FULL=false
    check scripts/docs.sh
    [ -z "${failed:-}" ] || { echo "test.sh: failed: $failed" && exit 1; }
) >"$output" 2>&1 &
checks=$!

[ $# -ne 0 ] || check compile_kernels
check pytest "${options[@]}" "$@"
wait $checks || failed="${failed:-}checks "
cat "$output"

# Processor time, not time, and of a core that nobody shares, where a product takes 21 us: machines
# are shared.
kill $pace 2>"$scratch/none"
times >"$output"
seconds=$(awk -F '[ms ]' 'NR == 2 { print int($1 * 60 + $2 + $4 * 60 + $5) }' "$output")
slowed=$(awk '{ taken += $2 } END { print NR ? taken / NR / 21e-6 : 1 }' "$scratch/pace")
alone=$(awk -v all="$seconds" -v by="$slowed" 'BEGIN { print int(all / by) }')
echo "== $seconds s of processor time in $SECONDS s, $alone s of a core that nobody shares"
[ "$alone" -le "${budget:-$alone}" ] || {
    echo "test.sh: the budget is $budget s: mark what others show in part as thorough, see --durations"
    failed="${failed:-}budget "
}

if [ -n "${failed:-}" ]; then
    echo "test.sh: failed: $failed" >&2
    exit 1
fi
