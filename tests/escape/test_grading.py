"""Programs that try to pass `cloche.check` without the answer.

The answer is a number that no program can guess. A grader that runs asserts beside the program is fooled by the first
group, which shows that these attempts work.
"""

from __future__ import annotations

import time

import pytest

import cloche
from cloche.core.grading import CheckVerdict

ANSWER = 918_273_645
CASES = [{"call": "solve", "args": [7], "result": ANSWER}]
HONEST = f"def solve(n):\n    print('thinking')\n    return 131181949 * n + {ANSWER - 131181949 * 7}\n"

FOOL_ASSERTS = {
    "exit at import": "import sys\nsys.exit(0)\n",
    "end at import": "import os\nos._exit(0)\n",
    "exit in the function": "def solve(n):\n    raise SystemExit(0)\n",
    "end in the function": "import os\ndef solve(n):\n    os._exit(0)\n",
    "exit code forged at exit": "import atexit, os\natexit.register(os._exit, 0)\ndef solve(n):\n    return 1\n",
    "a hook of exceptions": "import os, sys\nsys.excepthook = lambda *e: os._exit(0)\ndef solve(n):\n    return 1\n",
    "equal to everything": "class Any:\n    __eq__ = lambda *a: True\ndef solve(n):\n    return Any()\n",
    "an int equal to everything": """
class Lie(int):
    __eq__ = __le__ = __ge__ = lambda self, other: True
    __hash__ = lambda self: 0
    __pos__ = __index__ = __int__ = lambda self: 2
    __format__ = __repr__ = __str__ = lambda self, *_: "T"
    __class__ = bool
    def __reduce__(self):
        return int, (1,)
def solve(n):
    return Lie(3)
""",
    "a handler of the trace": """
import os, sys
def trace(frame, event, argument):
    if frame.f_code.co_name == "<module>" or "expected" in frame.f_locals:
        frame.f_locals.update(expected=1, values=[1])
    if event == "exception":
        os._exit(0)
    return trace
sys.settrace(trace)
sys._getframe().f_trace = trace
def solve(n):
    return 1
""",
}
FORGE = """
import os
def write_everywhere(data):
    for fd in sorted(map(int, os.listdir("/proc/self/fd"))) + list(range(64)):
        try:
            os.write(fd, data)
        except OSError:
            pass
"""
ALSO_FAIL = {
    "nothing": "",
    "patched built-ins": """
import builtins
class Quiet(BaseException): pass
builtins.AssertionError = Quiet
builtins.type = lambda *a: bool
builtins.len = lambda *a: 0
builtins.memoryview = builtins.bytes = lambda *a: b""
builtins.eval = builtins.exec = lambda *a: None
def solve(n):
    return 1
""",
    "patched modules of the encoder": """
import os, sys, json, struct, marshal
os.write = lambda fd, data: len(data)
os._exit = sys.exit
json.dumps = struct.pack = marshal.dumps = lambda *a: b"T"
main = sys.modules["__main__"]
main.encode = lambda value, parts, *a: parts.append(b"T\\n")
def solve(n):
    main.encode.__globals__["encode"] = main.encode
    return 1
""",
    "a search for the answer": """
import gc, glob, os, re, sys
def look():
    texts = [repr(sys.argv), repr(os.environ)]
    frame = sys._getframe()
    while frame:
        texts += [repr(frame.f_locals), repr(frame.f_globals), repr(frame.f_code.co_consts)]
        frame = frame.f_back
    texts += [repr(item) for item in gc.get_objects() if type(item) in (dict, list, tuple, str)][:20_000]
    for path in [*glob.glob("/proc/[0-9]*/cmdline"), *glob.glob("/proc/[0-9]*/environ"), *glob.glob("/workspace/*"),
                 *glob.glob("/workspace/.*"), *glob.glob("/tmp/*"), *glob.glob("/dev/shm/*"), "/dev/stdin",
                 *glob.glob("/proc/self/fd/*")]:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            texts.append(os.read(fd, 1 << 20).decode("latin-1"))
        except OSError:
            pass
    return texts
def solve(n):
    found = re.findall(r"\\b9182736\\d\\d\\b|0x36bbb[0-9a-f]{3}\\b", " ".join(look()))
    return int(found[0], 0) if found else 0
""",
    "forged results on every descriptor": FORGE + 'write_everywhere(b"=1\\nT\\n")\nos._exit(0)\n',
    "forged results of no call": FORGE + 'write_everywhere(b"=0\\n")\nos._exit(0)\n',
    "a result of its own, then ours": FORGE + 'def solve(n):\n    write_everywhere(b"=1\\nT\\n")\n    return 1\n',
    "many guesses": FORGE
    + "def solve(n):\n    write_everywhere(b'=1\\n' + b''.join(b'i%x\\n' % i for i in range(999)))\n",
    "a child that answers": FORGE
    + """
def solve(n):
    if os.fork() == 0:
        write_everywhere(b"=1\\nT\\n")
        os._exit(0)
    os.wait()
    os.kill(os.getpid(), 9)
""",
    "an end as another process": FORGE
    + """
def solve(n):
    if os.fork():
        os._exit(0)
    return 1
""",
    "killing all others": "import os\ndef solve(n):\n    os.kill(-1, 9)\n    os.kill(1, 9)\n    return 1\n",
    "writing after the result": FORGE
    + """
import atexit, threading
class Late:
    def __del__(self):
        write_everywhere(b"T\\n")
late = Late()
atexit.register(write_everywhere, b"T\\n")
def spin():
    while True:
        write_everywhere(b"=1\\nT\\n")
threading.Thread(target=spin).start()
def solve(n):
    return 1
""",
    "shared memory filled": """
import ctypes, re
def solve(n):
    for line in open("/proc/self/maps"):
        first, last, access = re.match(r"([0-9a-f]+)-([0-9a-f]+) (\\S+)", line).groups()
        if access.startswith("rw") and access[3] == "s":
            ctypes.memset(int(first, 16), 0, int(last, 16) - int(first, 16))
    return 1
""",
    "sockets shut down": """
import array, os, socket
def solve(n):
    for fd in range(64):
        try:
            link = socket.socket(fileno=os.dup(fd))
            link.sendmsg([b"x" * 9], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1]))])
            link.shutdown(2)
        except OSError:
            pass
    os._exit(0)
""",
    "the parts and calls of the sender": """
import sys
def solve(n):
    frame = sys._getframe(1)
    while frame:
        for name, value in list(frame.f_locals.items()):
            if name in ("parts", "calls") and isinstance(value, list):
                value[:] = [b"=1\\n", b"T\\n"] if name == "parts" else []
        frame = frame.f_back
    return True
""",
    "recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef solve(n):\n    return solve(n)\n",
    "nesting": "def solve(n):\n    x = []\n    for _ in range(100000):\n        x = [x]\n    return x\n",
    "a list that holds itself": "def solve(n):\n    x = []\n    x.append(x)\n    return x\n",
    "equal hashes": "def solve(n):\n    return {i * (2**61 - 1) for i in range(3000)}\n",
    "a huge integer": "def solve(n):\n    return 1 << 30_000_000\n",
    "millions of parts": "def solve(n):\n    return [None] * 3_000_000\n",
    "a flood": "import os\nos.write(1, b'x' * (70 << 20))\ndef solve(n):\n    return 1\n",
    "a generator": f"def solve(n):\n    yield {ANSWER}\n",
    "a derived list": """
class L(list):
    __eq__ = lambda *a: True
    __iter__ = lambda self: iter([1])
def solve(n):
    return L()
""",
    "a derived text": """
class S(str):
    encode = lambda *a: b"T"
    __eq__ = lambda *a: True
def solve(n):
    return S("x")
""",
}


def passes(program: str) -> CheckVerdict:
    """Check a program against the one case."""
    return cloche.check(program, CASES, timeout=20, memory="512m")


def test_an_honest_program_passes() -> None:
    """The case can be passed, and by the answer alone."""
    assert passes(HONEST).passed
    assert not passes(HONEST.replace("131181949 * n", "131181948 * n")).passed


@pytest.mark.parametrize("name", FOOL_ASSERTS)
def test_what_fools_asserts_fails(name: str) -> None:
    """A program that ends with 0 when asserts run beside it does not pass."""
    beside = cloche.run(f"{FOOL_ASSERTS[name]}\nassert solve(7) == {ANSWER}\n")
    assert beside.exit_code == 0
    verdict = passes(FOOL_ASSERTS[name])
    assert verdict.outcome == "failed", verdict


@pytest.mark.parametrize("name", ALSO_FAIL)
def test_other_cheats_fail(name: str) -> None:
    """No forged answer is the right one, none takes the caller long, and no verdict tells the answer."""
    start = time.monotonic()
    verdict = passes(ALSO_FAIL[name])
    assert verdict.outcome == "failed", verdict
    assert time.monotonic() - start < 60
    assert len(repr(verdict)) < 12_000
    assert str(ANSWER) not in repr(verdict)


LEAVES = """
import glob, os, subprocess, sys
MARK = "left-by-a-case"
def solve(n):
    found = [path for path in ("/tmp/x", "/dev/shm/x", "/workspace/x") if os.path.exists(path)]
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            if MARK in open(path).read():
                found.append(path)
        except OSError:
            pass
    for path in ("/tmp/x", "/dev/shm/x", "/workspace/x"):
        open(path, "w").write(str(n))
    subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(600); {MARK!r}"], start_new_session=True)
    return found
"""


def test_nothing_of_an_earlier_case_is_left() -> None:
    """Files and processes of a case are gone before the next; within one case they can be found."""
    cases = [{"call": "solve", "args": [number], "result": []} for number in range(3)]
    assert cloche.check(LEAVES, cases).passed
    beside = cloche.run(f"{LEAVES}\nsolve(1)\nprint(len(solve(2)))")
    assert int(beside.stdout) >= 4


STDIN_CASES = [{"stdin": "7\n", "stdout": f"{ANSWER}\n"}]


@pytest.mark.parametrize(
    "program",
    [
        "print(1)",
        "import os\nos._exit(0)",
        f"print({ANSWER})\nraise SystemExit(256 + 1)",
        f"import os\nprint({ANSWER}, flush=True)\nos.kill(os.getpid(), 9)",
        f"import os, sys\nfor n in range(1_000_000):\n    os.write(1, b'%d ' % n)\nprint({ANSWER})",
        f"print({ANSWER}, flush=True)\nwhile True: pass",
        f"print({ANSWER})\nprint({ANSWER})",
        "print(open('/dev/stdin').read())",
    ],
)
def test_wrong_ends_and_outputs_fail(program: str) -> None:
    """The whole output counts, and how the supervisor saw the program end."""
    assert cloche.check(program, STDIN_CASES, timeout=3).outcome == "failed"


def test_sleeping_processes_hold_nobody_up() -> None:
    """A right answer passes at once, though a child that holds standard output sleeps on."""
    sleeps = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\n"
    start = time.monotonic()
    assert cloche.check(f"{sleeps}print({ANSWER})", STDIN_CASES).passed
    assert cloche.check(f"{sleeps}{HONEST}", CASES).passed
    assert time.monotonic() - start < 25


def test_tests_beside_the_program_are_weak() -> None:
    """With `in_program` a lie passes, and the verdict says that it could."""
    lie = FOOL_ASSERTS["equal to everything"]
    test = f"for n in [7]:\n    assert solve(n) == {ANSWER}"
    verdict = cloche.check(lie, test, in_program=True)
    assert verdict.passed
    assert verdict.weak == "the program ran beside its tests"
    assert not cloche.check(FOOL_ASSERTS["end at import"], test, in_program=True).passed
    assert not cloche.check("def solve(n):\n    return 1", test, in_program=True).passed
