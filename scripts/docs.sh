#!/usr/bin/env bash
# Builds docs/ as a site in build/site, with warnings as errors. Arguments go to mkdocs:
# `scripts/docs.sh serve` shows it at http://127.0.0.1:8000 and follows changes.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

if ! python -c 'import material, mkdocstrings_handlers.python' 2>/dev/null; then
    echo "== installing what the site needs into .venv"
    python -m pip install -q -c scripts/constraints.txt -e '.[docs]' --config-settings editable_mode=strict
fi
export NO_MKDOCS_2_WARNING=1 # mkdocs is pinned below 2
if [ $# = 0 ]; then
    python -m mkdocs build --strict
    echo "built build/site/index.html"
else
    python -m mkdocs "$@"
fi
