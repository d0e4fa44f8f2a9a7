#!/usr/bin/env bash
# Makes .venv from nothing, or finds at once that it is up to date. Called by every make target.
#   scripts/setup.sh        what running, testing and linting need
#   scripts/setup.sh gpu    the same and the GPU libraries
set -euo pipefail
cd "$(dirname "$0")/.."
lock=requirements/lock.txt
gpu_lock=requirements/lock-cuda13.txt

fail() {
    echo "bi_jax: $1" >&2
    exit 2
}

# Prints the path of a Python 3.12 or 3.13. A pyenv shim may stand there and yet refuse to run, so
# each candidate is asked, and pyenv's own folder is looked into last.
find_python() {
    local candidate found
    for candidate in ${PYTHON:-python3.12 python3.13 python3 python \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[23]*/bin/python}; do
        found=$("$candidate" -c '
import sys
print(sys.executable if sys.version_info[:2] in ((3, 12), (3, 13)) else "")' 2>/dev/null) || continue
        if [ -n "$found" ]; then
            echo "$found"
            return
        fi
    done
    fail "needs Python 3.12 or 3.13 and found neither${PYTHON:+ under the name $PYTHON}; install one, or name it: make PYTHON=/path/to/python3.12"
}

make_venv() {
    local python
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python has no venv module; install it (on Debian and Ubuntu the package python3-venv)"
    echo "bi_jax: making .venv with $("$python" --version)"
    rm -rf .venv
    "$python" -m venv .venv
}

install() {
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps "$@"
}

# The editable install notes where the folder is, so a moved clone counts as out of date.
state=$(cat "$lock" pyproject.toml setup.py <(pwd) | cksum)
stamp=.venv/.bi_jax_setup
if [ "$(cat "$stamp" 2>/dev/null)" != "$state" ] || ! .venv/bin/python -c '' 2>/dev/null; then
    .venv/bin/python -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 12), (3, 13)))' \
        2>/dev/null && .venv/bin/python -m pip --version >/dev/null 2>&1 || make_venv
    echo "bi_jax: installing $(grep -c == "$lock") packages into .venv (once; about a minute)"
    install -r "$lock"
    install --no-build-isolation --editable .
    echo "$state" >"$stamp"
fi

gpu_stamp=.venv/.bi_jax_setup_gpu
gpu_state=$(cksum <"$gpu_lock")
if [ "${1:-}" = gpu ]; then
    if [ "$(cat "$gpu_stamp" 2>/dev/null)" != "$gpu_state" ]; then
        echo "bi_jax: installing the GPU libraries into .venv (once; about 2.5 GB)"
        install -r "$gpu_lock"
        echo "$gpu_state" >"$gpu_stamp"
    fi
elif [ -e /dev/nvidia0 ] || nvidia-smi -L >/dev/null 2>&1; then
    compgen -G '.venv/lib/python3.*/site-packages/jax_cuda13_plugin' >/dev/null ||
        echo "bi_jax: an NVIDIA card is here but the GPU libraries are not, so this runs on the CPU; 'make gpu' installs them"
fi
