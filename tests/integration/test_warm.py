"""A warm start is a start like any other: same results, same limits, nothing of the run before."""

import ast
import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cloche
from cloche.backends.host import measure_host
from cloche.backends.local.prefork import WarmJail, close_pools, pool_for
from cloche.backends.toolchain import python_toolchain
from cloche.core.errors import OutcomeUnknown
from cloche.core.policy import Policy
from cloche.core.result import Status
from cloche.forkserver.pool import Pool, remove_cgroup
from cloche.forkserver.slot import Slot, Template
from cloche.jail import shared_status
from tests.harness.leaks import Snapshot, wait_for_leftovers
from tests.harness.processes import kill_and_wait, kill_helpers, run_pooled, run_warm

pytestmark = pytest.mark.user_soak

PROGRAMS = str(Path(__file__).parents[1] / "harness/programs")
STARTS_THREAD = "starts_a_thread"
NO_CGROUP: dict[str, Any] = {"cgroup_version": 0, "cgroup_folders": {}, "group_name": str, "least": 1, "most": 1}
# What a program can see of how it was started, and how it may end.
SCRIPTS = {
    "flags": "import sys; print(sys.flags, sys.dont_write_bytecode, sys.flags.isolated)",
    "paths": "import sys; print(sys.path, sys.prefix, sys.executable, sys.argv, sys.orig_argv[:1])",
    "main": "print(sorted(globals()), __name__, __file__, __builtins__.__name__)",
    "environment": (
        "import os; del os.environ['CLOCHE_OUTPUT']\n"
        "print(sorted(os.environ.items()), os.getcwd(), os.getuid(), os.umask(0o22))"
    ),
    "streams": "import sys; print(sys.stdin, sys.stdout, sys.stderr, sys.stdout.line_buffering)",
    "descriptors": "import os; print(sorted(os.listdir('/proc/self/fd')))",
    "limits": "import resource as r; print([r.getrlimit(n) for n in range(16)], '')",
    "powers": "print([line for line in open('/proc/self/status') if line[:3] in ('Cap', 'NoN', 'Sec', 'Uid', 'Gid')])",
    "places": "import os; print(sorted(os.listdir('/')), [os.listdir(p) for p in ('/workspace', '/tmp', '/dev/shm')])",
    "room": "import os; print([os.statvfs(p)[1:] for p in ('/workspace', '/tmp', '/dev/shm')])",
    "signals": "import signal as s; print([s.getsignal(n) for n in (1, 2, 13, 15, 17, 25)], s.pthread_sigmask(0, []))",
    "traceback": "def f():\n    return 1 / 0\n\nf()",
    "syntax": "x = (1,\ny = 2",
    "warning": "import warnings\nwarnings.warn('look')\nx = 1 is 1",
    "exit": "import sys; sys.exit('gone')",
    "code": "raise SystemExit(7)",
    "abort": "import os; os.abort()",
    "killed by itself": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "segmentation fault": "import ctypes; ctypes.string_at(0)",
    "interrupt": "raise KeyboardInterrupt",
    "value": "x = [1, 2]\nx + [3]",
    "value on two lines": "[\n1,\n2,\n]",
    "value after a semicolon": "x = 1; x + 1",
    "value behind a comment": "5  # five\n# more",
    "value with the future": "from __future__ import annotations\ndef f(x: y): ...\nf.__annotations__",
    "no value": "x = 5",
    "exit function": "import atexit; atexit.register(print, 'at exit'); print('before')",
    "thread": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
    "unflushed": "f = open('f', 'w'); f.write('kept')",
    "finalizer": "class A:\n    def __del__(self): print('gone')\na = A()",
    "child": "import subprocess, sys; print(subprocess.run([sys.executable, '-c', 'print(1)'], capture_output=True))",
    "multiprocessing": "import multiprocessing as m\np = m.Process(target=print, args=(1,))\np.start(), p.join()",
    "own module": "import helper; print(helper.x, helper.__file__)",
}  # fmt: skip


def _kill(slots: Iterable[Slot]) -> None:
    known = [slot.pid for slot in slots if slot.pid]
    assert known
    for pid in known:
        os.kill(pid, 9)


def _wait_until_empty(cgroup: Mapping[str, Any] | None) -> None:
    deadline = time.monotonic() + 30
    for folder in cgroup["folders"].values() if cgroup is not None else ():
        processes = Path(folder, "cgroup.procs")
        while processes.exists() and (living := processes.read_text().split()):
            assert time.monotonic() < deadline, f"processes {living} live on in {folder}"
            time.sleep(0.001)


def _shown(result: cloche.Result) -> tuple[object, ...]:
    files = [(record.path, record.size) for record in result.files]
    return result.stdout, result.stderr, result.exit_code, result.status, result.value, result.value_is_repr, files


@pytest.mark.parametrize("name", SCRIPTS)
def test_nobody_can_tell_a_warm_start(name: str) -> None:
    """A program prints, raises, returns and leaves the same, whether its interpreter was forked or started."""
    files = {"helper.py": "x = 5"}
    options = {"argv": ["a", "b"], "env": {"MINE": "1"}, "files": files, "cpus": 2}
    cold = cloche.run(SCRIPTS[name], warm=False, **options)
    assert cold.meta["start"] == "cold"
    assert _shown(run_warm(SCRIPTS[name], **options)) == _shown(cold)
    assert _shown(run_pooled(SCRIPTS[name], **options)) == _shown(cold)


def test_the_same_enforcement() -> None:
    """What is enforced does not depend on how a run started."""
    assert run_pooled("1").enforcement == cloche.run("1", warm=False).enforcement


def test_limits_follow_the_run() -> None:
    """Each run has its own limits, though sandboxes are made ahead and control groups are used again."""
    take = "x = bytearray({} << 20); print(len(x) >> 20)"
    # Where memory is summed now and then, what is gone before the next look is not seen.
    keep = f"{take}; import time; time.sleep(9)"
    assert run_pooled(take.format(100)).stdout == "100\n"
    assert run_warm(keep.format(100), memory="64m").status == "out_of_memory"
    assert run_warm(take.format(400), memory="512m").stdout == "400\n"
    assert run_warm(keep.format(100), memory="64m").status == "out_of_memory"
    assert run_warm("import time; time.sleep(9)", timeout=0.3).status == "timeout"
    assert run_warm("open('f', 'wb').write(bytes(9 << 20))", disk="8m").status == "disk_limit"
    assert run_pooled("print(1)").stdout == "1\n"


def test_quota_is_each_run_s_own() -> None:
    """A run that used up its share of the processor does not slow down the one after it in the same sandbox."""
    seconds: list[float] = []
    while not seconds or (min(seconds) >= 1.0 and len(seconds) < 5):  # others may have the processors at any time
        for _ in range(4):
            run_warm("import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass", cpus=0.5)
        started = time.monotonic()
        assert run_warm("print(1)", cpus=0.5).stdout == "1\n"
        seconds.append(time.monotonic() - started)
    assert min(seconds) < 1.0, seconds


def test_modules_can_be_loaded_ahead() -> None:
    """What `preload` names is there when the code starts."""
    look = "import sys; print('decimal' in sys.modules)"
    assert run_warm(look, preload=["decimal"]).stdout == "True\n"
    assert run_warm(look).stdout == "False\n"


def test_a_module_that_cannot_be_loaded_ahead_is_no_obstacle() -> None:
    """A missing module is the program's affair, at the moment when it imports it."""
    assert run_warm("print(1)", preload=["no_such_module_anywhere"]).stdout == "1\n"


def test_a_template_with_threads_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """A module that starts threads when it is loaded makes warm starts impossible, and that is said."""
    caplog.set_level("WARNING", logger="cloche.warm")
    pool = Pool(
        {"preload": [STARTS_THREAD], "extra_paths": [PROGRAMS], "customizes": False, "home": "/", "ahead": None},
        **NO_CGROUP,
    )
    pool.start()
    deadline = time.monotonic() + 60
    while "threads" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.02)
        pool.start()
    assert "loading started 1 threads" in caplog.text
    assert not pool.is_ready()
    pool.close()


def test_a_killed_template_is_replaced() -> None:
    """Runs go on, cold or warm, when somebody kills the template."""
    run_pooled("1")
    pool = pool_for(Policy(), measure_host())
    template, deadline = pool._template, time.monotonic() + 30
    assert template is not None
    while not template.was_well:  # or the next one is not started at once
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(template._process.pid, 9)
    for number in range(5):
        assert cloche.run(f"print({number})").stdout == f"{number}\n"
    assert run_warm("print(1)").stdout == "1\n"


@pytest.mark.root
def test_a_guest_notes_for_those_after_it_what_memory_they_will_write_to() -> None:
    """The first one of a prefork jail that has the time; where the kernel can have it copied at once."""
    run_pooled("1")
    pool = pool_for(Policy(), measure_host())
    handoffs = [slot.handoff for slot in pool._idle if slot.handoff is not None]
    deadline = time.monotonic() + 60
    while shared_status.is_possible() and not any(
        shared_status.dirty_pages(handoff.other_ends[1]) for handoff in handoffs
    ):
        assert time.monotonic() < deadline, "no guest has noted its pages"
        time.sleep(0.02)
    assert handoffs


def test_a_helper_killed_while_it_waits_is_not_missed() -> None:
    """A slot whose helper died is passed over, or its run starts afresh: nothing of the program had begun.

    Its guest dies of that a moment later. One that takes orders in between has begun, which is another case.
    """
    run_pooled("1")
    kill_helpers(slot.pid for slot in pool_for(Policy(), measure_host())._idle if slot.pid)
    for number in range(5):
        assert cloche.run(f"print({number})").stdout == f"{number}\n"


def test_after_a_killed_helper_is_cleared_up_in_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that begins without one starts afresh all the same: from Python 3.12 on a time-out needs one."""
    wait_for = asyncio.wait_for

    def demanding(*given: Any, **settings: Any) -> Any:
        assert asyncio.current_task() is not None
        return wait_for(*given, **settings)

    monkeypatch.setattr(asyncio, "wait_for", demanding)
    run_pooled("1")
    kill_helpers(slot.pid for slot in pool_for(Policy(), measure_host())._idle if slot.pid)
    assert cloche.run("print(5)", memory="77MiB").stdout == "5\n"  # other amounts, which the helper must be sent


def _kill_what_is_taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have each helper that a pool hands out die at once; return their numbers, as they die."""
    take, killed = Pool.take, list[int]()

    def take_and_kill(pool: Pool, jail: WarmJail) -> Slot | None:
        slot = take(pool, jail)
        if slot is not None:
            killed.append(slot.pid)
            kill_helpers([slot.pid])
        return slot

    monkeypatch.setattr(Pool, "take", take_and_kill)
    return killed


def test_a_session_and_runs_whose_warm_start_fails_share_their_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run after a session starts afresh, in the files that are there."""

    async def share() -> None:
        async with cloche.AsyncSandbox(live=False) as sandbox:
            session = await sandbox.session()
            await session.run("open('kept', 'w').write('1')")
            killed = _kill_what_is_taken(monkeypatch)
            result = await sandbox.run("print(open('kept').read()); open('new', 'w').write('2')")
            assert (result.stdout, result.meta["start"], len(killed)) == ("1\n", "cold", 1)
            assert (await session.run("print(open('new').read())")).stdout == "2\n"

    run_pooled("1")
    asyncio.run(share())


def test_files_outlive_a_failed_move_to_a_warm_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox that began before there was a template moves to one; where that fails it goes on by itself."""

    async def move() -> None:
        async with cloche.AsyncSandbox(live=False) as sandbox:
            first = await sandbox.run("open('kept', 'w').write('1')")
            assert first.meta["start"] == "cold"
            await asyncio.to_thread(run_pooled, "1")
            killed = _kill_what_is_taken(monkeypatch)
            result = await sandbox.run("print(open('kept').read())")
            assert (result.stdout, result.meta["start"], len(killed)) == ("1\n", "cold", 1)

    close_pools()
    asyncio.run(move())


@pytest.mark.parametrize("is_prefork", [False, True])
def test_a_helper_killed_while_it_builds_takes_all_along(is_prefork: bool) -> None:
    """Killed at any moment of the building, a helper leaves no reaper that goes on in its place."""
    run_pooled("1")
    pool = pool_for(Policy(), measure_host())
    known = pool._latest
    assert isinstance(known, WarmJail)
    jail = replace(known, base_key=("built in vain", is_prefork), is_prefork=is_prefork and known.is_prefork)
    before = Snapshot.take()
    for number in range(40):
        run_warm("1")
        pool = pool_for(Policy(), measure_host())
        slot = pool.take(known)
        assert slot is not None
        jail.prepare(slot)
        time.sleep(number * 0.0001)
        kill_and_wait([slot.pid])
        pool.write_off(slot)
        slot.close()
        _wait_until_empty(slot.cgroup)  # its removal waits for less than a second
        remove_cgroup(slot.cgroup)
    assert wait_for_leftovers(before, patience_s=10) == []


def test_a_helper_killed_while_it_works_leaves_the_outcome_unknown() -> None:
    """When the code may have run, nobody says that it did not."""
    run_pooled("1")

    async def kill_it() -> None:
        begun = asyncio.Event()
        code = "import time; print('up', flush=True); time.sleep(30)"
        running = asyncio.ensure_future(cloche.arun(code, on_output=lambda *_: begun.set()))
        await asyncio.wait_for(begun.wait(), 30)
        pool = pool_for(Policy(), measure_host())
        _kill(pool._busy)
        await running

    with pytest.raises(OutcomeUnknown):
        asyncio.run(kill_it())
    assert cloche.run("print(1)").stdout == "1\n"


def test_a_forked_caller_starts_anew() -> None:
    """A child of the caller neither uses nor ends what its parent keeps warm."""
    program = """
import os, cloche, sys, time
cloche.run("1"); time.sleep(0.5); cloche.run("1")
pid = os.fork()
if pid == 0:
    print(cloche.run("print('child')").stdout, end="", flush=True)
    os._exit(0)
os.waitpid(pid, 0)
print(cloche.run("print('parent')").stdout, end="")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "child\nparent\n", done.stderr


def test_cancelled_again_and_again() -> None:
    """However often a call is cancelled while it ends, its slot comes back and no descriptor stays open."""

    async def cancel_thrice() -> None:
        for _ in range(8):
            task = asyncio.ensure_future(cloche.arun("import time; time.sleep(20)"))
            await asyncio.sleep(0.03)
            for _ in range(3):
                task.cancel()
                await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await task

    run_pooled("1")
    asyncio.run(cancel_thrice())
    assert not pool_for(Policy(), measure_host())._busy


def test_what_was_cancelled_never_runs_later() -> None:
    """An order that nobody has read when its run is cancelled is no later guest's."""

    async def cancel_at_any_time() -> None:
        draw = random.Random(11)
        for number in range(80):
            stale = [asyncio.ensure_future(cloche.arun("print('stale')")) for _ in range(draw.choice([1, 3]))]
            await asyncio.sleep(draw.random() * 0.006)
            for task in stale:
                task.cancel()
            await asyncio.gather(*stale, return_exceptions=True)
            assert (await cloche.arun(f"print({number})")).stdout == f"{number}\n"

    run_pooled("1")
    asyncio.run(cancel_at_any_time())


def test_a_slot_s_group_is_its_own() -> None:
    """A sandbox that is built ahead leaves the description of the one that it was copied from alone."""
    run_pooled("1")
    pool = pool_for(Policy(), measure_host())
    jail = pool._latest
    assert isinstance(jail, WarmJail)
    before = jail.spec.cgroup
    slot = pool.take(jail)
    assert slot is not None
    jail.prepare(slot)
    pool.give_back(slot)
    assert jail.spec.cgroup == before


def test_a_jail_that_is_still_dying_is_given_to_nobody() -> None:
    """The end of a run may be reported before the kernel is done with it, and the next run shall not wait for that."""
    run_pooled("1")
    pool = pool_for(Policy(), measure_host())
    jail = pool._latest
    slot = pool.take(jail) if isinstance(jail, WarmJail) else None
    assert slot is not None
    slot.is_dying = True
    pool.give_back(slot)
    assert slot not in pool._idle
    assert run_pooled("1").ok


def test_files_in_cycles_are_flushed() -> None:
    """What a script wrote and never closed is in the file, wherever the file object was kept."""
    code = """
class L: pass
l = L(); l.me = l; l.f = open("log", "w"); l.f.write("hello")
f = open("g", "w"); f.write("x")
f
"""
    for result in (cloche.run(code, warm=False), run_pooled(code)):
        assert [(record.path, record.size) for record in result.files] == [("g", 1), ("log", 5)]


def test_own_names_are_free() -> None:
    """A program may call its modules as Cloche calls its own."""
    files = {"interpreter.py": "x = 1", "jail.py": "x = 2"}
    assert run_pooled("import interpreter, jail; print(interpreter.x + jail.x)", files=files).stdout == "3\n"


@pytest.mark.root
def test_objects_of_ipc_end_the_jail_of_a_sandbox() -> None:
    """Whoever makes one has it, and the next run has another namespace."""
    call = "import ctypes; print(ctypes.CDLL(None).semget(4713, 1, {}))"
    with cloche.Sandbox(live=False) as sandbox:
        run_warm("1")
        sandbox.run("1")
        assert sandbox.run(call.format("0o1600")).stdout == "0\n"
        found = sandbox.run(call.format("0"))
        assert (found.stdout, found.meta["start"]) == ("-1\n", "forked")


def test_it_can_be_switched_off() -> None:
    """Without warm starts every interpreter is a fresh one, and nothing is kept ready."""
    close_pools()
    for _ in range(3):
        assert cloche.run("1", warm=False).meta["start"] == "cold"


def test_other_languages_wait_too() -> None:
    """A command that needs no interpreter of ours finds a jail built ahead, too."""
    assert run_pooled("echo hello", language="bash").stdout == "hello\n"


MIXTURE = (
    ("print(1)", Status.OK),
    ("import socket; socket.socket()", Status.OK),
    ("import time; time.sleep(0.03)", Status.OK),
    ("import sys; sys.exit(3)", Status.ERROR),
    ("import os; os.kill(os.getpid(), 9)", Status.SIGNALED),
    ("import time; time.sleep(60)", Status.TIMEOUT),
)


def test_runs_of_all_kinds_follow_one_another() -> None:
    """However a run ends, and whatever it was allowed, the next one on the same helper gets its own end."""
    draw = random.Random(7)
    for _ in range(150):
        code, status = draw.choice(MIXTURE)
        disk = draw.choice(["16m", "32m"])
        assert cloche.run(code, timeout=0.3 if status is Status.TIMEOUT else 20, disk=disk).status is status


def test_nothing_is_remembered_of_folders_that_a_run_does_not_see() -> None:
    """A template looks into the folders of the import path ahead, but only into those that its children see."""
    code = "import os, sys; print([one for one in sys.path_importer_cache if not os.path.exists(one)])"
    hidden = run_warm(code).stdout
    assert [one for one in ast.literal_eval(hidden) if not one.endswith(".zip")] == []


def test_a_warm_up_leaves_no_trace() -> None:
    """A warm program finds what a fresh interpreter has: its arguments, streams and modules, and no output."""
    code = """
import gc, io, os, sys
print(sys.argv, sys.path[0], sorted(os.environ), sys.stdin.read(), sys.stdout.line_buffering, len(gc.garbage))
print([name for name in sys.modules if name.partition('.')[0] in ('jail', 'interpreter')])
"""
    options: dict[str, Any] = {"argv": ["a", "b"], "stdin": "given", "env": {"K": "V"}}
    warm, cold = run_pooled(code, **options), cloche.run(code, warm=False, **options)
    assert (warm.stdout, warm.stderr) == (cold.stdout, cold.stderr)
    assert "given" in warm.stdout


# What only our own code needs, in the frame that runs the script; and what of ours the collector knows.
PRIVILEGES = """
import gc, sys
frame = sys._getframe()
while "privileges" not in frame.f_locals: frame = frame.f_back
print(frame.f_locals["privileges"].exit_early is not None)
"""
COLLECTED = """
import gc, sys
def is_ours(name): return name.partition(".")[0] in ("jail", "interpreter")
known = gc.get_objects()
modules = [one for one in known if type(one) is type(sys)]
for one in known: modules += [part for part in one if type(part) is type(sys)] if type(one) in (list, tuple) else []
print({type(one).__name__ for one in known if is_ours(type(one).__module__)} - {"Compile", "LibraryWatch"})
print({one.__name__ for one in modules if is_ours(one.__name__)})
"""


def test_a_program_gives_an_early_exit_notice_only_where_pid_1_waits_for_one() -> None:
    """No run has it that a reaper waits for, or that runs beside a session in the same files."""
    assert cloche.run(PRIVILEGES, warm=False).stdout == "False\n"
    assert run_pooled(PRIVILEGES).stdout == "True\n"
    with cloche.Sandbox(live=False) as sandbox, sandbox.session():
        assert sandbox.run(PRIVILEGES).stdout == "False\n"


def test_the_collector_knows_nothing_that_the_helper_gave() -> None:
    """A program finds no record, order or module of ours among the objects that it may collect."""
    for result in (cloche.run(COLLECTED, warm=False), run_pooled(COLLECTED)):
        assert result.stdout == "set()\nset()\n", result.stderr


def test_the_callers_own_thread_is_enough() -> None:
    """In a program without handlers of its own, runs need no other thread, and leave no descriptor."""
    program = """
import os, threading, cloche
def look(): return len(os.listdir("/proc/self/fd")), threading.active_count()
while cloche.run("print(1)").meta["start"] != "pooled": pass
before = look()
for _ in range(30): assert cloche.run("print(1)").stdout == "1\\n"
print(look()[0] - before[0] < 4, look()[1])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout == "True 1\n"


@pytest.mark.root
def test_further_runs_of_a_sandbox_wait_in_its_workspace() -> None:
    """A jail is built ahead around the workspace, and goes on whatever came between."""
    with cloche.Sandbox(live=False) as sandbox:
        run_warm("1")
        sandbox.write_file("given", "a")
        starts = [sandbox.run(f"open('{number}', 'w').write('x')").meta["start"] for number in range(6)]
        assert starts.count("pooled") >= 5, starts
        between = (
            lambda: sandbox.run("import time; time.sleep(60)", timeout=0.3),
            lambda: sandbox.run("import socket; socket.socket()"),
            lambda: sandbox.run("ls", language="bash"),
            lambda: sandbox.write_file("more", "b"),
            lambda: sandbox.session().run("open('of a session', 'w').close()"),
            lambda: sandbox.run("raise SystemExit(3)"),
        )
        for come in between:
            come()
            found = sandbox.run("import os; print(sorted(os.listdir()))").stdout
            assert all(f"'{name}'" in found for name in ("given", *range(6)))
        assert sandbox.read_file("more") == b"b"
        assert "of a session" in sandbox.list_files()


RESIDUE = """
import glob, mmap, os, subprocess, sys
os.makedirs('/tmp/left/deep'); open('/tmp/left/deep/file', 'w').write('secret')
open('/dev/shm/left', 'w').write('secret')
if os.fork() == 0:
    os.setsid()
    import time; time.sleep(60)
os.umask(0); os.nice(5)
"""
LOOK = """
import os
print(os.listdir('/tmp'), os.listdir('/dev/shm'))
print(sorted(int(name) for name in os.listdir('/proc') if name.isdigit() and int(name) not in (1, os.getpid())))
print(os.nice(0), os.umask(0o22) == 0o22, len(os.listdir('/proc/self/fd')))
"""


def test_a_sandbox_that_began_cold_goes_on_warm() -> None:
    """The first sandbox of a process waits for no template, and is not left behind by those that come later."""
    close_pools()
    before = Snapshot.take()
    with cloche.Sandbox(live=False) as sandbox:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Template, "is_ready", lambda _: False)  # however late we are
            first = sandbox.run("import os; open('kept', 'w').write('x'); print(os.getuid())")
        assert (first.meta["start"], [file.path for file in first.files]) == ("cold", ["kept"])
        session = sandbox.session()
        session.run("known = 7; open('more', 'w').write('y')")
        starts: list[str] = []
        while not starts or (starts[-1] == "cold" and len(starts) < 600):
            result = sandbox.run("import os; print(os.getuid(), open('kept').read(), sorted(os.listdir()))")
            assert result.stdout == f"{first.stdout.strip()} x ['cloche-main.py', 'kept', 'more']\n"
            starts.append(str(result.meta["start"]))
        assert starts[-1] in {"forked", "pooled"}
        assert result.enforcement == first.enforcement
        assert session.run("known").value == 7
        assert sandbox.run("print(open('more').read())").meta["start"] in {"forked", "pooled"}
    assert wait_for_leftovers(before, patience_s=10) == []


@pytest.mark.root
def test_a_run_of_a_sandbox_finds_nothing_but_its_files() -> None:
    """What an earlier run left in other places, in memory or running is gone, although the jail stays."""
    with cloche.Sandbox(live=False) as sandbox:
        run_warm("1")
        sandbox.run("1")
        expected = sandbox.run(LOOK)
        assert sandbox.run(RESIDUE).ok
        found = sandbox.run(LOOK)
        assert found.meta["start"] == "pooled"
        assert found.stdout == expected.stdout
        inner = {path.split("/")[2] for path in python_toolchain().binds if path.startswith("/tmp/")}
        assert expected.stdout.startswith(f"{sorted(inner)} []\n[]\n")
