"""Attempts that only a clone makes possible: to keep, hold or reach what belongs to its parent or to a sibling.

Whatever is kept is first shown to be of use: by the parent itself, or by a clone that keeps nothing else.
"""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

import cloche
from cloche.sync import Session
from tests.harness.escape.hostile import TAKE_OVER, in_clone

pytestmark = pytest.mark.both_users

# What a clone keeps, in its own hands, when it is looked at: by name, what is done before it lets go, and after.
KEEPS = {
    "a folder of the workspace": ("kept = os.open('/workspace', os.O_RDONLY)", "pass"),
    "a file of the workspace": ("kept = os.open('/workspace/secret', os.O_RDWR)", "pass"),
    "its working directory": ("pass", "os.chdir('/workspace')"),
    "a pair of sockets": ("SESSION.kept = socket.socketpair()", "pass"),
    "a pipe": ("kept = os.pipe()", "pass"),
    "standard input": ("kept = os.dup(0)", "pass"),
    "its parent's link": ("kept = os.dup(SESSION.link)", "pass"),
    "the pipe of its parent's answers": ("kept = os.dup(SESSION.answers)", "pass"),
    "a descriptor of its process": ("kept = os.pidfd_open(os.getpid())", "pass"),
    "namespaces": ("kept = os.open('/proc/self/ns/mnt', os.O_RDONLY)", "pass"),
    "a watch of a folder": ("syscall(254, syscall(253), b'/workspace', 0xFFF)", "pass"),
    "a mapped file": (
        "import mmap\nwith open('/workspace/secret', 'r+b') as file: SESSION.kept = mmap.mmap(file.fileno(), 0)",
        "os.closerange(3, SESSION.link)",
    ),
    "shared memory without a name": ("import mmap\nSESSION.kept = mmap.mmap(-1, 4096)", "pass"),
    "a child": ("pass", "os.fork() or (os.setsid(), time.sleep(20), os._exit(0))"),
    "a dead child": ("pass", "os.fork() or os._exit(0)"),
    "a thread": ("pass", "threading.Thread(target=time.sleep, args=(20,), daemon=True).start()"),
    "its process group": ("os.setsid = lambda: None", "pass"),
}


@pytest.fixture
def sandbox() -> cloche.Sandbox:
    """Return a sandbox whose cells have half a minute."""
    return cloche.Sandbox(live=False, timeout=30, cpus=2)


def _refuses_to_fork(session: Session) -> str:
    """Try to fork, and return why not; the session lives on."""
    with pytest.raises(cloche.InvalidRequest) as caught:
        session.fork(2)
    assert session.run("'alive'").value == "alive"
    return str(caught.value)


@pytest.mark.parametrize("name", KEEPS)
def test_a_clone_keeps_nothing(name: str, sandbox: cloche.Sandbox) -> None:
    """A clone that holds anything of its parent's is no fork, whatever its interpreter was made to say."""
    before, after = KEEPS[name]
    with sandbox:
        session = sandbox.session()
        session.run("open('/workspace/secret', 'w').write('x' * 4096)")
        session.run(in_clone(before, after))
        assert "clone" in _refuses_to_fork(session)


def test_a_clone_that_keeps_nothing_goes_on(sandbox: cloche.Sandbox) -> None:
    """The control of the above: the same hands in the interpreter, keeping nothing, do not stand in the way."""
    with sandbox:
        session = sandbox.session()
        session.run(in_clone())
        assert [fork.run("1 + 1").value for fork in session.fork(2)] == [2, 2]


def test_a_clone_keeps_no_capability(sandbox: cloche.Sandbox) -> None:
    """It begins with all those of its own namespaces, and is no fork as long as it has any."""
    with sandbox:
        session = sandbox.session()
        session.run(in_clone(give_up="lambda: None"))
        assert "capabilities" in _refuses_to_fork(session)


# The last clone does not leave its parent's process group. When what it shares with its parent says that this stands
# still, it has the group go on, and leaves it before anybody looks. Dead children lengthen the time until then.
WAKE = """
import mmap, random, select
from time import perf_counter
for _ in range(50):
    os.fork() or os._exit(0)
shared, clones, parent = mmap.mmap(-1, 4096), [0], os.getpid()
SETSID, INIT, RECEIVE = os.setsid, FORKING.Clone.__init__, type(SESSION).receive
WAIT_S = random.uniform(0.00006, 0.0004)

def init(self, *rest):
    clones[0] += 1
    INIT(self, *rest)

def release(self, give_up):
    if clones[0] == 1:
        RELEASE(self, give_up)
        shared.close()
        return
    os.setsid = lambda: None
    RELEASE(self, give_up)
    os.setsid = SETSID
    send = SESSION.send
    send({"op": "cloned"})
    SESSION.send = lambda frame: setattr(SESSION, "send", send)
    last, since, until = -1, perf_counter(), perf_counter() + 2
    while perf_counter() < until:
        count = int.from_bytes(shared[0:8], "little")
        if count != last:
            last, since = count, perf_counter()
        elif perf_counter() - since > WAIT_S:
            shared[8:9] = b"1"
            os.kill(0, signal.SIGCONT)
            SETSID()
            break
    shared.close()

def receive():
    if os.getpid() != parent:
        return RECEIVE(SESSION)
    shared[8:9] = b"0"
    until, count = perf_counter() + 5, 0
    poll = select.poll()
    poll.register(SESSION.link, 1)
    while perf_counter() < until and shared[8:9] != b"1" and (count % 16 or not poll.poll(0)):
        count += 1
        shared[0:8] = count.to_bytes(8, "little")
    if shared[8:9] == b"1":
        time.sleep(0.3)
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) > parent:
                try:
                    with open(f"/proc/{name}/root/workspace/seen", "w") as file:
                        file.write("the parent was here")
                except OSError:
                    pass
    return RECEIVE(SESSION)

FORKING.Clone.__init__, FORKING.Clone.release, SESSION.receive = init, release, receive
"""
WAKES_ITS_PARENT = """
import os, signal, time
parent = os.getpid()
if os.fork() == 0:
    while open(f"/proc/{parent}/stat").read().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    os.kill(0, signal.SIGCONT)
    os._exit(0)
os.kill(parent, signal.SIGSTOP)
print("awake")
"""


def test_a_child_wakes_its_stopped_parent() -> None:
    """The control of the next one: by a signal to the group that both are in."""
    command = [sys.executable, "-c", WAKES_ITS_PARENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, start_new_session=True)
    assert done.stdout == "awake\n", done.stderr


@pytest.mark.soak
def test_no_parent_is_awake_beside_its_fork() -> None:
    """However a clone times it: a parent that runs could write to the files of its fork, and read its memory."""
    for _ in range(30):
        with cloche.Sandbox(live=False, timeout=60, cpus=2) as sandbox, sandbox.session() as session:
            session.run(TAKE_OVER + WAKE)
            try:
                (fork,) = session.fork(1)
            except (cloche.InvalidRequest, cloche.StartFailed):
                continue
            time.sleep(0.6)
            assert fork.run("import os; os.path.exists('/workspace/seen')").value is False
            fork.close()


REFUSALS = (
    "Operation not permitted",
    "Permission denied",
    "Read-only file system",
    "Address family not supported by protocol",
    "Protocol not supported",
)
POWERS = """
def newlink():
    link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
def note(name, act):
    os.write(self.fds[1], f"{name}: {refused(act)}\\n".encode())
note("an interface", newlink)
note("a packet socket", lambda: socket.socket(17, socket.SOCK_RAW, 0))
note("a raw socket", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
note("packet filters", lambda: socket.socket().setsockopt(0, 64, bytes(100)))
note("packet filters 6", lambda: socket.socket(socket.AF_INET6).setsockopt(41, 64, bytes(100)))
note("mount", lambda: syscall(165, b"none", b"/tmp", b"tmpfs", 0, 0))
note("umount", lambda: syscall(166, b"/workspace", 2))
note("mount anew", lambda: syscall(430, b"tmpfs", 0))
note("a device", lambda: os.mknod("/tmp/null", 0o20666, os.makedev(1, 3)))
note("another root", lambda: os.chroot("/tmp"))
note("a host name", lambda: socket.sethostname("mine"))
note("a namespace", lambda: syscall(308, 0, 0))
note("more namespaces", lambda: syscall(272, 0x10000000))
note("a second clone", lambda: syscall(56, FLAGS, 0, 0, 0, 0))
note("a handle", lambda: syscall(304, -100, bytes(128), 0))
note("a file of the system", lambda: open("/usr/cloche-was-here", "w"))
note("a setting of the kernel", lambda: open("/proc/sys/kernel/hostname", "w"))
note("its own ids", lambda: open("/proc/self/uid_map", "w"))
note("its own badness", lambda: open("/proc/self/oom_score_adj", "w"))
note("priority", lambda: os.nice(-5))
""".replace("FLAGS", str(0x10000000 | 0x20000 | 0x20000000 | 0x40000000 | 0x8000000 | 0x4000000 | 17))


def test_what_a_clone_is_born_with_opens_nothing(sandbox: cloche.Sandbox) -> None:
    """With all capabilities of its own namespaces, before anybody looked, it is refused what they would allow."""
    with sandbox:
        session = sandbox.session()
        session.run(in_clone("has = open('/proc/self/status').read().split('CapEff:')[1].split()[0]\n" + POWERS))
        seen = session.run("open('/proc/self/status').read().split('CapEff:')[1].split()[0]").value
        assert int(seen, 16) == 0
        (fork,) = session.fork(1)
        said = fork.run("'settled'").stderr
    lines = [line for line in said.splitlines() if ": refused" in line or ": worked" in line]
    assert len(lines) == POWERS.count("\nnote("), said
    assert not [line for line in lines if not line.endswith(REFUSALS)]


def test_a_fork_reaches_nobody_by_its_process_group(sandbox: cloche.Sandbox) -> None:
    """A signal to all of one's group, which hits a child of one's own, hits neither parent nor sibling nor host."""
    with sandbox:
        session = sandbox.session()
        control = "import os, subprocess, signal\nsignal.signal(10, signal.SIG_IGN)\n"
        control += "child = subprocess.Popen(['sleep', '30'])\nsignal.signal(15, signal.SIG_IGN)\nos.kill(0, 15)\n"
        first, second = session.fork(2)
        assert first.run(control + "child.wait()").value == -15
        first.run("import os\nos.kill(0, 9)")
        assert second.run("1").value == 1
        assert session.run("1").value == 1


def test_a_fork_sees_its_own_processes_alone(sandbox: cloche.Sandbox) -> None:
    """In the session a child is seen; in a fork neither sibling nor parent is, and nothing of theirs can be opened."""
    see = "sorted(int(name) for name in __import__('os').listdir('/proc') if name.isdigit())"
    with sandbox:
        session = sandbox.session()
        session.run("import subprocess\nchild = subprocess.Popen(['sleep', '30'])")
        assert session.run(f"child.pid in {see}").value is True
        session.run("child.kill(); child.wait()")
        forks = session.fork(3)
        assert [len(fork.run(see).value) for fork in forks] == [2, 2, 2]
        parents = [fork.run("__import__('os').listdir('/proc/1/root/workspace')").value for fork in forks]
        assert parents == [[], [], []]


def test_nothing_passes_through_what_all_inherited(sandbox: cloche.Sandbox) -> None:
    """Standard input is one open file for a process and its child, and each fork has its own."""
    with sandbox:
        session = sandbox.session()
        change = "import fcntl, os\nfcntl.fcntl(0, 4, fcntl.fcntl(0, 3) | os.O_NONBLOCK)\n"
        look = "bool(fcntl.fcntl(0, 3) & os.O_NONBLOCK)"
        first, second = session.fork(2)
        assert first.run(f"import os\nos.fork() or ({change.splitlines()[0]!r}, os._exit(0))").ok
        first.run(f"{change}pid = os.fork()\nif pid == 0: os._exit({look})\n")
        assert first.run("os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])").value == 1
        for other in (second, session):
            assert other.run(f"import fcntl, os\n{look}").value is False


@pytest.mark.parametrize("name", ["x\x0bCapPrm:", "x\x1cCapEff:z"])
def test_a_forks_name_ends_nobody(name: str, sandbox: cloche.Sandbox) -> None:
    """Who asks for a netlink socket is looked at, in lines of which its own name may hold what Python takes for one."""
    ask = "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).close()"
    with sandbox:
        session = sandbox.session()
        first, second = session.fork(2)
        assert first.run(f"import ctypes, socket\nctypes.CDLL(None).prctl(15, {name!r}.encode())").value == 0
        assert first.run(f"{ask}\nopen('/proc/self/comm').read()").value == f"{name}\n"
        assert [one.run("1").value for one in (first, second, session)] == [1, 1, 1]


WAKERS = {
    "a timer": "syscall(222, 0, struct.pack('Qii', 0, {signal}, 0) + bytes(64), bytes(8))",
    "a pipe": "fcntl.fcntl(os.pipe()[0], fcntl.F_SETSIG, {signal})",
    "a message queue": "syscall(244, -1, struct.pack('Qii', 0, {signal}, 0) + bytes(64))",
    "the death of the parent": "syscall(157, 1, {signal}, 0, 0, 0)",
    "the death of a child": "syscall(56, {signal}, 0, 0, 0, 0) or os._exit(0)",
}


@pytest.mark.parametrize("name", WAKERS)
def test_nobody_is_woken_by_the_kernel(name: str, sandbox: cloche.Sandbox) -> None:
    """Nothing can be arranged that would send SIGCONT, which ends a stop, to a session that will stand still."""
    with sandbox:
        session = sandbox.session()
        session.run(TAKE_OVER)
        assert session.run(f"refused(lambda: {WAKERS[name].format(signal=18)})").value.startswith("refused: Oper")


def test_a_thread_behind_a_dead_first_one_is_seen(sandbox: cloche.Sandbox) -> None:
    """A process whose first thread has ended looks dead, and runs on; it is not left running beside forks."""
    with sandbox:
        session = sandbox.session()
        session.run(TAKE_OVER)
        half_dead = "pid = os.fork()\nif pid == 0:\n    threading.Thread(target=time.sleep, args=(60,)).start()\n"
        state = "[open(f'/proc/{pid}/stat').read().split()[2], len(os.listdir(f'/proc/{pid}/task'))]"
        session.run(f"{half_dead}    syscall(60, 0)\nwhile {state} != ['Z', 2]: time.sleep(0.01)")
        assert session.run(state).value == ["Z", 2]
        assert "still running" in _refuses_to_fork(session)


def test_other_flags_are_refused(sandbox: cloche.Sandbox) -> None:
    """Clones into new namespaces with any other flags, or when nobody waits for one, are refused."""
    with sandbox:
        session = sandbox.session()
        session.run(TAKE_OVER)
        every = 0x10000000 | 0x20000 | 0x20000000 | 0x40000000 | 0x8000000 | 0x4000000
        flags = [every | 17, every | 18, every, every | 0x8000 | 17, *(1 << bit | 17 for bit in (7, 17, 25, 26, 27))]
        flags += [1 << bit | 17 for bit in (28, 29, 30)]
        tried = f"[refused(lambda: syscall(56, value, 0, 0, 0, 0) or os._exit(0)) for value in {flags}]"
        assert set(session.run(tried).value) == {"refused: Operation not permitted"}
        assert session.run("os.waitpid(os.fork() or os._exit(7), 0)[1] >> 8").value == 7


def test_a_checkpoint_is_as_it_was(sandbox: cloche.Sandbox) -> None:
    """What runs after a checkpoint changes its own copies: memory and files come back as they were."""
    with sandbox:
        session = sandbox.session()
        session.run("x = ['kept']; open('f', 'w').write('kept'); open('/tmp/f', 'w').write('kept')")
        session.checkpoint("a")
        session.run("x.append('changed'); open('f', 'w').write('changed'); open('/tmp/f', 'w').write('changed')")
        (fork,) = session.fork(1)
        fork.run("open('f', 'w').write('changed'); import os; os.remove('/tmp/f')")
        fork.close()
        session.rollback("a")
        assert session.run("[x, open('f').read(), open('/tmp/f').read()]").value == [["kept"], "kept", "kept"]


RANDOM = """
import os, random, secrets, tempfile, uuid
found = [random.random(), secrets.token_hex(8), os.urandom(8).hex(), str(uuid.uuid4()), tempfile.mktemp()]
try:
    import ssl
    found.append(ssl.RAND_bytes(8).hex())
except ImportError:
    found.append(os.urandom(8).hex())
try:
    import numpy
    found += [float(numpy.random.random()), float(numpy.random.default_rng().random())]
except ImportError:
    found += [os.urandom(8).hex(), os.urandom(8).hex()]
found
"""


def test_no_two_draw_the_same_numbers(sandbox: cloche.Sandbox) -> None:
    """A session, its forks and their forks share no random number; a generator that was seeded goes on in each."""
    with sandbox:
        session = sandbox.session()
        session.run(RANDOM + "seeded = random.Random(7); seeded.random()")
        forks = session.fork(2)
        drawn = [one.run(RANDOM).value for one in (session, *forks, *forks[0].fork(2))]
        for column in zip(*drawn, strict=True):
            assert len(set(column)) == len(drawn), f"drawn twice: {column}"
        assert len({one.run("seeded.random()").value for one in (session, *forks)}) == 1


def test_a_fork_that_is_lost_is_told_though_its_link_is_held(sandbox: cloche.Sandbox) -> None:
    """A parent that kept its clone's end of the link cannot keep the caller waiting for what is dead."""
    keep = "kept = []\ntype(SESSION)._close_all = lambda self, fds: kept.extend(fds)"
    with sandbox:
        session = sandbox.session()
        session.run(in_clone("for fd in kept: os.close(fd)") + keep)
        (fork,) = session.fork(1)
        began = time.monotonic()
        assert fork.run("import os\nos._exit(3)", timeout=90).status == "error"
        assert time.monotonic() - began < 60


def test_many_forks_at_once(sandbox: cloche.Sandbox) -> None:
    """More forks than fit into a small message arrive, each with its workspace."""
    with sandbox:
        session = sandbox.session()
        session.run("open('f', 'w').write('here')")
        forks = session.fork(12)
        assert [fork.read_file("f") for fork in forks] == [b"here"] * 12
