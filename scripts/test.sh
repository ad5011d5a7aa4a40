#!/usr/bin/env bash
# Everything that is checked: lint, format, types, import contracts, tests. Runs all of them, fails
# if any fails. Arguments go to pytest: `scripts/test.sh tests/graph -k plan`.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" || exit 1

# The rest beside the tests, which leave the cores idle while processes wait for each other; what it
# has to say comes after them.
told=$(mktemp)
trap 'rm -f "$told"' EXIT
check() {
    echo "== $*"
    "$@" || failed="${failed:-}$1 "
}
(
    check ruff check --quiet
    check ruff format --quiet --check
    check mypy $(printf -- "-p pipedream.%s " graph capture schedule comm profiler optimizer runtime)
    check lint-imports --no-logo
    [ -z "${failed:-}" ] || { echo "test.sh: failed: $failed" && exit 1; }
) >"$told" 2>&1 &

check pytest -n 3 --dist worksteal "$@"
wait $! || failed="${failed:-}checks "
cat "$told"

if [ -n "${failed:-}" ]; then
    echo "test.sh: failed: $failed" >&2
    exit 1
fi
