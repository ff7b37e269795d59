"""A live session: run one cell after the other in one interpreter, and report the result of each.

This runs with the guest's privileges, inside all restrictions. Requests come on a link, answers go to a pipe, which
carries no descriptors. Both are frames: four bytes of length, most significant first, and a JSON object. All that a
cell prints goes to the standard streams and is there before the answer that ends it. The other end trusts nothing that
it receives.

A cell is compiled as a script whose last expression is its value, with `await` allowed at its top level. Where that
fails at a line that begins with `!` or `%`, the line is rewritten (see `magics`) and it is tried again.
"""

from __future__ import annotations

import io
import json
import os
import select
import sys
from json import encoder as _encoder

from . import (
    cell_magics,
    command_line,
    ipython,
    line_magics,
    magics,
    notebook,
    oneshot,
    result_value,
    session_fork,
    session_processes,
    session_tasks,
)
from .pretty import report, text_of
from .rich import OPTIONS, Display, as_text, bundle, parts_of, shows_itself

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType
    from typing import Any

_signal: Any = __import__("_signal")
_thread: Any = __import__("_thread")

ONLY_AST, TOP_LEVEL_AWAIT, FUTURE_FLAGS, IS_COROUTINE = 0x400, 0x2000, 0x1FF0000, 0x80
MOST_REWRITES = 1000  # lines of one cell
MOST_KEPT = 1000  # values in `Out`
PLAIN = (int, float, complex, bool)
INTERRUPTED = 130
NOTHING = 0  # the number of a cell that is none, see backends/session.py
ENOSPC, EUSERS = 28, 87
TOO_DEEP = "namespaces that are nested as deep as the kernel lets them be; go on in a new session"


class CellResult:
    """Hold the result of one cell; `exit_code` is that of an equal script."""

    def __init__(self) -> None:
        self.exit_code = 0
        self.value: Any = None
        self.data: dict[str, Any] | None = None
        self.metadata: dict[str, Any] = {}
        self.error: dict[str, str] | None = None


class Session:
    """Serve one link, and answer to the pipe `answers`. `namespace` is that of `__main__`."""

    def __init__(
        self,
        link: int,
        answers: int,
        namespace: dict[str, Any],
        preloaded: oneshot.Preloaded,
        privileges: oneshot.Privileges,
        host: Any = None,
    ):
        self.link, self.answers, self.namespace, self.pid = link, answers, namespace, os.getpid()
        self._home = sys.path[0] if sys.path else ""
        self._host = host  # the link of the caller's functions, if there are any
        self._ends = (answers, link) if host is None else (answers, link, host.calls, host.answers)
        self._preloaded, self._privileges = preloaded, privileges
        self._turn = _thread.RLock()  # to send: any thread of a cell may show something
        self._main, self._sender, self._is_late = _thread.get_ident(), 0, False
        self._waiting = select.poll()
        self._waiting.register(link, select.POLLIN)
        self.is_running = self._is_receiving = self._is_early = self.is_notebook = False
        self.count = 0
        self.request_id = 0
        self.room = result_value.Room()
        self.flags = 0
        self.tasks = session_tasks.Tasks(link, namespace)
        self._runs_tasks = False  # while it waits, once the other end has taken the last cell's output
        self.clones: set[int] = set()
        self.files: list[session_fork.OpenFile] | None = None  # the open files since the last cell
        self.history: list[str] = [""]
        self.kept: dict[int, Any] = {}
        self.display = Display(self._show, self._clear, self._has_room)
        self._places: dict[str, int] = {}  # numbers of display ids, whatever those are
        self._clears = 0  # of this cell
        self._printed_before = _printed()  # when the last cell ended
        namespace.update({"In": self.history, "Out": self.kept, "_": "", "__": "", "___": ""})
        ipython.install(self.display, namespace)
        ipython.when_loaded({
            "asyncio": self.tasks.lead,
            "PIL.Image": lambda module: notebook.show_saved(module, self.display.display, lambda: self.is_notebook),
            **session_processes.actions(),
        })  # fmt: skip
        self.magics = magics.Magics(self, line_magics.LINE_MAGICS, cell_magics.CELL_MAGICS)
        sys.displayhook = self._display_value

    def serve(self) -> None:
        """Answer requests until the other end is gone."""
        _signal.signal(_signal.SIGINT, self._on_interrupt)
        self.send({"op": "ready", "runtime": _runtime()})
        while True:
            request = self.receive()
            if request is None:
                return
            if request["op"] == "run" and request["id"] == NOTHING:
                self._is_receiving = self._is_early = False
                self.send({"op": "done", "id": NOTHING})
            elif request["op"] == "run":
                self.request_id, self.files, self.room = request["id"], None, result_value.Room()
                self._clears = 0
                answer = self._answer(request)
                self._runs_tasks = False
                self.send({**answer, "has_tasks": True} if self.tasks.has_work() else answer)
            elif request["op"] == "collected":
                self._is_receiving, self._runs_tasks = False, True
            elif request["op"] == "fork":
                self._is_receiving = self._is_early = False
                self._fork(request)
            elif request["op"] == "keep":
                _keep(request["path"], request["text"])

    def _fork(self, request: dict[str, Any]) -> None:
        """Clone this process, and go on in both; in the clone when it has its namespaces and mounts."""
        _, fds = self._privileges.recvmsg(self.link, 1, session_fork.STREAMS + len(self._ends))
        try:
            self.tasks.close()
            plan = session_fork.Clone(self._ends, fds, self._look_around(fds))
            pid = self._privileges.clone(request["flags"])
        except (OSError, RuntimeError) as error:
            self._close_all(fds)
            message = TOO_DEEP if isinstance(error, OSError) and error.errno in (ENOSPC, EUSERS) else str(error)
            self.send({"op": "done", "id": request["id"], "error": {"message": message}})
            return
        if pid:
            self._close_all(fds)
            self.clones.add(pid)
            self.send({"op": "done", "id": request["id"]})
            return
        self._begin_as_clone(plan)

    def _look_around(self, fds: list[int]) -> list[session_fork.OpenFile]:
        """Return the files to open again in a clone, or raise the obstacles; between cells nothing changes."""
        if self.files is None:
            obstacles, files = session_fork.look_for_obstacles({*self._ends, *fds}, self.clones)
            self.files = None if obstacles else files
        else:
            obstacles, files = session_fork.running_children(self.clones), self.files
        if obstacles:
            raise RuntimeError("; ".join(obstacles))
        return files

    def _begin_as_clone(self, plan: session_fork.Clone) -> None:
        """Become pid 1 of the new namespaces, and the session in them."""
        try:
            plan.release(self._privileges.give_up)
            self.send({"op": "cloned"})
            go = self.receive()
            if go is None:
                os._exit(0)
            self._is_receiving = self._is_early = False
            plan.take_input()
            pid = os.fork()
        except BaseException as error:
            os.write(2, f"cloche: the clone cannot go on: {type(error).__name__}: {error}\n".encode())
            os._exit(1)
        if pid:
            status = session_fork.wait_as_init(pid)
            self.send({"op": "gone", "wait_status": status})
            os._exit(0)
        self.pid = self.tasks.pid = os.getpid()
        self.clones.clear()
        self.files = None
        if self._host is not None:
            self._host.begin()
        plan.finish_set_up(is_fork=bool(go.get("is_fork")), reseed=oneshot.reseed_all)
        oneshot.name_output()
        self.send({"op": "ready", "runtime": _runtime()})

    def _close_all(self, fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)

    def send(self, frame: dict[str, Any]) -> None:
        """Send one frame, whole."""
        self._send(_as_json(frame).encode())

    def _send(self, data: bytes) -> None:
        view = memoryview(len(data).to_bytes(4, "big") + data)
        with self._turn:
            self._sender = _thread.get_ident()
            try:
                while view:
                    view = view[os.write(self.answers, view) :]
            finally:
                self._sender = 0
        if self._is_late and _thread.get_ident() == self._main:
            self._on_interrupt(_signal.SIGINT, None)

    def receive(self) -> dict[str, Any] | None:
        """Wait for a frame; None when the other end is gone.

        Tasks of the event loop go on meanwhile. Unlike one in `read`, a thread in `poll` is not woken when the other
        end reads sent data.
        """
        if self._runs_tasks:
            self.tasks.wait()
        self._waiting.poll()
        self._is_receiving = True
        head = self._read(4)
        body = self._read(int.from_bytes(head, "big")) if head is not None else None
        frame: dict[str, Any] | None = _from_json(body.decode()) if body is not None else None
        return frame

    def _read(self, size: int) -> bytes | None:
        data = b""
        while True:
            try:
                piece = os.read(self.link, size - len(data))
            except ConnectionResetError:
                return None
            if not piece:
                return None
            data = data + piece if data else piece
            if len(data) == size:
                return data

    def _on_interrupt(self, _number: int, frame: FrameType | None) -> None:
        """Interrupt a cell, after its current message, or as it begins; between two there is nothing to interrupt.

        A cell is on the link before it is interrupted. A task that keeps it waiting there is interrupted, too.
        """
        self._is_late = self._sender == self._main
        if self._is_late:
            return
        if self.is_running:
            raise KeyboardInterrupt
        self._is_early = self._is_early or self._is_receiving or session_tasks.has_come(self.link)
        if self._is_early and self.tasks.is_in_callback(frame or sys._getframe()):
            raise KeyboardInterrupt

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run a cell and return the frame that ends it."""
        self.is_notebook = request.get("is_notebook") is True
        OPTIONS.add_data = notebook.add_data if self.is_notebook else None
        if self.is_notebook:
            notebook.follow_folder(self._home)
        cell = self._run(request["code"], notebook.Surroundings(request))
        if os.getpid() != self.pid:  # the cell has forked, and this is the child at the end of its script
            oneshot.finish(cell.exit_code, os.getcwd(), self._preloaded, self._privileges)
        answer: dict[str, Any] = {"op": "done", "id": self.request_id, "exit_code": cell.exit_code}
        if cell.error is not None:
            answer["error"] = cell.error
        if cell.value is not None:
            answer |= self._value(cell)
        oneshot.flush()
        if self._clears:
            answer["printed"] = self._sizes()
        self._printed_before = _printed()
        return answer

    def _value(self, cell: CellResult) -> dict[str, Any]:
        """Return the message of a cell's value: itself as far as JSON goes, or a repr; and its displays."""
        text = result_value.as_json(cell.value, 0)
        shown_value: dict[str, Any] = {}
        if cell.data is not None:
            shown_value["data"], shown_value["metadata"] = as_text(cell.data), cell.metadata
        if text is not None and len(text) <= result_value.MAX_VALUE_BYTES:
            is_changeable = type(cell.value) in (list, dict)  # by a thread, until it is written
            return {**shown_value, "value": _from_json(text) if is_changeable else cell.value}
        shown = (cell.data or {}).get("text/plain") or text_of(cell.value)  # its bundle may be large, and shown already
        return {**shown_value, "value_repr": str(shown)[: result_value.MAX_VALUE_BYTES]}

    def _run(self, code: str, surroundings: notebook.Surroundings) -> CellResult:
        """Run a cell to any end; errors are printed as the interpreter prints them."""
        cell = CellResult()
        if code.strip() or not self.is_notebook:
            self.count += 1
            self.history.append(code)
        _signal.signal(_signal.SIGINT, self._on_interrupt)
        try:
            try:
                self.is_running = True
                was_early, self._is_receiving, self._is_early = self._is_early, False, False
                if was_early:
                    raise KeyboardInterrupt
                try:
                    surroundings.begin()
                    cell.value = self._execute(notebook.without_indent(code))
                    self._look_at(cell, code)
                finally:
                    self.display.flush_figures()
                    surroundings.end()
            finally:
                self.is_running = False
                _signal.signal(_signal.SIGINT, self._on_interrupt)  # whatever the cell has made of it
        except BaseException as error:
            self.is_running = False  # also where a second interrupt came before that
            self._take_error(cell, error)
        return cell

    def _look_at(self, cell: CellResult, code: str) -> None:
        """Keep a cell's value, and its display unless a semicolon ends the cell or the value displays itself."""
        if cell.value is None:
            return
        self._remember(cell.value)
        if code.rstrip().endswith(";"):
            return
        if type(cell.value) in PLAIN:
            cell.data = {"text/plain": repr(cell.value)}
        elif not shows_itself(cell.value):
            cell.data, cell.metadata = bundle(cell.value)
        if self.is_notebook and cell.data is not None:
            self._show(cell.data, cell.metadata, None, is_update=False, is_value=True)
            cell.data = None

    def run_cell(self, source: str) -> Any:
        """Run a text for a magic, inside the cell that runs; return its value, or raise."""
        return self._execute(source)

    def _take_error(self, cell: CellResult, error: BaseException) -> None:
        if isinstance(error, SystemExit):
            cell.exit_code = oneshot._exit_code(error.code)
            if not self.is_notebook:
                return
        else:
            cell.exit_code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        cell.error = {"name": type(error).__name__, "message": _message(error)}
        if isinstance(error, command_line.UsageError):
            sys.stderr.write(f"UsageError: {error}\n")
        elif self.is_notebook:
            cell.error["traceback"] = notebook.traceback_text(error)
        else:
            report(error)

    def _execute(self, code: str) -> Any:
        magic = magics.cell_magic(code)
        if magic is not None:
            return self.magics.run_cell(*magic)
        name = f"<cell {self.count}>"
        tree, source = self._parse(code, name)
        _remember_source(name, source)
        if not tree.body or type(tree.body[-1]).__name__ != "Expr":
            self._evaluate(self._compile(tree, name, "exec"))
            return None
        import _ast

        last = _ast.Expression(tree.body.pop().value)
        if not tree.body:
            return self._evaluate(self._compile(last, name, "eval"))
        first, second = self._compile(tree, name, "exec"), self._compile(last, name, "eval")
        # A magic may run a cell of its own, for which the loop has to stand still.
        if source == code and (first.co_flags | second.co_flags) & IS_COROUTINE:
            return self.tasks.run(self._evaluate_both(first, second))
        self._evaluate(first)
        return self._evaluate(second)

    def _parse(self, code: str, name: str) -> tuple[Any, str]:
        """Return the syntax tree and its source, with lines of other languages rewritten."""
        for _ in range(MOST_REWRITES):
            try:
                flags = ONLY_AST | TOP_LEVEL_AWAIT | self.flags
                return compile(code, name, "exec", flags, dont_inherit=True), code
            except SyntaxError as error:
                rewritten = magics.rewrite(code, error.lineno or 0)
                if rewritten is None or rewritten == code:
                    _remember_source(name, code)
                    raise
                code = rewritten
        raise SyntaxError("too many lines of other languages in one cell")

    def _compile(self, tree: Any, name: str, mode: str) -> CodeType:
        code: CodeType = compile(tree, name, mode, TOP_LEVEL_AWAIT | self.flags, dont_inherit=True)
        self.flags |= code.co_flags & FUTURE_FLAGS
        return code

    def _evaluate(self, code: CodeType) -> Any:
        result = eval(code, self.namespace)
        return self.tasks.run(result) if code.co_flags & IS_COROUTINE else result

    async def _evaluate_both(self, first: CodeType, second: CodeType) -> Any:
        """Evaluate a cell's lines and its last expression in the event loop, as one of them awaits."""
        result = eval(first, self.namespace)
        if first.co_flags & IS_COROUTINE:
            await result
        result = eval(second, self.namespace)
        return await result if second.co_flags & IS_COROUTINE else result

    def _remember(self, value: Any) -> None:
        if value is None:
            return
        space = self.namespace
        space["___"], space["__"], space["_"] = space.get("__"), space.get("_"), value
        self.kept[self.count] = value
        if len(self.kept) > MOST_KEPT:
            del self.kept[next(iter(self.kept))]

    def _display_value(self, value: Any) -> None:
        """Be the display hook for programs that call it."""
        if value is not None:
            self.display.display(value)

    def _show(
        self, data: dict[str, Any], metadata: dict[str, Any], display_id: str | None, is_update: bool,
        is_value: bool = False,
    ) -> None:  # fmt: skip
        """Send a bundle at once; beyond the bound, send one note instead."""
        if os.getpid() != self.pid:
            return
        oneshot.flush()
        frame = {"op": "display", "id": self.request_id, "data": as_text(data), "metadata": metadata}
        if is_value:
            frame["is_value"] = True
        if display_id is not None:
            frame |= {"place": self._places.setdefault(display_id, len(self._places)), "update": is_update}
        body = _as_json(frame).encode()
        with self._turn:
            if self.room.is_cut:
                return
            is_taken = self.room.takes(len(body), len(data) + parts_of(metadata))
            self._send(body if is_taken else b'{"op": "cut"}')

    def _has_room(self) -> bool:
        return self.room.is_half_left()

    def _clear(self, wait: bool) -> None:
        """Have this cell's displays removed, with its number of printed bytes; a bounded number of times."""
        if os.getpid() != self.pid or self._clears >= result_value.MAX_CLEARS:
            return
        self._clears += 1
        oneshot.flush()
        self.send({"op": "clear", "id": self.request_id, "wait": wait, "printed": self._sizes()})

    def _sizes(self) -> list[int]:
        """Return the bytes written to each standard stream since the last cell."""
        return [now - before for now, before in zip(_printed(), self._printed_before, strict=True)]


class Counted(io.FileIO):
    """A standard stream's file that counts the bytes written to it, for clear_output."""

    written = 0

    def write(self, data: Any, /) -> int:
        size = super().write(data)
        self.written += size or 0
        return size


def _counted(stream: Any) -> Any:
    """Return a standard stream of the same kind whose bytes are counted."""
    raw: Any = Counted(stream.fileno(), "w", closefd=False)
    raw.name = stream.name
    shape = {"encoding": stream.encoding, "errors": stream.errors, "line_buffering": stream.line_buffering}
    counted: Any = io.TextIOWrapper(io.BufferedWriter(raw), newline="\n", **shape)
    counted.mode = "w"
    return counted


def _printed() -> list[int]:
    """Return how many bytes went through the standard streams so far."""
    streams = (getattr(getattr(stream, "buffer", None), "raw", None) for stream in (sys.__stdout__, sys.__stderr__))
    return [getattr(raw, "written", 0) for raw in streams]


class NoInput:
    """A session's missing standard input: reading raises an error instead of pretending end of file."""

    encoding, errors, closed, name = "utf-8", "strict", False, "<stdin>"
    refusal = "a session has no standard input; pass data as a variable or as a file"

    def fileno(self) -> int:
        return 0

    def isatty(self) -> bool:
        return False

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        return

    def _refuse(self, *_: object) -> Any:
        raise EOFError(self.refusal)

    read = readline = readlines = __iter__ = __next__ = _refuse


def _refuse_input(prompt: object = "") -> str:
    """Refuse to prompt: a session has no user at a terminal."""
    prompt_text = f": {prompt!s}" if prompt else ""
    raise EOFError(f"input(){prompt_text}: {NoInput.refusal}")


def _json_writer() -> Callable[[Any], str]:
    """Return the encoder that `json.dumps` would make anew for each frame; frames have no cycles."""
    make = getattr(_encoder, "c_make_encoder", None)
    if make is None:
        return json.dumps
    refuse = json.JSONEncoder().default
    in_pieces = make(None, refuse, _encoder.encode_basestring_ascii, None, ": ", ", ", False, False, True)
    return lambda value: "".join(in_pieces(value, 0))


_as_json = _json_writer()
_reader: Any = json.JSONDecoder()


def _from_json(text: str) -> Any:
    """Return the object that a JSON text begins with."""
    return _reader.scan_once(text, 0)[0]


def _runtime() -> str:
    return f"{sys.implementation.name} {'.'.join(str(number) for number in sys.version_info[:3])}"


def _message(error: BaseException) -> str:
    try:
        return str(error)[:2000]
    except Exception:  # the program's own __str__; the traceback is printed anyhow
        return f"<{type(error).__name__} that cannot be put into words>"


def _keep(path: str, text: str) -> None:
    """Write a file if it does not exist; without the right to, leave it missing."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "x") as file:
            file.write(text)
    except Exception:  # also where a cell has replaced `open`
        return


def _remember_source(name: str, source: str) -> None:
    """Let tracebacks show a cell's lines, with their line ends: else carets would be one column too far right."""
    import linecache

    linecache.cache[name] = (len(source), None, [f"{line}\n" for line in source.splitlines()], name)


def serve(
    settings: dict[str, Any],
    env: dict[str, str],
    preloaded: oneshot.Preloaded,
    privileges: oneshot.Privileges,
    answers: int,
    link: int,
    *host_ends: int,
) -> None:
    """Serve a session on `link`, in the standing of a plain interpreter; ends the process."""
    oneshot.take_over(env, preloaded)
    host = oneshot.offer_functions(host_ends, preloaded, privileges.archive)
    oneshot.set_up_paths(settings, preloaded)
    if "stand_ins" in settings:
        oneshot.lead_to_stand_ins(settings["stand_ins"], privileges.archive)
    sys.path[0] = settings["home"]
    sys.argv = [""]
    namespace = oneshot.main_module("").__dict__
    for name in ("__file__", "__cached__"):
        namespace.pop(name, None)
    namespace["__loader__"] = None
    this: Any = sys
    this.stdin = this.__stdin__ = NoInput()
    this.stdout = this.__stdout__ = _counted(this.stdout)
    this.stderr = this.__stderr__ = _counted(this.stderr)
    sys.modules["builtins"].input = _refuse_input  # type: ignore[attr-defined]  # the guest's own built-ins
    Session(link, answers, namespace, preloaded, privileges, host).serve()
    oneshot.finish(0, settings["home"], preloaded, privileges)
