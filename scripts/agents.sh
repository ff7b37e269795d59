#!/usr/bin/env bash
# Install the pinned coding agents that tests run, once per machine, and print the folder of their programs:
#   scripts/agents.sh agents         those of `make test`
#   scripts/agents.sh more-agents    those of `make soak AREA=agents` beside them
# The cache is CLOCHE_TEST_AGENTS, else /opt/cloche-agents, where root installs them for all users, else ~/.cache/cloche-agents.
# No install script of any package is run: what they would do (put a program in place) the links below do.
set -euo pipefail
cd "$(dirname "$0")/.."

name=$1 shared=/opt/cloche-agents
lock=$name-$(sha256sum "toolchains/$name/package-lock.json" | cut -c1-12)
cache=$shared
[[ $EUID == 0 || -d $shared/$lock ]] || cache=~/.cache/cloche-agents
cache=${CLOCHE_TEST_AGENTS:-$cache}
target=$cache/$lock

link() { [[ ! -f $1 ]] || ln -f "$1" "$2"; }

if [[ ! -d $target ]]; then
    echo "agents: installing $name into $target" >&2
    mkdir -p "$cache"
    made=$(mktemp -d "$cache/.XXXXXX")
    trap 'rm -rf "$made"' EXIT
    cp "toolchains/$name"/package*.json "$made"
    # Not `npm ci`, which wants the packages for all machines in the lock, also those that an index lacks.
    npm install --no-save --prefix "$made" --ignore-scripts --no-audit --no-fund --loglevel=error >&2
    modules=$made/node_modules machine=linux-$(node -p process.arch)
    link "$modules/@anthropic-ai/claude-code-$machine/claude" "$modules/@anthropic-ai/claude-code/bin/claude.exe"
    link "$modules/opencode-$machine/bin/opencode" "$modules/opencode-ai/bin/opencode.exe"
    chmod -R go=rX "$made"
    mv -T "$made" "$target" 2>/dev/null || [[ -d $target ]] # another one was first
fi
echo "$target/node_modules/.bin"
