#!/usr/bin/env bash
# Everything that is checked: lint, format, types, import contracts, tests. Runs all of them, fails
# if any fails. Arguments go to pytest: `scripts/test.sh tests/graph -k plan`.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" || exit 1

failed=()
check() {
    echo "== $*"
    "$@" || failed+=("$1")
}

check ruff check --quiet
check ruff format --quiet --check
check mypy -p pipedream.graph -p pipedream.profiler -p pipedream.optimizer -p pipedream.runtime
check lint-imports --no-logo
check pytest -n 3 --dist worksteal "$@"

if [ ${#failed[@]} -gt 0 ]; then
    echo "test.sh: failed: ${failed[*]}" >&2
    exit 1
fi
