#!/usr/bin/env bash
# Prepare the peers of the benchmark in a folder of their own, and run a command while their daemon is up:
#   scripts/bench_peers.sh [--peers-folder DIR] [COMMAND...]     for example: scripts/bench_peers.sh python -m bench --peers
# Installs from PyPI and npm as pip and npm are set up here, builds a minimal image of this machine's own Python, and
# loads it where it is needed. A docker daemon that already answers is used as it is; one that is started here, with all
# that it keeps in that folder and without touching this machine's network, is stopped again. As root it first installs
# what is missing with apt-get; nothing that cannot be had stops the rest.
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

folder=~/.cache/cloche-bench
if [[ ${1:-} == --peers-folder ]]; then
    folder=$2
    shift 2
fi
image=${CLOCHE_BENCH_IMAGE:-cloche-bench:local}
python=${PYTHON:-python3}
mkdir -p "$folder" && folder=$(cd "$folder" && pwd) || exit 1

say() { echo "bench_peers: $*"; }

install_system_packages() {
    local -A package_of=([bwrap]=bubblewrap [socat]=socat [rg]=ripgrep [dockerd]=docker.io [node]=nodejs [npm]=npm)
    local program missing=()
    for program in "${!package_of[@]}"; do
        command -v "$program" >/dev/null || missing+=("${package_of[$program]}")
    done
    ((${#missing[@]} == 0)) && return
    if ((EUID != 0)) || ! command -v apt-get >/dev/null; then
        say "not installed, and left out: ${missing[*]}"
        return
    fi
    say "installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get -qq -o DPkg::Lock::Timeout=600 update
    apt-get -qq -o DPkg::Lock::Timeout=600 install --yes --no-install-recommends "${missing[@]}" >/dev/null
}

install_libraries() {
    if [[ ! -x $folder/venv/bin/python ]]; then
        say "making a virtual environment in $folder/venv"
        "$python" -m venv "$folder/venv" || return
    fi
    local package
    for package in sandlock kern-sandbox 'llm-sandbox[docker]'; do
        "$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check install "$package" ||
            say "cannot install $package"
    done
    command -v npm >/dev/null || return
    # No install script of any package is run.
    npm install --prefix "$folder/npm" --ignore-scripts --no-audit --no-fund --loglevel=error \
        @anthropic-ai/sandbox-runtime || say "cannot install sandbox-runtime"
}

build_image() {
    [[ -s $folder/image.tar && $(cat "$folder/image.name" 2>/dev/null) == "$image" ]] && return
    say "building $image from $("$python" --version)"
    "$python" "$root/scripts/bench_image.py" "$image" "$folder/image.tar" && echo "$image" >"$folder/image.name"
}

load_into_kern() {
    [[ -x $folder/venv/bin/kern ]] || return 0
    XDG_CACHE_HOME=$folder/cache "$folder/venv/bin/kern" load -i "$folder/image.tar" || say "kern cannot load the image"
}

# What is empty and was not there before: the daemon and kern leave a control group of their own behind.
control_groups() { find /sys/fs/cgroup -depth -type d \( -name docker -o -name kern.slice \) 2>/dev/null; }
groups_before=$(control_groups)
remove_control_groups() {
    local group
    while read -r group; do
        grep -qxF -- "$group" <<<"$groups_before" || find "$group" -depth -type d -exec rmdir {} + 2>/dev/null
    done < <(control_groups)
}

daemon=0
start_docker() {
    command -v docker >/dev/null || return
    if ! docker info >/dev/null 2>&1; then
        if ((EUID != 0)) || ! command -v dockerd >/dev/null; then
            say "no docker daemon answers, and none can be started"
            return
        fi
        say "starting a docker daemon"
        mkdir -p "$folder/docker"
        local runsc
        runsc=$(command -v runsc) && runsc="\"runsc\": {\"path\": \"$runsc\", \"runtimeArgs\": [\"--network=none\"]}"
        echo "{\"runtimes\": {$runsc}}" >"$folder/docker/daemon.json"
        export DOCKER_HOST=unix://$folder/docker/socket
        dockerd --config-file "$folder/docker/daemon.json" --host "$DOCKER_HOST" --data-root "$folder/docker/data" --exec-root "$folder/docker/run" \
            --pidfile "$folder/docker/pid" --bridge=none --iptables=false --ip6tables=false --ip-forward=false \
            --ip-masq=false >"$folder/docker/log" 2>&1 &
        daemon=$!
        for _ in {1..100}; do
            docker info >/dev/null 2>&1 && break
            sleep 0.2
        done
    fi
    docker load --quiet --input "$folder/image.tar" || say "docker cannot load the image: $(tail -n 1 "$folder/docker/log")"
}

stop_docker() {
    if ((daemon)); then
        say "stopping the docker daemon"
        kill "$daemon" && wait "$daemon"
        daemon=0
    fi
    remove_control_groups
}

trap stop_docker EXIT
install_system_packages
install_libraries
build_image
load_into_kern
start_docker
if (($#)); then
    "$@"
else
    say "ready in $folder; for the peers that need the daemon, give this script the command to run"
fi
