#!/usr/bin/env bash
# What `make check` and `make test` run: style, types, what no linter knows, and whether every test can be read, which
# `make test` sees by itself (`scripts/check.sh beside-tests`). pyright takes longer than all others, so it runs beside them;
# beside the tests it reads the parts that users import and `tests/public_types.py`, and mypy all of `src` and `bench`.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE
checked=(src tests scripts examples bench)
public=()
[[ ${1:-} == beside-tests ]] && public=(src/cloche/*.py src/cloche/{core,integrations} tests/public_types.py)

.toolchains/bin/pyright --warnings "${public[@]}" &
pyright=$!
trap 'kill "$pyright" 2>/dev/null || true' EXIT
.venv/bin/ruff check "${checked[@]}"
.venv/bin/ruff format --check "${checked[@]}"
.venv/bin/mypy
.venv/bin/python scripts/check_tree.py
[[ ${1:-} == beside-tests ]] || collected=$(.venv/bin/python -m pytest -p no:cacheprovider --collect-only -qq 2>&1) || { echo "$collected"; exit 1; }
wait "$pyright"
