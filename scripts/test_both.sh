#!/usr/bin/env bash
# Run every test but the soak as this user and, when that is root, beside it those that an ordinary user can tell
# something new about (`test_as_user.sh`). Most of the time of either is spent waiting, so they share the machine; what
# the second prints is shown when the first has ended.
set -euo pipefail
cd "$(dirname "$0")/.."

if ((EUID != 0)); then
    exec .venv/bin/python -m pytest -m "not soak"
fi

mkdir -p build
log=build/test_as_user.log
# With job control, as a group of its own: a shell without it has its background ignore SIGINT, and tests send that.
set -m
scripts/test_as_user.sh >"$log" 2>&1 </dev/null &
user=$!
# Whoever stops us stops that part, too; it may have ended by then, which is no failure.
trap 'kill -- "-$user" 2>/dev/null || true' EXIT

root_ended=0
TESTED_BESIDE=$(scripts/test_as_user.sh uid) .venv/bin/python -m pytest -m "not soak" || root_ended=$?
if ((root_ended == 0)); then
    echo "As an ordinary user ($log):"
fi
user_ended=0
wait "$user" || user_ended=$?
trap - EXIT
if ((root_ended == 0 || user_ended != 0)); then
    cat "$log"
fi
exit $((root_ended ? root_ended : user_ended))
