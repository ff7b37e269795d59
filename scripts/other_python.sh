#!/usr/bin/env bash
# Make DIR an environment of Python VERSION, with Cloche and what its tests need: `scripts/other_python.sh VERSION DIR`.
# Nothing is downloaded but packages: that Python must be here. Ends with 77 where it is not.
set -euo pipefail
cd "$(dirname "$0")/.."
version=$1 target=$2

# pyenv's programs on PATH answer for versions that nobody has chosen, so they are looked for where they lie, too.
python=
for one in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python3; do
    if "$one" -c 'import ensurepip, venv' 2>/dev/null; then python=$one; fi
done
[[ -n $python ]] || exit 77

eval "$(.venv/bin/python scripts/uv_settings.py)"
[[ -x $target/bin/python ]] || "$python" -m venv --without-pip "$target"
uv=(.venv/bin/uv pip install --quiet --python "$target/bin/python")
"${uv[@]}" --require-hashes --requirement requirements/build.txt --requirement requirements/runtime.txt \
    --requirement requirements/examples.txt --requirement requirements/dev.txt
"${uv[@]}" --no-deps --no-build-isolation --editable .
