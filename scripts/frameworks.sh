#!/usr/bin/env bash
# Make DIR an environment of a framework's published packages, as requirements/frameworks/NAME.txt pins them, with Cloche:
#   scripts/frameworks.sh NAME DIR [wheel]
# Cloche is installed editable, or as a wheel. What is downloaded stays in uv's cache, a folder of the user's, so that the
# next time takes seconds; from where is pip's own setting.
set -euo pipefail
cd "$(dirname "$0")/.."
name=$1 target=$2 how=${3:-editable}
lock=requirements/frameworks/$name.txt

eval "$(.venv/bin/python scripts/uv_settings.py)"
[[ -x $target/bin/python ]] || /usr/bin/python3 -m venv --without-pip "$target"
uv=(.venv/bin/uv pip)
into=(--quiet --python "$target/bin/python")
if ! cmp --silent "$lock" "$target/lock.txt"; then
    "${uv[@]}" sync "${into[@]}" --compile-bytecode "$lock"
    cp "$lock" "$target/lock.txt"
fi
if [[ $how == wheel ]]; then
    "${uv[@]}" install "${into[@]}" --no-deps --no-build-isolation --compile-bytecode --reinstall-package cloche .
else
    "${uv[@]}" install "${into[@]}" --no-deps --no-build-isolation --editable .
fi
