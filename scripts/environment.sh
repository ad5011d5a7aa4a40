# Sourced by test.sh, demo.sh and docs.sh: makes and enters the repository's own virtual environment, .venv.
# Installs again only when the dependencies, or the set of files that make the packages, change.
# If the script has set torch_version, that torch is installed, in an environment of its own.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Ranks are processes that share the cores: more than one thread each makes them wait for each other.
export OMP_NUM_THREADS=1

venv=.venv constraints=scripts/constraints.txt
if [ -n "${torch_version:-}" ]; then
    venv=.venv-torch-$torch_version constraints=$venv/constraints.txt
fi

find_python() {
    local name
    for name in ${PYTHON:+"$PYTHON"} python3 python3.11 python3.12 python3.13 python3.14; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    echo "no Python 3.11 or newer on PATH; install one, or name it: PYTHON=/path/to/python3.11" >&2
    return 1
}

what_is_installed() {
    {
        "$venv/bin/python" -VV
        pwd # an editable install holds the path of the repository
        cat setup.cfg pyproject.toml "$constraints"
        find api graph sharding capture schedule comm profiler optimizer runtime -type f ! -path '*/__pycache__/*' | LC_ALL=C sort
    } | sha256sum
}

make_environment() {
    local python stamp=$venv/installed
    if ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
        python=$(find_python) || return
        echo "== making the virtual environment $venv"
        "$python" -m venv --clear "$venv" || return
    fi
    [ "$venv" = .venv ] || echo "torch==$torch_version" > "$constraints"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$(what_is_installed)" ]; then
        echo "== installing pipedream and what it needs into $venv (the first time takes minutes)"
        # Compiling all that is never imported would take as long again.
        "$venv/bin/python" -m pip install -q --no-compile -c "$constraints" torch || return
        "$venv/bin/python" -m pip install -q --no-compile -c "$constraints" -e '.[models,test,docs]' \
            --config-settings editable_mode=strict || return
        # numba's cache of compiled code names classes: after a rename it could not be read.
        find optimizer -name '*.nb[ic]' -delete
        what_is_installed > "$stamp"
    fi
    export PATH="$PWD/$venv/bin:$PATH"
}

make_environment
