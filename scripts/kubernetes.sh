#!/usr/bin/env bash
# Make what `make soak AREA=kubernetes` runs on: a cluster's programs and an image of this checkout. As root, on Debian 12.
#   scripts/kubernetes.sh          the programs, once, in $CLOCHE_KUBERNETES (~/.cache/cloche-kubernetes); the image anew
# No package has kube-apiserver or kubelet, so they are built from the source of Debian's package `kubernetes`, which is
# the whole tree of 1.20.2 with its dependencies: about 6 minutes of one processor and 3 GB, of which 0.4 GB stay. Go's own
# settings (GOFLAGS, GOMAXPROCS) hold. Nothing is started and no file of apt's is changed.
set -euo pipefail
cd "$(dirname "$0")/.."
checkout=$PWD
version=1.20.2
cache=${CLOCHE_KUBERNETES:-${XDG_CACHE_HOME:-$HOME/.cache}/cloche-kubernetes}
programs=(kube-apiserver kube-controller-manager kube-scheduler kubelet)

step() { echo "kubernetes: $*"; }

install_packages() {
    local needed=(containerd runc containernetworking-plugins iptables golang-go golang-github-modern-go-reflect2-dev gcc libc6-dev
        dpkg-dev busybox-static iproute2 util-linux procps python3) missing=() name
    for name in "${needed[@]}"; do
        dpkg-query --show --showformat '${db:Status-Status}' "$name" 2>/dev/null | grep -qx installed || missing+=("$name")
    done
    ((${#missing[@]})) || return 0
    step "installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get -qq -o DPkg::Lock::Timeout=600 update
    # Until the daemon of containerd is asked for by name, it stays as it is.
    RUNLEVEL=1 apt-get -qq -o DPkg::Lock::Timeout=600 install --yes --no-install-recommends "${missing[@]}" >/dev/null
}

# Sources of this machine's own distribution, in files of their own: apt's settings stay.
fetch_source() {
    mkdir -p "$work/lists/partial"
    apt-get indextargets --format 'deb-src $(REPO_URI) $(RELEASE) main' 'Created-By: Packages' "Codename: $codename" \
        'Component: main' | sort -u >"$work/sources.list"
    local own=(-qq -o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts=- -o APT::Sandbox::User=root
        -o Dir::State::Lists="$work/lists" -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache=)
    apt-get "${own[@]}" update
    (cd "$work" && apt-get "${own[@]}" source --download-only kubernetes)
    compgen -G "$work/kubernetes_*really$version-*.dsc" >/dev/null || {
        echo "kubernetes: the source package is not of $version: $(ls "$work"/*.dsc)" >&2
        return 1
    }
}

unpack_source() {
    mkdir -p "$work/go/src/k8s.io"
    dpkg-source --no-check -x "$work"/kubernetes_*.dsc "$tree" >/dev/null
    # The bundled one is wrong for Go 1.18 and later: the API server crashes at the first custom resource.
    rm -r "$tree/vendor/github.com/modern-go/reflect2"
    cp -r /usr/share/gocode/src/github.com/modern-go/reflect2 "$tree/vendor/github.com/modern-go/"
}

# The one generated file that the source leaves out.
generate_openapi() {
    (cd "$tree" && go build -o "$work/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen)
    local folders
    folders=$(cd "$tree" && grep --dereference-recursive --files-with-matches --include='*.go' \
        '^// *+k8s:openapi-gen=' pkg vendor/k8s.io --exclude-dir=code-generator --exclude-dir=sample-apiserver |
        xargs -n1 dirname | LC_ALL=C sort -u | sed 's|^|k8s.io/kubernetes/|' | paste -sd,)
    (cd "$tree" && "$work/openapi-gen" -i "$folders" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
        -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r "$work/violations" --output-base "$work/go/src")
}

build_program() {
    local flags="-s -w" package
    for package in component-base/version client-go/pkg/version; do
        package=k8s.io/kubernetes/vendor/k8s.io/$package
        flags+=" -X $package.gitVersion=v$version -X $package.gitMajor=1 -X $package.gitMinor=20"
    done
    (cd "$tree" && go build -o "$work/bin/$1" -ldflags "$flags" "./cmd/$1")
}

# Unpacked, not installed: the package of etcd would start a server.
unpack_packages() {
    (cd "$work" && apt-get -qq -o APT::Sandbox::User=root download etcd-server kubernetes-client)
    dpkg -x "$work"/etcd-server_*.deb "$work/packages"
    dpkg -x "$work"/kubernetes-client_*.deb "$work/packages"
    cp "$work/packages/usr/bin/etcd" "$work/packages/usr/bin/kubectl" "$work/bin/"
}

build_programs() {
    . /etc/os-release
    codename=$VERSION_CODENAME
    work=$cache/work tree=$cache/work/go/src/k8s.io/kubernetes
    rm -rf "$work"
    mkdir -p "$work/bin"
    export GO111MODULE=off GOPATH="$work/go" GOCACHE="$work/cache" GOTMPDIR="$work"
    step "fetching the source of Kubernetes $version"
    fetch_source
    unpack_source
    step "generating its OpenAPI document"
    generate_openapi
    local name
    for name in "${programs[@]}"; do
        step "building $name"
        build_program "$name"
    done
    unpack_packages
    mv "$work/bin" "$cache/$version"
    rm -rf "$work"
}

# Cloche and its requirements for Debian's own Python, compiled, and that Python's library compiled: in a pod nobody keeps
# what an import compiles.
make_image() {
    local build=$checkout/build/kubernetes place=usr/local/lib/python3.11/dist-packages
    rm -rf "$build"
    mkdir -p "$build/tree/$place"
    eval "$(.venv/bin/python scripts/uv_settings.py)"
    .venv/bin/uv pip install --quiet --python /usr/bin/python3 --target "$build/tree/$place" --compile-bytecode \
        --refresh-package cloche --constraint requirements/runtime.txt --constraint requirements/dev.txt ".[node]"
    (cd / && find usr/lib/python3.11 -path '*/__pycache__/*.pyc' ! -path '*/test/*' ! -path '*/idlelib/*' -print0 |
        tar --create --null --files-from=-) | tar --extract --directory="$build/tree"
    .venv/bin/python scripts/sandbox_image.py cloche-test:node "$build/node.tar" dash bash coreutils tar python3 util-linux \
        procps --tree "$build/tree" --program "$build/tree/$place/bin/cloche"
    .venv/bin/python scripts/sandbox_image.py cloche-test:python "$build/python.tar" dash coreutils python3
    .venv/bin/python scripts/sandbox_image.py cloche-test:pause "$build/pause.tar" --busybox /usr/bin/busybox \
        --command "sleep infinity"
    rm -rf "$build/tree"
}

# One at a time: several checkouts share the programs.
((EUID == 0)) || { echo "kubernetes: this needs root" >&2; exit 1; }
mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9
install_packages
if [[ -e $cache/$version/kubectl ]]; then
    step "the programs of $version are there"
else
    build_programs
fi
step "making the image"
make_image
step "ready: $cache/$version and build/kubernetes"
