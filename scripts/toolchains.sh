#!/usr/bin/env bash
# Put the pinned npm toolchains (deno, tsx, pyright, MCP's conformance suite) into .toolchains/, with their programs in .toolchains/bin.
# No install script of any package is run: what they would do (copy a binary) the links below do.
set -euo pipefail
cd "$(dirname "$0")/.."

target=.toolchains
if cmp --silent toolchains/package-lock.json $target/package-lock.json && [[ -x $target/bin/pyright ]]; then
    exit 0
fi
if ! command -v npm >/dev/null; then
    echo "toolchains: npm is missing; install Debian's nodejs and npm, or run scripts/setup_system.sh as root" >&2
    exit 1
fi

echo "toolchains: installing deno, tsx, pyright and mcp-conformance into $target"
rm -rf $target
mkdir -p $target/bin
cp toolchains/package.json toolchains/package-lock.json $target/
npm ci --prefix $target --ignore-scripts --no-audit --no-fund --loglevel=error
for deno in $target/node_modules/@deno/linux-*-glibc/deno; do
    if [[ -x $deno ]]; then ln -s "../${deno#"$target"/}" $target/bin/deno; fi
done
ln -s ../node_modules/tsx/dist/cli.mjs $target/bin/tsx
ln -s ../node_modules/@modelcontextprotocol/conformance/dist/index.js $target/bin/mcp-conformance
# Last, since its presence says that everything before it worked.
ln -s ../node_modules/pyright/index.js $target/bin/pyright
