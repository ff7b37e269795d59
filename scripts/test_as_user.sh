#!/usr/bin/env bash
# Run the escape, integration and conformance tests once more as an ordinary user, from an installed wheel: the system's
# own Python in a virtual environment outside root's home, a numeric uid without a name, a clean environment. What proves
# the same whoever runs it (marker `once`) is left out: root has just run it. With the argument `soak`, run those escape
# tests that are left to `make soak`; with `uid`, say who the user is.
set -euo pipefail
cd "$(dirname "$0")/.."

uid=61234
python=/usr/bin/python3
if [[ ${1:-} == uid ]]; then
    echo "$uid"
    exit 0
fi
if ((EUID != 0)); then
    echo "test_as_user: already an ordinary user (uid $EUID): the suite before this one was that run"
    exit 0
fi

work=$(mktemp -d /var/tmp/test-as-user.XXXXXXXX)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
mkdir "$work/wheel" "$work/project" "$work/home" "$work/tmp"

echo "test_as_user: building a wheel and installing it with $python"
.venv/bin/python -m pip --quiet wheel --no-deps --no-build-isolation --wheel-dir "$work/wheel" .
"$python" -m venv "$work/venv"
pip=("$work/venv/bin/python" -m pip --quiet --disable-pip-version-check install)
"${pip[@]}" --require-hashes --requirement requirements/runtime.txt --requirement requirements/examples.txt \
    --requirement requirements/dev.txt
"${pip[@]}" --no-deps "$work"/wheel/*.whl

cp -R tests examples docs bench scripts README.md CHANGELOG.md pyproject.toml "$work/project/"
cp -R .toolchains "$work/toolchains"
# Read by all, as an installation is; only what a user's own folder would be is theirs.
chmod -R go=rX "$work/venv" "$work/toolchains"
chown -R "$uid:$uid" "$work/project" "$work/home" "$work/tmp"

cd "$work/project"
# Each run in a tree of processes of its own: what is left behind is looked for there (tests/leftovers.py).
as_user() {
    setpriv --reuid=$uid --regid=$uid --clear-groups --inh-caps=-all -- \
        env --ignore-environment HOME="$work/home" TMPDIR="$work/tmp" LANG=C.UTF-8 ${CI:+CI="$CI"} \
        ${TESTED_BESIDE_S:+TESTED_BESIDE_S="$TESTED_BESIDE_S"} \
        PATH="$work/venv/bin:/usr/local/bin:/usr/bin:/bin:$work/toolchains/bin" \
        "$work/venv/bin/python" scripts/adopt.py "$work/venv/bin/python" -m pytest -p no:cacheprovider "$@" </dev/null
}

if [[ ${1:-} == soak ]]; then
    as_user tests/escape --timeout 1800 -m "soak and not once"
    exit
fi
# With job control, each as a group of its own: a shell without it has its background ignore SIGINT, and tests send that.
set -m
as_user tests/escape -m "not soak and not once" >"$work/escape.log" 2>&1 &
escape=$!
as_user tests/integration tests/conformance -m "not soak and not once" &
rest=$!
stop() {  # either may have ended, and how they end is no news once we are told to stop
    kill "-$1" -- "-$escape" "-$rest" 2>/dev/null || true
    wait || true
    exit 130
}
trap 'stop INT' INT
trap 'stop TERM' TERM
code=0
wait "$rest" || code=$?
wait "$escape" || code=$?
cat "$work/escape.log"
exit "$code"
