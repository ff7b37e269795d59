#!/usr/bin/env bash
# Install the system packages that the test suite needs, with apt-get, as root. Says nothing much and is quick when all is
# there; as an ordinary user it only says what is missing. Cloche itself needs none of them.
set -euo pipefail
cd "$(dirname "$0")/.."

# What a jail sees first: a toolchain in somebody's home does not count, an ordinary user could not read it.
system_path=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

# program -> the package that brings it
declare -A package_of=(
    [node]=nodejs [npm]=npm [ruby]=ruby [go]=golang-go [rustc]=rustc [mcs]=mono-mcs [mono]=mono-runtime
    [Rscript]=r-base-core [jshell]=default-jdk-headless
    [cc]=gcc [g++]=g++ [bwrap]=bubblewrap [setpriv]=util-linux [git]=git [ps]=procps
    [dockerd]=docker.io [docker]=docker.io [busybox]=busybox-static [runsc]=runsc
    [qemu-system-x86_64]=qemu-system-x86 [openssl]=openssl [debugfs]=e2fsprogs
    [ssh-keygen]=openssh-client [gpg]=gpg [gpg-agent]=gpg-agent [gpgsm]=gpgsm
    [newuidmap]=uidmap [tmux]=tmux [ip]=iproute2 [curl]=curl [psql]=postgresql-client [systemd-analyze]=systemd [chromium-headless-shell]=chromium-headless-shell
)

missing=()
for program in "${!package_of[@]}"; do
    PATH=$system_path command -v "$program" >/dev/null || missing+=("${package_of[$program]}")
done
PATH=$system_path python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
# Not on PATH.
compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null || missing+=(postgresql)
# A C library without its development half lets rustc compile but not link.
PATH=$system_path cc -print-file-name=crt1.o 2>/dev/null | grep -q / || missing+=(libc6-dev)

if ((${#missing[@]} == 0)); then
    echo "setup_system: every system package is there"
elif ((EUID != 0)); then
    echo "setup_system: not root, nothing installed; missing: ${missing[*]}"
elif ! command -v apt-get >/dev/null; then
    echo "setup_system: no apt-get here; install what brings these Debian packages: ${missing[*]}" >&2
    exit 1
else
    echo "setup_system: installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt=(apt-get -qq -o DPkg::Lock::Timeout=600 -o Dpkg::Options::=--force-confold)
    # PostgreSQL's package would make a cluster and start it.
    [[ " ${missing[*]} " != *" postgresql "* || -e /etc/postgresql-common/createcluster.conf ]] ||
        install -D /dev/stdin /etc/postgresql-common/createcluster.conf <<<"create_main_cluster = false"
    "${apt[@]}" update
    "${apt[@]}" install --yes --no-install-recommends "${missing[@]}" >/dev/null
fi

scripts/toolchains.sh
