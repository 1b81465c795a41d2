#!/usr/bin/env bash
# Makes the virtual environment $VENV (default .venv) and installs pdserve with the extras given, in pinned versions.
#   scripts/install.sh server,dev
set -euo pipefail
cd "$(dirname "$0")/.."
extras=$1
venv=${VENV:-.venv}

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if command -v "$candidate" >/dev/null && is_new_enough "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    echo "pdserve needs Python 3.11 or newer; found: $("${PYTHON:-python3}" --version 2>&1 || true)" >&2
    echo "Install one and name it: make run PYTHON=/path/to/python3.11" >&2
    return 1
}

make_venv() {
    local python
    python=$(find_python)
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
            apt-get update -q && apt-get install -y -q --no-install-recommends python3-venv
        else
            echo "$python cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv" >&2
            return 1
        fi
    fi
    echo "Making the virtual environment $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
}

if ! [ -x "$venv/bin/python" ] || ! is_new_enough "$venv/bin/python" || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    make_venv
fi

# Defaults that a machine may set for pip and that would install elsewhere, or nothing.
unset PIP_TARGET PIP_PREFIX PIP_ROOT PIP_REQUIRE_HASHES PIP_NO_DEPS PIP_DRY_RUN
export PIP_USER=0 PIP_QUIET=0 PIP_DISABLE_PIP_VERSION_CHECK=1

echo "Installing pdserve[$extras] into $venv; the first time takes minutes, most of it for torch"
"$venv/bin/python" -m pip install --progress-bar on --no-compile --constraint constraints.txt --editable ".[$extras]"
echo "Compiling the installed packages for faster starts, on all cores; the first time takes a minute or more"
# As pip would, but on all cores, and without transformers' thousands of models: those are compiled when they are used.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$venv/bin/python" -m compileall -qq -j 0 -x 'transformers/models/[a-z]' "$site" || true # some files are templates
# Said here, for pip says nothing: the kernels are optional.
"$venv/bin/python" - <<'CHECK'
from pdserve.kernels.cpu import library

if reason := library.why_not():
    print(f"Note: no compiled CPU kernels, torch serves several times more slowly: {reason} (make -B run)")
CHECK
