"""A script behaves inside as it does outside: output, traceback, exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import cloche

SCRIPTS = {
    "prints": "print(1)\nprint('ä', 2)",
    "exit code": "import sys; sys.exit(300)",
    "exit message": "raise SystemExit('bye')",
    "exit in a function": "import sys\ndef f(): sys.exit(7)\nf()",
    "uncaught exception": "def f():\n    1 / 0\nf()",
    "chained exception": "try:\n    1 / 0\nexcept Exception as error:\n    raise ValueError('x') from error",
    "syntax error": "x = 1\ndef (",
    "finalizer at exit": "class A:\n    def __del__(self): print('gone')\na = A()",
    "finalizer in a cycle": "class A:\n    def __del__(self): print('gone')\na = A(); a.a = a; del a",
    "finalizer that uses a module": "import json\nclass A:\n    def __del__(self): print(json.dumps(1))\na = A()",
    "finalizer of the last value": "class A:\n    def __del__(self): print('gone')\nA()",
    "stream of its own": (
        "import sys\nclass Tee:\n    def write(self, text): sys.__stdout__.write(text.upper())\n"
        "    def flush(self): pass\nsys.stdout = Tee()\nprint('hi')"
    ),
    "modules taken away": (
        "import sys, json\nclass A:\n    def __del__(self): print('gone')\na = A()\n"
        "[sys.modules.pop(m) for m in list(sys.modules) if m.startswith('json')]"
    ),
    "descriptors closed": "import os; os.closerange(3, 256)\nprint('closed')\n5",
    "huge exit code": "import sys; sys.exit(2 ** 80)",
    "time zone": "import os, time; os.environ['TZ'] = 'XYZ5'; time.tzset(); print(time.localtime(0).tm_hour)",
    "warning in the future": "from __future__ import annotations\nx = 1\nx is 1",
    "exit functions": "import atexit; atexit.register(print, 'last'); print('first')",
    "late thread": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
    "buffered C output": "import ctypes; ctypes.CDLL(None).printf(b'from C\\n')",
    "forked child": "import os\nif os.fork() == 0: print('child')\nelse: os.wait(); print('parent')",
    "own excepthook": "import sys; sys.excepthook = lambda *a: print('hook', a[0].__name__)\n1 / 0",
    "asyncio": "import asyncio\nasync def main(): await asyncio.sleep(0); print('a')\nasyncio.run(main())",
    "name of main": "print(__name__, __spec__, __doc__, type(__loader__).__name__)",
    "docstring": "'''Say.'''\nprint(__doc__)",
    "future import": "from __future__ import annotations\ndef f(x: Nowhere): ...\nprint(f.__annotations__)",
    "flags": "import sys; print(sys.flags.isolated, sys.flags.no_site, sys.flags.safe_path, sys.flags.no_user_site)",
    "encodings": "import sys; print(sys.stdin.encoding, sys.stdout.encoding, sys.stdout.errors, sys.stderr.errors)",
    "stream names": "import sys; print(sys.stdin.name, sys.stdout.name, sys.stdout.mode)",
    "signal handlers": "import signal; print(signal.getsignal(2), signal.getsignal(13))",
    "signalled": "import os, signal; print('x', flush=True); os.kill(os.getpid(), signal.SIGTERM)",
    "aborted": "import os; os.abort()",
    "spawned workers": (
        "import multiprocessing as m\nif __name__ == '__main__':\n"
        "    with m.get_context('spawn').Pool(2) as pool: print(pool.map(abs, [-1, -2]))"
    ),
    "dataclass and pickle": (
        "import pickle, dataclasses\n@dataclasses.dataclass\nclass P: x: int\nprint(pickle.loads(pickle.dumps(P(1))))"
    ),
    "source lines": "import inspect\ndef f(): return 1\nprint(inspect.getsource(f))",
    "stdin": "import sys; print(sys.stdin.readline(), sys.stdin.read())",
    "closed stdout": "import os; print(1, end=''); os.close(1)",
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_a_script_behaves_as_outside(script: str, tmp_path: Path) -> None:
    """Standard output, standard error and exit code equal those of the plain interpreter."""
    file = tmp_path / "cloche-main.py"
    file.write_text(script, encoding="utf-8")
    env = {"LANG": "C.UTF-8", "HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
    outside = subprocess.run(
        [sys.executable, str(file)], capture_output=True, input=b"one\ntwo\n", env=env, cwd=tmp_path, check=False
    )
    inside = cloche.run(script, stdin=b"one\ntwo\n", memory="1g", cpus=2)
    code = outside.returncode if outside.returncode >= 0 else 128 - outside.returncode
    assert inside.stdout_bytes == outside.stdout
    assert inside.stderr.replace("/workspace", str(tmp_path)) == outside.stderr.decode()
    assert inside.exit_code == code


def test_an_interpreter_variable_starts_a_new_interpreter() -> None:
    """PYTHON variables take effect, though the warm-started interpreter could no longer heed them."""
    result = cloche.run("import sys; print(sys.flags.optimize)", env={"PYTHONOPTIMIZE": "2"})
    assert result.stdout == "2\n"


def test_the_value_is_the_last_expression() -> None:
    """Plain data comes back decoded, anything else as its repr, nothing as None."""
    assert cloche.run("x = 1\n[x, {'a': 2.5}, None, 'ü']").value == [1, {"a": 2.5}, None, "ü"]
    other = cloche.run("{1, 2}")
    assert (other.value, other.value_is_repr) == ("{1, 2}", True)
    assert cloche.run("x = 1").value is None
