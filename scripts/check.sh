#!/usr/bin/env bash
# What `make check` and `make test` run: style, types, what no linter knows, and whether every test can be read, which
# `make test` sees by itself (`scripts/check.sh beside-tests`). pyright takes longer than all others, so it runs beside them.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE
checked=(src tests scripts examples bench)

.toolchains/bin/pyright --warnings &
pyright=$!
trap 'kill "$pyright" 2>/dev/null || true' EXIT
.venv/bin/ruff check "${checked[@]}"
.venv/bin/ruff format --check "${checked[@]}"
.venv/bin/mypy
.venv/bin/python scripts/check_tree.py
[[ ${1:-} == beside-tests ]] || collected=$(.venv/bin/python -m pytest -p no:cacheprovider --collect-only -qq 2>&1) || { echo "$collected"; exit 1; }
wait "$pyright"
