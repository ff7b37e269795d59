"""An ordinary user with a range in /etc/subuid: guests have ids of it, and the caller's own is not mapped at all."""

import os
import shutil

import pytest

from tests.harness.environments import COUNT, FIRST, RANGE, UID, run_as_user

pytestmark = pytest.mark.root  # who else could give a user a range?

ST_NODEV = 4

HEAD = """
import json, os, sys, time, cloche
MAP = "[line.split()[1:] for line in open('/proc/self/uid_map')]"
WRITE = "os.close(os.open('secret', os.O_WRONLY | os.O_CREAT, 0o600)); open('secret', 'w').write('mine')"
CODE = f"import os; {WRITE}; {MAP}"
def ids(value):
    return [int(first) for first, count in value if count == "1"]
def saved(result):
    (path,) = result.save(f"{os.environ['HOME']}/{time.monotonic_ns()}")
    found = f"{os.environ['HOME']}/{max(name for name in os.listdir(os.environ['HOME']) if name[0].isdigit())}/{path}"
    return [open(found).read(), os.stat(found).st_uid]
"""


def is_of_range(ids: list[int]) -> bool:
    """Tell whether these are ids of the user's range, and at least one."""
    return bool(ids) and all(FIRST <= one < FIRST + COUNT for one in ids)


def test_guests_have_ids_of_the_range_and_the_caller_sees_their_files() -> None:
    """However it starts; and the programs that may map ids are called once in a process."""
    found = run_as_user(
        HEAD
        + """
from cloche.backends import subordinate_ids as subids
calls, start = [], subids.start_mapper
subids.start_mapper = lambda programs, *rest: calls.append(bool(programs)) or start(programs, *rest)
results = [cloche.run(CODE, warm=False)]
while len(results) < 4 or results[-1].meta["start"] != "pooled":
    results.append(cloche.run(CODE))
runs = [[one.meta["start"], ids(one.value), *saved(one), str(one.enforcement.controls["identity"].state)]
        for one in results]
print(json.dumps([runs, sum(calls)]))
"""
    )
    runs, calls = found
    assert {start for start, *_ in runs} >= {"cold", "pooled"}
    assert all(is_of_range(ids) for _, ids, *_ in runs)
    assert {(text, owner, state) for *_, text, owner, state in runs} == {("mine", UID, "enforced")}
    assert calls == 1


def test_an_open_sandbox_reads_and_writes_what_is_its_guests() -> None:
    """In both directions, from run to run, in sessions, checkpoints and forks; two sandboxes have no id in common."""
    found = run_as_user(
        HEAD
        + """
seen = []
with cloche.Sandbox(live=False) as sandbox, cloche.Sandbox(live=False) as other:
    seen.append([ids(sandbox.run(CODE).value), ids(other.run(CODE).value)])
    sandbox.write_file("given/file", b"from outside")
    for _ in range(3):
        result = sandbox.run("open('given/file', 'a').write('+'); open('secret').read()")
        seen.append([result.value, sandbox.read_file("given/file").decode(), [*sandbox.list_files()]])
    with sandbox.session() as session:
        session.run(f"import os; os.mkdir('closed', 0o700); open('closed/a', 'w').write('1'); {MAP}")
        session.checkpoint("first")
        changed = session.run("open('closed/a', 'w').write('2')")
        seen.append([file.path for file in changed.files])
        session.rollback("first")
        for fork in session.fork(2):
            fork.run("open('closed/a', 'a').write('fork'); os.chmod('closed/a', 0o600)")
            seen.append([ids(fork.run(MAP).value), fork.run("open('closed/a').read()").value])
            fork.close()
        seen.append(session.run("open('closed/a').read()").value)
    seen.append(sandbox.read_file("closed/a").decode())
print(json.dumps(seen))
"""
    )
    (one, other), *runs = found[:4]
    assert is_of_range(one)
    assert is_of_range(other)
    assert not {*one} & {*other}
    assert runs == [["mine", f"from outside{'+' * n}", ["given/file", "secret"]] for n in (1, 2, 3)]
    changed, *forks, at_last, outside = found[4:]
    assert changed == ["closed/a"]
    assert [text for _, text in forks] == ["1fork", "1fork"]
    assert (at_last, outside) == ("1", "1")


def test_a_guest_cannot_become_the_caller() -> None:
    """A process of ours in the namespace of the range can, with the very call that is refused inside."""
    found = run_as_user(
        HEAD
        + """
from cloche.backends.host import measure_host
from cloche.jail import subordinate_ids as subids
host = measure_host()
ATTEMPT = '''
import os
def become(uid):
    try:
        os.setresuid(uid, uid, uid)
    except OSError as error:
        return error.errno
    return 0
'''
reading, writing = os.pipe()
if os.fork() == 0:
    names = {}
    exec(ATTEMPT, names)
    subids.enter(os.dup(host.namespace))
    other = names["become"](host.ids.first)
    os.write(writing, json.dumps([other, os.getuid()]).encode())
    os._exit(0)
os.wait()
outside = json.loads(os.read(reading, 99))
if os.fork() == 0:
    names = {}
    exec(ATTEMPT, names)
    subids.enter(os.dup(host.namespace))
    os.setresuid(host.ids.first, -1, -1)
    os.write(writing, json.dumps([names["become"](0)]).encode())
    os._exit(0)
os.wait()
outside += json.loads(os.read(reading, 99))
tried = f"[become(one) for one in (0, {os.getuid()}, {host.ids.first}, {host.ids.first + 1})]"
inside = [cloche.run(ATTEMPT + tried, warm=False).value, cloche.run(ATTEMPT + tried).value]
with cloche.Sandbox(live=False) as sandbox, sandbox.session() as session:
    inside.append(session.run(ATTEMPT + tried).value)
print(json.dumps([outside, inside]))
"""
    )
    outside, inside = found
    assert outside == [0, FIRST, 0]
    assert all(len(errors) == 4 and all(errors) for errors in inside)


def test_files_are_seen_by_a_fork_of_the_caller_and_when_the_mapper_was_killed() -> None:
    """What shows the files is started again; the range stays the same one."""
    found = run_as_user(
        HEAD
        + """
from cloche.backends.host import measure_host
held = measure_host().ids
first = cloche.run(CODE)
pid = held._process.pid
os.kill(pid, 9)
again = cloche.run(CODE)
reading, writing = os.pipe()
if os.fork() == 0:
    os.write(writing, json.dumps(saved(cloche.run(CODE))).encode())
    os._exit(0)
os.wait()
last = cloche.run(CODE)
print(json.dumps([saved(first), saved(again), json.loads(os.read(reading, 99)), saved(last), held._process.pid != pid]))
"""
    )
    assert found == [["mine", UID]] * 4 + [True]


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ({"subuid": ""}, "/etc/subuid has no range"),
        ({"subgid": ""}, "/etc/subgid has no range"),
        ({"subuid": f"{UID}:{FIRST}:8\n"}, "/etc/subuid has no range"),
        ({"subuid": f"{UID}:{FIRST}:{'9' * 5000}\n"}, "/etc/subuid has no range"),
        ({"broken": shutil.which("newuidmap") or ""}, "newuidmap"),
    ],
)
def test_without_a_range_that_works_guests_have_the_callers_id(what: dict[str, str], why: str) -> None:
    """As before; what says so names the reason, and who requires an identity is refused."""
    found = run_as_user(
        HEAD
        + """
import asyncio
from cloche.backends.local import LocalBackend
from cloche.core.enforcement import Control
from cloche.core.limits import Limits
from cloche.core.policy import Policy
result = cloche.run(CODE)
measure = result.enforcement.controls["identity"]
async def require():
    async with LocalBackend().open(Policy(require_controls=(Control.IDENTITY,)), Limits()):
        return ""
try:
    refused = asyncio.run(require())
except cloche.BackendUnavailable as error:
    refused = str(error)
print(json.dumps([ids(result.value), saved(result), str(measure.state), measure.reason, refused]))
""",
        **what,
    )
    ids, saved, state, reason, refused = found
    assert (ids, saved, state) == ([UID], ["mine", UID], "partial")
    assert why in reason
    assert why in refused


def test_a_second_range_is_taken_where_the_first_is_too_small() -> None:
    """As large ones are; what is not a range is passed over."""
    rows = f"nobody:1:5\n{UID}:x:y\n{UID}:{FIRST - 100}:8\n{RANGE}"
    found = run_as_user(HEAD + "print(json.dumps(ids(cloche.run(CODE).value)))", subuid=rows)
    assert is_of_range(found)


def test_a_toolchain_that_others_may_not_read_keeps_the_callers_id() -> None:
    """A guest with another one would not find its interpreter's files."""
    found = run_as_user(
        HEAD
        + """
from cloche.backends import host
look = host.is_readable_by_others
host.is_readable_by_others = lambda path: path != sys.prefix and look(path)
result = cloche.run(CODE)
print(json.dumps([ids(result.value), result.enforcement.controls["identity"].reason, sys.prefix]))
"""
    )
    ids, reason, prefix = found
    assert ids == [UID]
    assert f"could not read {prefix}" in reason


def test_threads_that_come_first_share_one_range() -> None:
    """A jail below another range than the mapper's could never be looked into."""
    found = run_as_user(
        HEAD
        + """
import threading
from cloche.backends import subordinate_ids
seen = []
def run():
    seen.append(saved_once(cloche.run(CODE)))
def saved_once(result):
    return [file.path for file in result.files]
threads = [threading.Thread(target=run) for _ in range(4)]
for one in threads: one.start()
for one in threads: one.join()
result = cloche.run(CODE)
while result.meta["start"] != "pooled":
    result = cloche.run(CODE)
print(json.dumps([seen, saved_once(result), len(subordinate_ids._held_ranges)]))
"""
    )
    assert found == [[["secret"]] * 4, ["secret"], 1]


def test_a_caller_that_closes_what_it_did_not_open_goes_on() -> None:
    """As a daemon does: the range is taken anew."""
    found = run_as_user(
        HEAD
        + """
cloche.run("0")
reading, writing = os.pipe()
if os.fork() == 0:
    os.dup2(writing, 0)
    os.closerange(3, 1024)
    results = [cloche.run(CODE), cloche.run(CODE)]
    os.write(0, json.dumps([ids(one.value) + [file.path for file in one.files] for one in results]).encode())
    os._exit(0)
os.wait()
print(os.read(reading, 999).decode() or "[]")
"""
    )
    assert len(found) == 2
    assert all(is_of_range(some) and path == "secret" for *some, path in found)  # two ids where it started warm


def test_a_mapper_that_is_stopped_holds_up_neither_the_loop_nor_the_run() -> None:
    """It is ended and another one started, elsewhere; as it is when it was killed after it had done its work."""
    found = run_as_user(
        HEAD
        + """
import asyncio, signal
from cloche.backends.host import measure_host
from cloche.backends.local import LocalBackend
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.request import Request
async def main():
    held, seen = measure_host().ids, []
    async def run():
        async with LocalBackend().open(Policy(), Limits()) as sandbox:
            await sandbox.run(Request(code="0"))
            result = await sandbox.run(Request(code=CODE))
            return [[file.path for file in result.files], (await sandbox.read_file("secret", max_bytes=9)).decode()]
    hear, lost = held._receive, [ConnectionResetError()]
    async def once():
        gaps, last = [0.0], time.monotonic()
        task = asyncio.create_task(run())
        while not task.done():
            await asyncio.sleep(0.01)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
        seen.append([*(await task), max(gaps) < 3])
    os.kill(held._process.pid, signal.SIGSTOP)
    await once()
    def hear_and_lose(*patience):
        answer = hear(*patience)
        if lost: raise lost.pop()
        return answer
    held._receive = hear_and_lose
    await once()
    return seen
begun = time.monotonic()
print(json.dumps([asyncio.run(main()), time.monotonic() - begun < 9]))
"""
    )
    assert found == [[[["secret"], "mine", True]] * 2, True]


def test_the_mapper_keeps_none_of_the_hosts_mounts() -> None:
    """What the host unmounts would live on there, where it is not told; whether the range was there before or not."""
    found = run_as_user(
        HEAD
        + """
from cloche.backends.host import measure_host
held, seen = measure_host().ids, []
for _ in range(2):
    cloche.run(CODE)
    with open(f"/proc/{held._process.pid}/mountinfo") as file:
        seen.append([line.split()[4] for line in file])
    held.rest()
print(json.dumps(seen))
"""
    )
    for places in found:
        assert {"/", "/proc"} <= {*places}
        assert all(place == "/" or place.startswith("/proc") for place in places)


def test_a_guests_set_user_id_file_is_no_program_of_the_callers() -> None:
    """In no mount that the caller has of it, though one shows it as the caller's own; nor when it is saved."""
    found = run_as_user(
        HEAD
        + """
MINE = "import os; open('program', 'w').write('x'); os.chmod('program', 0o6755)"
with cloche.Sandbox(live=False) as sandbox:
    result = sandbox.run(MINE)
    seen = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            state = os.stat("program", dir_fd=fd)
        except OSError:
            continue
        seen.append([state.st_uid == os.getuid(), state.st_mode & 0o6000, os.fstatvfs(fd).f_flag])
    result.save(f"{os.environ['HOME']}/out")
state = os.stat(f"{os.environ['HOME']}/out/program")
print(json.dumps([seen, state.st_uid, state.st_mode & 0o6111]))
"""
    )
    seen, owner, mode = found
    assert {is_ours for is_ours, *_ in seen} == {True, False}
    assert all(bits == 0o6000 and flags & os.ST_NOSUID and flags & ST_NODEV for _, bits, flags in seen)
    assert (owner, mode) == (UID, 0)


def test_ids_are_claimed_when_the_users_cache_was_removed_and_refused_when_none_is_left() -> None:
    """In words of ours, whoever claims them: the caller for an open sandbox, a helper for a single run."""
    found = run_as_user(
        HEAD
        + """
import fcntl, shutil, struct
from cloche.backends.host import measure_host
def tried(run):
    try:
        return is_file_seen(run())
    except cloche.StartFailed as error:
        return str(error)
def is_file_seen(result):
    return [file.path for file in result.files]
def open_one():
    with cloche.Sandbox(live=False, warm=False) as sandbox:
        return sandbox.run(CODE)
held, seen = measure_host().ids, []
for run in (lambda: cloche.run(CODE, warm=False), open_one):
    shutil.rmtree(f"{os.environ['HOME']}/.cache", ignore_errors=True)
    seen.append(tried(run))
locks = os.open(f"{os.environ['HOME']}/.cache/cloche/ids", os.O_RDWR)
fcntl.fcntl(locks, 37, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, held.first, held.count, 0))
seen += [tried(lambda: cloche.run(CODE, warm=False)), tried(open_one)]
print(json.dumps(seen))
"""
    )
    assert found[:2] == [["secret"]] * 2
    assert all("outside ids" in said for said in found[2:])


def test_a_program_that_never_ends_is_not_left_behind() -> None:
    """One that maps ids may wait for a directory service."""
    found = run_as_user(
        HEAD
        + """
from cloche.backends import subordinate_ids
subordinate_ids.MAPPER_S = 1.0
result = cloche.run(CODE)
cloche.run(CODE)
left = []
for pid in filter(str.isdecimal, os.listdir("/proc")):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if b"newuidmap" in file.read().split(b"\\0")[0]:
                left.append(pid)
    except OSError:
        continue
print(json.dumps([result.enforcement.controls["identity"].reason, left]))
""",
        broken=shutil.which("newuidmap") or "",
        instead=shutil.which("yes") or "",
    )
    reason, left = found
    assert "does not answer" in reason
    assert left == []
