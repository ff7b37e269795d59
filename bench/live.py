"""What a live sandbox costs: opened, a command and a run in it, a terminal's echo, a forwarded port, idle."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import cloche
from cloche.bench.harness import BenchmarkFailed, Case, Measurement, SkippedCase
from cloche.bench.scenarios import CODE, PLAIN, Cases, Scenario, bubblewrap, measure_warm, plain, wait_until_warm

from .sessions import crowd_report, descendants
from .setting import Setting

LIVE_OPENED, LIVE_COLD = "live sandbox, opened", "live sandbox, opened cold"
LIVE_COMMAND, LIVE_RUN, ECHO = "live sandbox, true", "live sandbox, print(1)", "live sandbox, terminal echo"
DIRECT, FORWARDED = "64 MiB by loopback", "64 MiB by a forwarded port"
IDLE_SANDBOXES = 20
SETTLED_S = 35.0  # by then a guest that waits for an order has been given up
SENT_BYTES = 64 << 20
PORT = 8000
SERVER = f"""
import socket
data = bytes(1 << 20)
server = socket.create_server(("127.0.0.1", {PORT}))
print("ready", flush=True)
while True:
    one, _ = server.accept()
    for _ in range({SENT_BYTES >> 20}):
        one.sendall(data)
    one.close()
"""


def _ms(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1000


def _open_and_close(**options: Any) -> Measurement:  # noqa: ANN401 - keywords of a sandbox
    """Open a sandbox, which begins with its first use, and end it untimed."""
    with ExitStack() as stack:
        sandboxes: list[cloche.Sandbox] = []

        def use() -> None:
            sandboxes.append(stack.enter_context(cloche.Sandbox(live=True, **options)))
            sandboxes[0].processes()

        ms = _ms(use)
        return Measurement(ms, sandboxes[0].run(CODE).stdout_bytes)


def _command(sandbox: cloche.Sandbox) -> Measurement:
    ms = _ms(lambda: _check(sandbox.exec(["true"]).exit_code == 0, "true failed"))
    return Measurement(ms, b"1\n")


def _run(sandbox: cloche.Sandbox) -> Measurement:
    results: list[cloche.Result] = []
    ms = _ms(lambda: results.append(sandbox.run(CODE)))
    return Measurement(ms, results[0].stdout_bytes)


def _check(is_so: bool, why: str) -> None:
    if not is_so:
        raise BenchmarkFailed(why)


class _Echo:
    """Hold a terminal with `cat` in it, which gives back each line."""

    def __init__(self, stack: ExitStack, sandbox: cloche.Sandbox):
        self._process = stack.enter_context(sandbox.terminal(["cat"]))
        self._turn = 0

    def measure(self) -> Measurement:
        """Type a character, and wait until the terminal shows it."""
        self._turn += 1
        letter = b"%c" % (97 + self._turn % 26)

        def type_one() -> None:
            self._process.write(letter)
            _check(letter in self._process.stdout.read(), "the terminal shows something else")

        return Measurement(_ms(type_one), b"1\n")


def live_sandbox(_: Setting, stack: ExitStack) -> Cases:
    """Enter the opening of a live sandbox, and what is done in one that is open."""
    yield plain()
    yield bubblewrap()
    prepare = partial(wait_until_warm, measure_warm())
    yield Case(
        name=LIVE_OPENED,
        call="cloche.Sandbox(), entered and used; ended afterwards, untimed",
        measure=_open_and_close,
        prepare=prepare,
        is_optional=True,
    )
    yield Case(
        name=LIVE_COLD, call="the same with warm=False", measure=partial(_open_and_close, warm=False), prepare=prepare,
        is_optional=True,
    )  # fmt: skip
    sandbox = stack.enter_context(cloche.Sandbox(live=True, cpus=2))
    sandbox.run(CODE)
    yield Case(name=LIVE_COMMAND, call="sandbox.exec(['true'])", measure=partial(_command, sandbox))
    yield Case(name=LIVE_RUN, call=f"sandbox.run({CODE!r})", measure=partial(_run, sandbox))
    yield Case(name=ECHO, call="a letter typed to `cat` on a terminal", measure=_Echo(stack, sandbox).measure)


def forwarded_port(_: Setting, stack: ExitStack) -> Cases:
    """Enter 64 MiB from a server: on the host by loopback, and inside by a forwarded port."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    data = bytes(1 << 20)

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with closing(connection):
                for _ in range(SENT_BYTES >> 20):
                    connection.sendall(data)

    threading.Thread(target=serve, daemon=True).start()
    port = listener.getsockname()[1]
    yield Case(name=DIRECT, call="read to the end by one socket", measure=partial(_receive, port))
    sandbox = stack.enter_context(cloche.Sandbox(live=True, cpus=2))
    server = stack.enter_context(sandbox.start(["python3", "-c", SERVER]))
    if server.stdout.read() != b"ready\n":
        yield SkippedCase(name=FORWARDED, reason="the server inside does not start")
        return
    forward = stack.enter_context(sandbox.forward(PORT))
    yield Case(
        name=FORWARDED, call=f"the same from sandbox.forward({PORT})", measure=partial(_receive, forward.host_port)
    )


def _receive(port: int) -> Measurement:
    def receive() -> None:
        left = SENT_BYTES
        buffer = bytearray(1 << 18)
        with socket.create_connection(("127.0.0.1", port)) as connection:
            while count := connection.recv_into(buffer):
                left -= count
        _check(left == 0, f"{left} bytes are missing")

    return Measurement(_ms(receive), b"1\n")


def idle_memory(_setting: Setting) -> dict[str, Any]:
    """Return what a sandbox costs in which nothing happens for a while, in MiB of PSS: the mean of twenty."""
    with ExitStack() as stack:
        before = descendants()
        try:
            for _ in range(IDLE_SANDBOXES):
                _command(stack.enter_context(cloche.Sandbox(live=True)))
            time.sleep(SETTLED_S)
            return crowd_report(before, IDLE_SANDBOXES)
        except PermissionError:
            return {"reason": "only root may look into these processes (they are closed to others on purpose)"}


LIVE_EVENTS = (
    Scenario(name="live", title="a live sandbox", enter=live_sandbox, reference=PLAIN, also={"idle": idle_memory}),
    Scenario(name="port", title="a forwarded port", enter=forwarded_port, reference=DIRECT, share=0.2, least=5),
)
