#!/usr/bin/env bash
# Builds docs/ as a site in build/site, with warnings as errors: one of the checks of test.sh.
# Arguments go to mkdocs: `scripts/docs.sh serve` shows it at http://127.0.0.1:8000 and follows changes.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

export NO_MKDOCS_2_WARNING=1 # mkdocs is pinned below 2
if [ $# = 0 ]; then
    python -m mkdocs build --strict # --quiet would hide the warnings from --strict, too
    echo "built build/site/index.html"
else
    python -m mkdocs "$@"
fi
