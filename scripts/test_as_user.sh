#!/usr/bin/env bash
# Run tests as an ordinary user, from an installed wheel: the system's own Python in a virtual environment outside root's
# home, a numeric uid without a name, a clean environment. `scripts/test_as_user.sh DIR words of pytest's` installs all of
# that in DIR, an empty folder, unless it is there; `scripts/test_as_user.sh uid` says who the user is. With FRAMEWORK set,
# the environment is that framework's (scripts/frameworks.sh).
set -euo pipefail
cd "$(dirname "$0")/.."

uid=61234
if [[ $1 == uid ]]; then
    echo "$uid"
    exit 0
fi
work=$1
shift

install_all() {
    /usr/bin/python3 -m venv --without-pip "$work/venv"
    eval "$(.venv/bin/python scripts/uv_settings.py)"
    uv=(.venv/bin/uv pip install --quiet --python "$work/venv/bin/python")
    "${uv[@]}" --require-hashes --requirement requirements/build.txt --requirement requirements/runtime.txt \
        --requirement requirements/examples.txt --requirement requirements/dev.txt
    "${uv[@]}" --no-deps --no-build-isolation --refresh-package cloche .
    # The user could not keep what Python compiles: each of hundreds of processes would do it anew.
    packages=(cloche _pytest anyio click execnet h11 hypothesis matplotlib numpy packaging PIL platformdirs pluggy pygments
        pyparsing pytest_asyncio rich sortedcontainers sqlalchemy typing_extensions.py xdist yaml)
    unused='/tests?/|/dialects/[^s_]|/f2py/'
    (cd "$work"/venv/lib/python3.*/site-packages &&
        "$work/venv/bin/python" -m compileall -q -x "$unused" "${packages[@]}")
}

if [[ ! -e $work/project ]]; then
    chmod 755 "$work"
    mkdir "$work/home" "$work/tmp"
    if [[ -n ${FRAMEWORK:-} ]]; then
        scripts/frameworks.sh "$FRAMEWORK" "$work/venv" wheel
    else
        install_all
    fi

    cp -R .toolchains "$work/toolchains"
    # Read by all, as an installation is; only what a user's own folder would be is theirs.
    chmod -R go=rX "$work/venv" "$work/toolchains"
    mkdir "$work/copy"
    # Without what other lanes are compiling just now.
    tar --create --exclude=__pycache__ tests examples docs bench scripts deploy toolchains README.md CHANGELOG.md pyproject.toml |
        tar --extract --directory="$work/copy"
    chown -R "$uid:$uid" "$work/copy" "$work/home" "$work/tmp"
    mv "$work/copy" "$work/project"
fi

cd "$work/project"
exec setpriv --reuid=$uid --regid=$uid --clear-groups --inh-caps=-all -- \
    env --ignore-environment HOME="$work/home" TMPDIR="$work/tmp" LANG=C.UTF-8 ${CI:+CI="$CI"} \
    ${TESTED_BESIDE_S:+TESTED_BESIDE_S="$TESTED_BESIDE_S"} \
    PATH="$work/venv/bin:/usr/local/bin:/usr/bin:/bin:$work/toolchains/bin" \
    "$work/venv/bin/python" scripts/adopt.py "$work/venv/bin/python" -m pytest -p no:cacheprovider "$@" </dev/null
