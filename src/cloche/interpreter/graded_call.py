"""Call functions of a program and send what they return as data: the guest's side of `cloche.check`.

It is sent as text and as bytecode, with a last line that calls `run`; so it is small, and `graded_ends` is loaded only
for failures and for values of derived classes. It uses `exec` instead of `compile`, whose first call takes as long as
half a run, and has no `__future__` import, since `exec` would hand that on. The program runs in this interpreter, so
all of this is within its reach: what it forges is its own answer, which is compared outside with what this process
never saw. Standard output is moved to a descriptor that the program is not given, and the program's own output goes to
standard error.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_DEPTH = 64
MAX_PARTS = 1_000_000
_LETTERS: "dict[Any, bytes]" = {list: b"l", tuple: b"t", set: b"e", frozenset: b"z", dict: b"d"}


def encode(value: "Any", parts: "list[bytes]", ends: str, depth: int = 0) -> None:
    """Append the typed literal of a value to `parts`."""
    kind = type(value)
    if kind is int:
        parts.append(b"i%x\n" % value)
    elif value is None or kind is bool:
        parts.append({None: b"N\n", True: b"T\n", False: b"F\n"}[value])
    elif kind is float:
        parts.append(b"f%s\n" % value.hex().encode())
    elif kind is str or kind is bytes:
        data = value if kind is bytes else value.encode("utf-8", "surrogatepass")
        parts.append(b"%s%d\n%s\n" % (b"b" if kind is bytes else b"s", len(data), data))
    elif kind not in _LETTERS or depth >= MAX_DEPTH or len(parts) + len(value) > MAX_PARTS:
        encode(_ends(ends)["plain"](value, kind, depth), parts, ends, depth)
    else:
        parts.append(b"%s%d\n" % (_LETTERS[kind], len(value)))
        for item in value:
            encode(item, parts, ends, depth + 1)
            if kind is dict:
                encode(value[item], parts, ends, depth + 1)


def _ends(source: str) -> "dict[str, Any]":
    """Return the names of `graded_ends`."""
    names: dict[str, Any] = {}
    exec(source, names)
    return names


def run(program: str, setup: str, calls: "list[str]", ends: str) -> None:
    """Run a program as the module `program` and send the values of expressions; end the process."""
    write, leave, streams, module = os.write, os._exit, (sys.stdout, sys.stderr), type(sys)("program")
    results = os.dup(1)
    os.dup2(2, 1)
    sys.modules["program"] = module
    try:
        exec(program, module.__dict__)
        if setup:
            exec(setup, module.__dict__)
        parts = [b"=%d\n" % len(calls)]
        for call in calls:
            encode(eval(call, module.__dict__), parts, ends)
        for stream in streams:
            stream.flush()
        data = memoryview(b"".join(parts))
        while data:
            data = data[write(results, data) :]
    except BaseException as error:
        _ends(ends)["report"](error, program)
        leave(1)
    leave(0)
