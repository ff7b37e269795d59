#!/usr/bin/env bash
# Pin and hash what requirements/*.in name, for every supported Python, without a word of where it came from.
# Needs `uv`. Each lock is held to the ones before it, so that all of them fit into one environment.
set -euo pipefail
cd "$(dirname "$0")/../requirements"

# Only the index counts: wheels that lie on this disk must not add hashes that nobody else can find.
unset UV_FIND_LINKS

held=()
for name in runtime build examples dev; do
    uv pip compile --quiet --no-config --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
        --no-emit-index-url --no-emit-find-links "${held[@]}" "$@" "$name.in" --output-file "$name.txt"
    held+=(--constraints "$name.txt")
done

# Callers whose code is tested without what it requires, torch above all: files of theirs are loaded, not the packages.
uv pip compile --quiet --no-config --no-deps --universal --python-version 3.11 --generate-hashes --no-header \
    --no-annotate --no-emit-index-url --no-emit-find-links "$@" callers.in --output-file callers.txt

# What frameworks need for their own suites, each for itself, in an environment that has nothing else.
for file in frameworks/*.in; do
    name=$(basename "$file" .in)
    [[ $name != tests ]] || continue
    # Ray's is part of `make test`, so its files are held by their hashes.
    hashes=()
    [[ $name != ray ]] || hashes=(--generate-hashes)
    uv pip compile "${hashes[@]}" --quiet --no-config --universal --python-version 3.11 --no-header --no-annotate \
        --no-emit-index-url --no-emit-find-links --constraints build.txt --constraints runtime.txt "$@" \
        "frameworks/$name.in" frameworks/tests.in runtime.in build.in --output-file "frameworks/$name.txt"
done

# The Node of coding agents that want a younger one than the distribution's.
uv pip compile --quiet --no-config --python-version 3.11 --generate-hashes --no-header --no-annotate \
    --no-emit-index-url --no-emit-find-links "$@" agents/node.in --output-file agents/node.txt

cd ../toolchains
for folder in . agents more-agents e2b e2b-older; do
    (cd "$folder" && npm install --package-lock-only --ignore-scripts --no-audit --no-fund --omit-lockfile-registry-resolved)
done
# Whom one could give money stands in a lock, too; nothing but names, versions and hashes may.
python3 - <<'END'
import json, pathlib

for path in pathlib.Path().glob("**/package-lock.json"):
    lock = json.loads(path.read_text())
    for package in lock["packages"].values():
        package.pop("funding", None)
    path.write_text(json.dumps(lock, indent=2) + "\n")
END
