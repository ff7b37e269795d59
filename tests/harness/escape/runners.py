"""What runs an attempt in one of two places: outside, as a plain subprocess, and in a sandbox."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import cloche
from tests.harness.escape.attempts import IS_ROOT, Attempt, Seen

if TYPE_CHECKING:
    from tests.harness.escape.targets import Canaries

HERE = Path(__file__).parent
CONTROL_SECONDS = 20.0
LINGER_OUTSIDE_S = 2.3
NAME_LENGTH = 15  # of a process, see prelude.py
PRELUDE = (HERE / "prelude.py").read_text()
CODA = '\nsys.stdout.flush()\ncontained("looked everywhere and found nothing")\n'
TAKE_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
# What a careless adapter does: every file by its path, through links, with its mode. The bound is ours.
NAIVE_COPY = """
import os, resource, shutil, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 28, 1 << 28))
source, target = sys.argv[1:]
for folder, _, names in os.walk(source, followlinks=True):
    copy = os.path.join(target, os.path.relpath(folder, source))
    os.makedirs(copy, exist_ok=True)
    for name in names:
        try:
            with open(os.path.join(folder, name), "rb") as a, open(os.path.join(copy, name), "wb") as b:
                shutil.copyfileobj(a, b)
            shutil.copymode(os.path.join(folder, name), os.path.join(copy, name))
        except OSError:
            pass
"""
# The attempt gets a parent that may die, a bystander, and an init that gives it the time to tell.
WITH_COMPANY = """
sleep 30 >/dev/null 2>&1 &
sh -c '"$@"; exit $?' sh "$@"
code=$?
[ $code -lt 128 ] || sleep 0.2
exit $code
"""
THROWAWAY = [
    "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--net", "--ipc", "--uts", "--cgroup",
    *([] if IS_ROOT else ["--user", "--map-root-user"]), "sh", "-c", WITH_COMPANY, "sh",
]  # fmt: skip


class Workspace(Protocol):
    """Reach into a workspace from the host while it lives."""

    def run(self, code: str) -> Seen: ...
    def read_file(self, path: str) -> bytes: ...
    def write_file(self, path: str, data: bytes) -> None: ...


class Runner(Protocol):
    """Run programs somewhere. `patience_s`: how long an operation on the host may take before it counts as hanging."""

    patience_s: float

    def run(self, attempt: Attempt, *, code: str | None = None) -> Seen: ...
    def show(self, attempt: Attempt) -> bytes: ...
    def workspace(self, attempt: Attempt) -> AbstractContextManager[Workspace]: ...
    def close(self) -> None: ...


def level_keywords(level: str) -> dict[str, Any]:
    """Return the keywords that ask `cloche.run` for exactly this level."""
    return {"require": level, "level": level}


def whole_program(attempt: Attempt, code: str) -> str:
    """Return the program as it is run, the prelude before and a last word after it."""
    return PRELUDE + "\n\n" + code + CODA if attempt.language == "python" else code


def new_token() -> str:
    """Return what one run is told apart by: an argument of it, whose end is the name of its processes."""
    return f"token-{secrets.token_hex(8)}"


def survivors(token: str) -> list[int]:
    """Return the living processes whose name or command line bears the token of a run."""
    pids = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())
    return [pid for pid in pids if pid != os.getpid() and _bears(token, pid)]


def _bears(token: str, pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        names, _, rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
    except OSError:  # it is gone
        return False
    is_named = names.partition("(")[2] == token[-NAME_LENGTH:]
    return (is_named or token.encode() in command) and rest.split()[0] not in "ZX"


def end_survivors(token: str) -> None:
    """Kill what a control left running; a process that keeps forking is hunted for a bounded time."""
    deadline = time.monotonic() + 5
    while (pids := survivors(token)) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass


class Outside:
    """Run programs as a careless adapter does: a plain subprocess that inherits everything."""

    patience_s = 1.0

    def __init__(self, targets: Mapping[str, Any], *, is_throwaway: bool) -> None:
        self.prefix = THROWAWAY if is_throwaway else []
        self.targets = {**targets, "neighbour": targets["host"], "lingers_s": LINGER_OUTSIDE_S}
        self.scratch = Path(tempfile.mkdtemp(prefix="escape-", dir="/tmp"))
        self.fast = Path(tempfile.mkdtemp(prefix="escape-", dir="/dev/shm"))
        self.targets["fast"] = str(self.fast)
        self.tokens: list[str] = []

    def close(self) -> None:
        """Kill what still runs and remove the scratch directories."""
        for token in self.tokens:
            end_survivors(token)
        shutil.rmtree(self.scratch, ignore_errors=True)
        shutil.rmtree(self.fast, ignore_errors=True)

    def run(self, attempt: Attempt, *, code: str | None = None) -> Seen:
        """Run a program in the scratch directory."""
        script = Path(tempfile.mkdtemp(prefix="program-", dir=self.scratch)) / "main"
        script.write_text(whole_program(attempt, code or attempt.code))
        self.tokens.append(new_token())
        argument = json.dumps({**self.targets, "token": self.tokens[-1]})
        interpreter = sys.executable if attempt.language == "python" else shutil.which(attempt.language)
        command = [*self.prefix, str(interpreter), str(script), argument]
        bound = float(attempt.limits.get("timeout", CONTROL_SECONDS))
        environment = {**os.environ, "HOME": str(self.scratch)}
        began = time.monotonic()
        with started(command, has_terminal=attempt.terminal, cwd=self.scratch, env=environment) as process:
            out, err = read_to_the_end(process, bound)
        shutil.rmtree(script.parent, ignore_errors=True)  # a runner that was closed has removed it
        return Seen(
            stdout=out.decode(),
            stderr=err.decode(),
            exit_code=process.returncode,
            status="signaled" if process.returncode < 0 else "ok" if process.returncode == 0 else "error",
            seconds=time.monotonic() - began,
            token=self.tokens[-1],
            save=self.copy_naively,
        )

    def show(self, attempt: Attempt) -> bytes:
        """Return what a terminal gets when the program runs on it."""
        script = self.scratch / "main.py"
        script.write_text(whole_program(attempt, attempt.code))
        argument = json.dumps({**self.targets, "token": new_token()})
        return show_on_terminal([sys.executable, str(script), argument])

    @contextmanager
    def workspace(self, attempt: Attempt) -> Iterator[Workspace]:
        """Reach into the scratch directory by plain paths."""
        runner = self

        class Plain:
            def run(self, code: str) -> Seen:
                return runner.run(attempt, code=code)

            def read_file(self, path: str) -> bytes:
                return (runner.scratch / path).read_bytes()

            def write_file(self, path: str, data: bytes) -> None:
                (runner.scratch / path).write_bytes(data)

        yield Plain()

    def copy_naively(self, directory: str) -> object:
        """Copy the files out by path, following whatever is there; bounded in time and size, for it may never end."""
        command = [sys.executable, "-I", "-S", "-c", NAIVE_COPY, str(self.scratch), directory]
        return subprocess.run(command, stderr=subprocess.DEVNULL, timeout=self.patience_s, check=False)


class Inside:
    """Run programs in a sandbox of one level; nothing of one is there for the next."""

    patience_s = 20.0

    def __init__(self, canaries: Canaries, *, level: str, **keywords: Any) -> None:
        canaries.neighbour()
        self.targets = canaries.targets
        self.keywords = keywords or level_keywords(level)
        self.promises: Mapping[str, str] = {}

    def close(self) -> None:
        """Close nothing: each sandbox ended with its run."""

    def run(self, attempt: Attempt, *, code: str | None = None) -> Seen:
        """Run a program in a sandbox of its own."""
        token = new_token()
        request = {
            "code": whole_program(attempt, code or attempt.code),
            "language": attempt.language,
            "argv": [json.dumps({**self.targets, "token": token})],
            **attempt.limits,
            **self.keywords,
        }
        if attempt.terminal:
            return run_on_terminal(request, token)
        seen = as_seen(cloche.run(**request), token)
        self.promises = seen.promises
        return seen

    def show(self, attempt: Attempt) -> bytes:
        """Return what a terminal gets from the command line."""
        program = whole_program(attempt, attempt.code)
        words = ["-c", program, "--", json.dumps({**self.targets, "token": new_token()})]
        asked = [f"--{name}={self.keywords[name]}" for name in ("backend", "image", "require") if name in self.keywords]
        return show_on_terminal([sys.executable, "-m", "cloche", "run", *asked, *words])

    @contextmanager
    def workspace(self, attempt: Attempt) -> Iterator[Workspace]:
        """Reach into a live sandbox with its own file operations."""
        runner = self
        with cloche.Sandbox(**{"live": False, **attempt.limits, **self.keywords}) as sandbox:

            class Live:
                def run(self, code: str) -> Seen:
                    token = new_token()
                    argument = json.dumps({**runner.targets, "token": token})
                    return as_seen(sandbox.run(whole_program(attempt, code), argv=[argument]), token)

                def read_file(self, path: str) -> bytes:
                    return sandbox.read_file(path, max_bytes=1 << 20)

                def write_file(self, path: str, data: bytes) -> None:
                    sandbox.write_file(path, data)

            yield Live()


class Live(Inside):
    """Run programs in live sandboxes: each goes on, with whatever its program has left, until the check is over.

    Where an attempt has a first program, that one's sandbox is still there when the second looks for what is left. What
    is copied out are the files of the workspace, while it lives.
    """

    def __init__(self, canaries: Canaries, *, level: str, **keywords: Any) -> None:
        super().__init__(canaries, level=level, **keywords)
        self.keywords = {**self.keywords, "live": True}
        self._opened = ExitStack()

    def close(self) -> None:
        """Close all sandboxes."""
        self._opened.close()

    def run(self, attempt: Attempt, *, code: str | None = None) -> Seen:
        """Run a program in a sandbox of its own."""
        token = new_token()
        program = whole_program(attempt, code or attempt.code)
        request = {"language": attempt.language, "argv": [json.dumps({**self.targets, "token": token})]}
        if attempt.terminal:
            keywords = {**attempt.limits, **self.keywords}
            return run_on_terminal({"code": program, **request, "sandbox": keywords}, token)
        sandbox = self._opened.enter_context(cloche.Sandbox(**attempt.limits, **self.keywords))
        seen = as_seen(sandbox.run(program, **request), token)
        self.promises = seen.promises
        return replace(seen, save=lambda directory: sandbox.download("/workspace", directory))


def as_seen(result: cloche.Result, token: str) -> Seen:
    """Return what the host sees of a result."""
    return Seen(
        stdout=result.stdout,
        stderr=result.stderr,
        exit_code=result.exit_code,
        status=str(result.status),
        seconds=result.duration,
        token=token,
        save=result.save,
        promises={str(control): str(measure.state) for control, measure in result.enforcement.controls.items()},
    )


def run_on_terminal(request: dict[str, Any], token: str, *, patience_s: float = CONTROL_SECONDS) -> Seen:
    """Run from a process that has a controlling terminal: the keywords of `cloche.run`, or cells with a sandbox's."""
    command = [sys.executable, str(HERE / "driver.py"), json.dumps(request)]
    with started(command, has_terminal=True) as process:
        out, err = read_to_the_end(process, patience_s)
    report = json.loads(out.splitlines()[-1]) if out else {"stdout": "", "stderr": err.decode(), "exit_code": 1}
    return Seen(**{"status": "error", "seconds": 0.0, **report}, token=token, save=lambda _: ())


@contextmanager
def started(command: list[str], *, has_terminal: bool, **keywords: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program that inherits what we have, in a session of its own, with a controlling terminal if asked for."""
    keyboard, terminal = os.openpty() if has_terminal else (-1, -1)
    if has_terminal:
        program = shutil.which(command[0]) or command[0]
        command = [sys.executable, "-I", "-S", "-c", TAKE_TERMINAL, program, *command[1:]]
    process = subprocess.Popen(
        command,
        stdin=terminal if has_terminal else None,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        close_fds=False,
        start_new_session=not has_terminal,
        **keywords,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for end in (process.stdout, process.stderr):
            if end is not None:
                end.close()
        if has_terminal:
            os.close(keyboard)
            os.close(terminal)


def read_to_the_end(process: subprocess.Popen[bytes], bound: float) -> tuple[bytes, bytes]:
    """Read all output; ask the program to end when its time is over, and kill it when it does not."""
    for patience, end in ((bound, process.terminate), (0.5, process.kill), (1.2, process.kill)):
        try:
            return process.communicate(timeout=patience)
        except subprocess.TimeoutExpired as late:
            output = late.output or b"", late.stderr or b""
            end()
    return output


def show_on_terminal(command: list[str], *, typed: str = "", env: Mapping[str, str] | None = None) -> bytes:
    """Run a program with a terminal for all three streams, type something, and return what the terminal got."""
    screen, terminal = os.openpty()
    streams = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    process = subprocess.Popen(command, start_new_session=True, env=env, **streams)
    os.close(terminal)
    os.write(screen, typed.encode())
    got = b""
    try:
        while chunk := os.read(screen, 65536):
            got += chunk
    except OSError:  # the last program let go of the terminal
        pass
    finally:
        os.close(screen)
        process.wait(CONTROL_SECONDS)
    return got
