#!/usr/bin/env bash
# Install the pinned coding agents and SDKs that tests run, once per machine, and print the folder of their programs:
#   scripts/agents.sh agents         those of `make test`
#   scripts/agents.sh more-agents    those of `make soak AREA=agents` beside them, from npm
#   scripts/agents.sh e2b            E2B's packages of `make test`; e2b-older: those of `make soak AREA=e2b` beside them
#   scripts/agents.sh node 3.11      one of requirements/agents, with this Python
# The cache is CLOCHE_TEST_AGENTS, else /opt/cloche-agents, where root installs them for all users, else ~/.cache/cloche-agents.
# No install script of any package is run: what they would do (put a program in place) the links below do.
set -euo pipefail
cd "$(dirname "$0")/.."

name=$1 python=${2:-} shared=/opt/cloche-agents
file=toolchains/$name/package-lock.json
[[ -z $python ]] || file=requirements/agents/$name.txt
lock=$name-$(sha256sum "$file" | cut -c1-12)
cache=$shared
[[ $EUID == 0 || -e $shared/$lock/is-whole ]] || cache=~/.cache/cloche-agents
cache=${CLOCHE_TEST_AGENTS:-$cache}
target=$cache/$lock

link() { [[ ! -f $1 ]] || ln -f "$1" "$2"; }

install_from_npm() {
    cp "toolchains/$name"/package*.json "$target"
    # Not `npm ci`, which wants the packages for all machines in the lock, also those that an index lacks.
    npm install --no-save --prefix "$target" --ignore-scripts --no-audit --no-fund --loglevel=error >&2
    modules=$target/node_modules machine=linux-$(node -p process.arch)
    link "$modules/@anthropic-ai/claude-code-$machine/claude" "$modules/@anthropic-ai/claude-code/bin/claude.exe"
    link "$modules/opencode-$machine/bin/opencode" "$modules/opencode-ai/bin/opencode.exe"
}

install_from_index() {
    eval "$(.venv/bin/python scripts/uv_settings.py)"
    # Nothing is downloaded but packages: that Python must be here. Ends with 77 where it is not.
    for one in "/usr/bin/python$python" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$python".*/bin/python3 ""; do
        if [[ -x $one ]]; then break; fi
    done
    [[ -n $one ]] || exit 77
    .venv/bin/uv venv --quiet --python "$one" "$target/venv"
    .venv/bin/uv pip sync --quiet --require-hashes --compile-bytecode --python "$target/venv" "$file"
}

if [[ ! -e $target/is-whole ]]; then
    mkdir -p "$cache"
    exec 9>"$cache/lock"
    flock 9 # another one may be at it
fi
if [[ ! -e $target/is-whole ]]; then
    echo "agents: installing $name into $target" >&2
    rm -rf "$target"
    mkdir -p "$target"
    if [[ -n $python ]]; then install_from_index; else install_from_npm; fi
    chmod -R go=rX "$target"
    touch "$target/is-whole"
fi
if [[ -n $python ]]; then echo "$target/venv/bin"; else echo "$target/node_modules/.bin"; fi
