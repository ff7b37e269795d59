#!/usr/bin/env bash
# Create or complete .venv: `scripts/venv.sh run` for Cloche and the examples, `scripts/venv.sh dev` for the tests too.
# Everything is pinned and hashed in requirements/*.txt; the project itself is installed editable.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
find_python() {
    local python
    for python in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$python"
            return
        fi
    done
    echo "venv: no Python 3.11 or later on PATH; install one, or name it: make PYTHON=/path/to/python3" >&2
    return 1
}

require_venv_module() {
    "$1" -c 'import ensurepip, venv' 2>/dev/null && return
    local package
    package=$("$1" -c 'import sys; print("python3.%d-venv" % sys.version_info[1])')
    if ((EUID == 0)) && command -v apt-get >/dev/null; then
        echo "venv: installing $package"
        export DEBIAN_FRONTEND=noninteractive
        apt-get -qq -o DPkg::Lock::Timeout=600 update
        apt-get -qq -o DPkg::Lock::Timeout=600 install --yes --no-install-recommends "$package" >/dev/null
    else
        echo "venv: $1 cannot make virtual environments; install Debian's $package (or your system's equal)" >&2
        return 1
    fi
}

if ! $venv/bin/python -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    require_venv_module "$python"
    echo "venv: creating $venv with $python"
    "$python" -m venv --clear $venv
fi

# uv, whose own version is pinned as everything is, installs in seconds what takes pip a minute; its packages lie in its
# cache for every environment that is made of them.
$venv/bin/python -m pip --quiet --disable-pip-version-check install --require-hashes --requirement requirements/build.txt
eval "$($venv/bin/python scripts/uv_settings.py)"
uv=($venv/bin/uv pip install --quiet --python $venv/bin/python)
locks=(--requirement requirements/build.txt --requirement requirements/runtime.txt --requirement requirements/examples.txt)
[[ ${1:-run} == dev ]] && locks+=(--requirement requirements/dev.txt)
"${uv[@]}" --require-hashes "${locks[@]}"
# Apart, and not on the path: verl's package has a module `tests`, too.
if [[ ${1:-run} == dev ]]; then
    "${uv[@]}" --no-deps --require-hashes --target $venv/callers --requirement requirements/callers.txt
fi
"${uv[@]}" --no-deps --no-build-isolation --editable .
# Jails show packages read-only, so each run would compile what it imports anew.
env -u PYTHONDONTWRITEBYTECODE $venv/bin/python -c 'import matplotlib.backends.backend_agg, matplotlib.pyplot, pandas'
