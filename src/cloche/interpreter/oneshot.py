"""Turn the helper's interpreter into the guest's: run one script as `python script` would, and send its value.

This runs with the guest's privileges, inside all restrictions, in a process that was started with `-I -S` and forked.
All of that which a script could see is corrected here: flags, `sys.path`, standard streams, `__main__`, the
environment. The value of the last expression goes to a pipe as one byte (`J` for JSON, `R` for a repr) and UTF-8 text;
it is the guest's claim, so the other end bounds and checks it.
"""

from __future__ import annotations

import gc
import io
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, ModuleType
    from typing import Any

# Private to CPython, and cheap: `ctypes` and `signal` would cost every run milliseconds.
_ctypes: Any = __import__("_ctypes")
_signal: Any = __import__("_signal")
_weakref: Any = __import__("_weakref")

EXIT_UNFLUSHED = 120
# What `notebook_libraries` and `ipython` lead to `display`.
LIBRARIES = frozenset((
    "IPython.core.display_functions", "PIL.ImageShow", "bokeh.io", "matplotlib.animation", "plotly.io._renderers",
))  # fmt: skip
ONLY_AST = 0x400
_BEGINS_NO_STATEMENT = (b"", b" ", b"\t", b"#", b")", b"]", b"}", b'"', b"'")
_FUTURE_FLAGS = 0x1FF0000
_compile_string: Any = None
_preloaded: Preloaded | None = None  # once this process, or the fork server that it was forked from, is prepared
_FIRST_LIBRARY_AT, _NEXT_LIBRARY_AT = 8, 24  # in the loader's `struct r_debug` and `struct link_map`
OLD_IN_A_ROW = 6  # so many modules of the fork server's in a row, and all before them are its too
FILE_INPUT, _EVAL_INPUT = 257, 258  # CPython's start symbols
# The flags that `-I -S` set, and what they are without it.
_PLAIN_FLAGS = {"isolated": 0, "ignore_environment": 0, "no_user_site": 0, "no_site": 0, "safe_path": False}


class Preloaded:
    """Hold the modules and values that a fork server, or pid 1 of a container, loaded ahead: `preload` fills it.

    In a process that was not forked from one it stays empty.
    """

    __slots__ = (
        "built_in_paths", "env", "host_functions", "libraries", "modules", "paths", "result_value", "warm_up_fork",
    )  # fmt: skip

    def __init__(self) -> None:
        self.modules: dict[str, ModuleType] = {}  # all that were loaded; empty where nothing was preloaded
        self.libraries = 0  # how many C libraries there were, 0 where that is not known
        self.built_in_paths = 0  # how many entries of `sys.path` are there whether they exist or not
        self.paths: list[str] | None = None  # `sys.path` after the script's folder, once it was looked up
        self.env: dict[str, str] | None = None  # the value of `os.environ`, with the streams, once set
        self.result_value: Any = None  # our module of that name
        self.host_functions: Any = None  # and this one
        self.warm_up_fork: Callable[[], None] | None = None  # goes through a run of nothing, in a fork


class Privileges:
    """Hold the objects that the process which starts a program hands over to serve it.

    All of it works with the guest's rights alone: a program that finds it in one of our frames gains nothing.
    """

    __slots__ = ("archive", "clone", "exit_early", "give_up", "recvmsg")

    def __init__(self, archive: Any) -> None:
        self.archive = archive  # the finder of our own modules, needed at a script's end
        # The early exit notice: end the process so that pid 1 knows it first; returns where nobody listens any more.
        self.exit_early: Callable[[int], None] | None = None
        # For a session that can be forked: clone this process, receive descriptors, give up a clone's capabilities.
        self.clone: Any = None
        self.recvmsg: Any = None
        self.give_up: Any = None


def prepare() -> Preloaded:
    """Undo, once, the effects of the helper's own options; return the preloaded modules.

    It is all that needs neither a file of the sandbox's nor orders.
    """
    global _preloaded
    if _preloaded is None:
        import site  # noqa: F401 - nothing but loaded: it sets no path while the flags are still those of the helper

        _preloaded = Preloaded()
        gc.freeze()  # present objects will never be garbage of the script's
        sys.dont_write_bytecode = True
        _restore_flags()
    return _preloaded


def warm_up_fork() -> None:
    """Go through a run of nothing while nothing waits, in a fork of the fork server."""
    preloaded = prepare()
    if preloaded.warm_up_fork is not None:
        preloaded.warm_up_fork()


def take_over(env: dict[str, str], preloaded: Preloaded) -> None:
    """Take the environment, and the standard streams as they are now, unless that was done ahead."""
    if preloaded.env != env:
        os.environ.clear()
        os.environ.update(env)
        if "TZ" in env:
            __import__("time").tzset()
    name_output()
    if preloaded.env is not None:
        return
    this: Any = sys  # the originals are only final for those who did not start the interpreter
    this.stdin = this.__stdin__ = _stream(0, "r", "surrogateescape")
    this.stdout = this.__stdout__ = _stream(1, "w", "surrogateescape")
    this.stderr = this.__stderr__ = _stream(2, "w", "backslashreplace")


def output_variable() -> tuple[str, str]:
    """Return the variable that identifies the run's own output to a program's interpreters: see `sitecustomize`."""
    output, errors = os.fstat(1), os.fstat(2)
    return "CLOCHE_OUTPUT", f"{output.st_dev}:{output.st_ino} {errors.st_dev}:{errors.st_ino}"


def name_output() -> None:
    """Set that variable."""
    name, value = output_variable()
    os.environ[name] = value


def set_up_paths(settings: dict[str, Any], preloaded: Preloaded) -> None:
    """Take the import path, and random numbers, unless that was done ahead; and forget the `__main__` before."""
    if preloaded.modules:
        folders = preloaded.paths
        if folders is None:
            folders = visible_paths(preloaded)
            reseed()
        sys.path[:] = [os.path.dirname(settings["path"]), *folders]
        _add_layers(settings, 1 + preloaded.built_in_paths)
        sys.modules.pop("__main__", None)
    else:
        restore_paths(settings)


def lead_to_stand_ins(folder: str, archive: Any) -> None:
    """Have imports find the replacements of modules that use /dev/shm, if the sandbox lacks it: see `without_shm`."""
    module: Any = type(sys)("interpreter.without_shm")
    exec(archive.code(module.__name__), module.__dict__)
    module.lead(folder)


class LibraryWatch:
    """A finder that finds no module: at the first library with displays, it starts to collect them for the result.

    The modules for that are loaded only then.
    """

    def __init__(self, preloaded: Preloaded, archive: Any) -> None:
        self._preloaded, self._archive = preloaded, archive
        self.display: Any = None
        self.shown: Any = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find a module as the others do; None for all but those libraries, which costs an import nothing."""
        if name not in LIBRARIES:
            return None
        sys.meta_path.remove(self)
        self.display, self.shown = self.result_value().load("ipython", self._archive).lead_script()
        return sys.meta_path[0].find_spec(name, path, target)  # the redirecting finder is the first now

    def result_value(self) -> Any:
        """Return our module of that name, loaded at its first use."""
        value_module = self._preloaded.result_value
        if value_module is None:
            value_module = self._preloaded.result_value = type(sys)("interpreter.result_value")
            exec(self._archive.code(value_module.__name__), value_module.__dict__)
        return value_module


def offer_functions(ends: tuple[int, ...], preloaded: Preloaded, archive: Any) -> Any:
    """Make the module of the caller's functions, if there are any; return their link, or None."""
    if not ends:
        return None
    if preloaded.host_functions is None:
        preloaded.host_functions = type(sys)("interpreter.host_functions")
        archive.exec_module(preloaded.host_functions)
    return preloaded.host_functions.install(*ends)


def run(
    settings: dict[str, Any],
    env: dict[str, str],
    preloaded: Preloaded,
    privileges: Privileges,
    value_fd: int,
    *host_ends: int,
) -> None:
    """Run the script at `settings["path"]` with `settings["argv"]` and leave the process as the interpreter does.

    `host_ends` are the descriptors for calls of the caller's functions, and for their answers.
    """
    path: str = settings["path"]
    gc.freeze()  # nothing that was made for this run is for the script to find, or to collect
    take_over(env, preloaded)
    offer_functions(host_ends, preloaded, privileges.archive)
    code = _run_script(settings, path, preloaded, privileges, value_fd)
    finish(code, os.path.dirname(path), preloaded, privileges)


def _run_script(
    settings: dict[str, Any], path: str, preloaded: Preloaded, privileges: Privileges, value_fd: int
) -> int:
    """Run the script and return the exit code; no reference to its objects is kept here."""
    watch, pipe = LibraryWatch(preloaded, privileges.archive), 0
    try:
        set_up_paths(settings, preloaded)
        if "stand_ins" in settings:
            lead_to_stand_ins(settings["stand_ins"], privileges.archive)
        sys.argv = [path, *settings["argv"]]
        pipe = os.fstat(value_fd).st_ino if value_fd >= 0 else 0
        namespace = main_module(path).__dict__
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
        if pipe:
            sys.meta_path.insert(0, watch)
        value = _execute(path, namespace, settings.get("source"))
        if pipe:
            _send_value(value_fd, pipe, value, watch, privileges.archive)
        return 0
    except BaseException as error:
        code = _exit_code(error.code) if isinstance(error, SystemExit) else _report(error)
    if watch.display is not None:
        _send_value(value_fd, pipe, None, watch, privileges.archive)  # its earlier displays
    return code


def _send_value(fd: int, pipe: int, value: Any, watch: LibraryWatch, archive: Any) -> None:
    """Send the caller the value and the displays; most cold runs have neither, and load nothing for it."""
    if value is None and watch.display is None and "matplotlib.pyplot" not in sys.modules:
        return
    watch.result_value().send(fd, pipe, value, archive, watch)


def reseed() -> None:
    """Reseed random number generators in this fork, if modules do not do it themselves."""
    if "_ssl" in sys.modules:
        sys.modules["_ssl"].RAND_add(os.urandom(32), 32.0)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(int.from_bytes(os.urandom(7), "little"))


def reseed_all() -> None:
    """Reseed all random number generators in this fork, even those that were seeded before."""
    reseed()
    if "random" in sys.modules:
        sys.modules["random"].seed()


def visible_paths(preloaded: Preloaded) -> list[str]:
    """Leave out paths that the site module added outside and would not have found inside."""
    always, added = sys.path[: preloaded.built_in_paths], sys.path[preloaded.built_in_paths :]
    return [*always, *(folder for folder in added if os.path.exists(folder))]


def finish(code: int, folder: str, preloaded: Preloaded, privileges: Privileges) -> None:
    """End the process: threads, exit functions, streams, then the script's own objects; the rest is not visited.

    The interpreter would take every module apart, which copies most pages of a forked process for nothing. All effects
    that a script can observe happen: threads are joined, exit functions run, and its own modules (those of `folder`)
    are unloaded, first as garbage, so that finalizers still find the names they use, then name by name.
    """
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    if "atexit" in sys.modules:
        sys.modules["atexit"]._run_exitfuncs()
    unflushed = flush()
    has_libraries = unload(folder, preloaded)
    _leave(unflushed or flush() or code, privileges.exit_early, has_libraries=has_libraries)


def unload(folder: str, preloaded: Preloaded) -> bool:
    """Unload the script's own modules; return whether C libraries may have buffers or exit functions of their own."""
    loaded = _loaded_here(preloaded.modules)
    has_libraries = _has_libraries(loaded, preloaded)
    remaining = _take_out(loaded, folder)
    del loaded  # else objects of a script's module would not be garbage
    _flush_files()
    gc.collect()
    for reference in remaining:
        module = reference()
        if module is not None:
            _clear(vars(module))
    gc.collect()
    return has_libraries


def _flush_files() -> None:
    """Flush files that the script never closed: collecting a cycle may close a file before its buffer."""
    for kind in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
        for file in [tracked for tracked in gc.get_objects() if type(tracked) is kind]:
            try:
                file.flush()
            except (OSError, ValueError):
                pass  # it is closed, or its other end is


def _take_out(loaded: list[tuple[str, ModuleType]], folder: str) -> list[Any]:
    """Take the script's modules out of the table of modules; return weak references to them."""
    references = []
    for name, module in loaded:
        if _is_from(module, folder):
            references.append(_weakref.ref(module))
            sys.modules.pop(name, None)
    return references


def _has_libraries(loaded: list[tuple[str, ModuleType]], preloaded: Preloaded) -> bool:
    """Tell whether a C library that the fork server did not load may have buffers or exit functions."""
    if not preloaded.modules:
        return True
    if "ctypes" in sys.modules and (preloaded.libraries == 0 or count_libraries() != preloaded.libraries):
        return True
    return any(str(getattr(module, "__file__", "")).endswith(".so") for _, module in loaded)


def count_libraries() -> int:
    """Count the libraries that are loaded, off the list that the loader keeps for debuggers; 0 where it keeps none."""
    pointer: Any = type("Pointer", (_ctypes._SimpleCData,), {"_type_": "P"})
    try:
        start = _ctypes.dlsym(_ctypes.dlopen(None, 0), "_r_debug")
    except OSError:
        return 0
    address = pointer.from_address(start + _FIRST_LIBRARY_AT).value
    count = 0
    while address:
        address = pointer.from_address(address + _NEXT_LIBRARY_AT).value
        count += 1
    return count


def _loaded_here(preloaded: dict[str, ModuleType]) -> list[tuple[str, ModuleType]]:
    """Return the modules that this process has loaded: touching the fork server's would copy their pages."""
    new_modules, in_a_row = [], 0
    for name, module in reversed(sys.modules.items() if preloaded else list(sys.modules.items())):
        if preloaded.get(name) is module:
            in_a_row += 1
            if in_a_row > OLD_IN_A_ROW:
                break
        else:
            in_a_row = 0
            new_modules.append((name, module))
    return new_modules[::-1]


def _is_from(module: ModuleType, folder: str) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and file.startswith(folder + "/")


def _clear(namespace: dict[str, Any]) -> None:
    """Delete a module's names in the interpreter's own order: private ones first, never the built-ins."""
    for is_private in (True, False):
        for name in list(namespace):
            if name != "__builtins__" and (name[:1] == "_" and name[:2] != "__") is is_private:
                namespace[name] = None


def _leave(code: int, exit_early: Callable[[int], None] | None, *, has_libraries: bool) -> None:
    """Call the C library's own exit, so that its exit functions run and its buffers are flushed.

    Libraries that a fork server loaded need no exit function in its children; it would take them apart for nothing.
    """
    if not has_libraries:
        if exit_early is not None and -(1 << 31) <= code < 1 << 31:
            exit_early(code)
        os._exit(code)
    shape = {"_flags_": _ctypes.FUNCFLAG_CDECL | _ctypes.FUNCFLAG_PYTHONAPI, "_restype_": None}
    leave: Any = type("Exit", (_ctypes.CFuncPtr,), shape)(_ctypes.dlsym(_ctypes.dlopen(None, 0), "exit"))
    leave(code)


def _exit_code(code: object) -> int:
    """Return the exit code that `SystemExit(code)` means; a message goes to standard error."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF if -(1 << 63) <= code < 1 << 63 else 0xFF
    flush()
    sys.stderr.write(f"{code}\n")
    return 1


def _execute(path: str, namespace: dict[str, Any], source: bytes | None) -> Any:
    """Run a script and return the value of its last statement when that is an expression."""
    body, last = _compile(read_source(path) if source is None else source, path)
    exec(body, namespace)
    return eval(last, namespace) if last is not None else None


def read_source(path: str) -> bytes:
    """Return a script's bytes."""
    with open(path, "rb") as file:
        return file.read()


def _compile(source: bytes, path: str) -> tuple[CodeType, CodeType | None]:
    """Compile a script in two: all of it, or all before its last expression and that expression."""
    return compile_at_last_line(source, path) or _compile_by_tree(source, path)


def compile_at_last_line(source: bytes, path: str) -> tuple[CodeType, CodeType] | None:
    """Cut before the last line that begins a statement, if both parts are complete; None if that is not certain.

    The text before it is complete by itself, and the text after it is one expression: so the cut is between statements.
    It is tried because the built-in `compile` sets up all classes of syntax trees at its first use, which takes up to
    two milliseconds. Encodings, and characters that would shift anything, are left to it; so are scripts that change
    the language.
    """
    lines = source.split(b"\n")
    last = len(lines) - 1
    while last >= 0 and lines[last][:1] in _BEGINS_NO_STATEMENT:
        last -= 1
    if (
        last < 0
        or any(character in source for character in (b"\r", b"\f", b"\0", b"__future__"))
        or any(b"coding" in line for line in lines[:2])
    ):
        return None
    tail = b"\n" * last + b"\n".join(lines[last:])
    try:
        expression = compile_source(tail, path, _EVAL_INPUT, 0)
        body = compile_source(b"\n".join(lines[:last]) + b"\n", path, FILE_INPUT, 0)
        return body, expression
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def compile_source(source: bytes, path: str, start: int, flags: int) -> CodeType:
    """Compile as the interpreter itself does."""
    global _compile_string
    if _compile_string is None:
        _compile_string = _find_compile_string()
    settings = flags.to_bytes(4, sys.byteorder) + sys.version_info.minor.to_bytes(4, sys.byteorder)
    code: CodeType = _compile_string(source, path, start, settings, -1)
    return code


def _find_compile_string() -> Any:
    """Return the function of the interpreter's C interface that compiles."""
    kind = _ctypes._SimpleCData
    anything, text = type("Object", (kind,), {"_type_": "O"}), type("Text", (kind,), {"_type_": "z"})
    integer = type("Integer", (kind,), {"_type_": "i"})
    shape = {
        "_flags_": _ctypes.FUNCFLAG_CDECL | _ctypes.FUNCFLAG_PYTHONAPI,
        "_argtypes_": (text, anything, integer, text, integer),
        "_restype_": anything,
    }
    function = type("Compile", (_ctypes.CFuncPtr,), shape)
    return function(_ctypes.dlsym(_ctypes.dlopen(None, 0), "Py_CompileStringObject"))


def _compile_by_tree(source: bytes, path: str) -> tuple[CodeType, CodeType | None]:
    """Compile by way of a syntax tree: any script, and every error in one."""
    tree: Any = compile(source, path, "exec", ONLY_AST, dont_inherit=True)
    if not tree.body or type(tree.body[-1]).__name__ != "Expr":
        return compile(tree, path, "exec", dont_inherit=True), None
    import _ast

    last = tree.body.pop()
    body = compile(tree, path, "exec", dont_inherit=True)
    expression = _ast.Expression(last.value)
    return body, compile(expression, path, "eval", body.co_flags & _FUTURE_FLAGS, dont_inherit=True)


def _report(error: BaseException) -> int:
    """Print the traceback without our own frames and return the interpreter's exit code for it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == run.__code__.co_filename:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    if isinstance(error, KeyboardInterrupt):
        flush()
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
        os.kill(os.getpid(), _signal.SIGINT)
    return 1


def flush() -> int:
    """Flush the standard streams; 120, as the interpreter says, when standard output does not take it."""
    failed = 0
    streams = [sys.stdout, sys.stderr]
    for own in (sys.__stdout__, sys.__stderr__):
        if own is not streams[0] and own is not streams[1]:
            streams.append(own)
    for stream in streams:
        try:
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        except Exception as error:
            failed = EXIT_UNFLUSHED
            if stream is sys.stdout and sys.stderr is not None:
                sys.stderr.write(f"Exception ignored in: {stream!r}\n{type(error).__name__}: {error}\n")
    return failed


def _stream(fd: int, mode: str, errors: str) -> Any:
    name = ("<stdin>", "<stdout>", "<stderr>")[fd]
    raw: Any = io.FileIO(fd, mode, closefd=False)
    raw.name = name
    buffer: Any = io.BufferedReader(raw) if mode == "r" else io.BufferedWriter(raw)
    stream: Any = io.TextIOWrapper(buffer, "utf-8", errors, line_buffering=fd > 0, newline=None if fd == 0 else "\n")
    stream.mode = mode
    return stream


def _restore_flags() -> None:
    """Restore the flags of a plain start: programs that start their own interpreter pass on the flags they read here.

    They are a tuple, and its items are written in place; a class for one item is made much faster than a function of
    the interpreter's C interface.
    """
    flags: Any = sys.flags
    item: Any = type("Object", (_ctypes._SimpleCData,), {"_type_": "O"})
    first, size = id(flags) + tuple.__basicsize__, tuple.__itemsize__
    for index, name in enumerate(type(flags).__match_args__):
        if name in _PLAIN_FLAGS:
            _ctypes.Py_INCREF(_PLAIN_FLAGS[name])  # the tuple's own reference
            item.from_address(first + index * size).value = _PLAIN_FLAGS[name]


def restore_paths(settings: dict[str, Any]) -> None:
    """Give the script the import path that `python script` gives it."""
    site: Any = sys.modules["site"]
    customize = site.execsitecustomize, site.execusercustomize
    if not settings["customizes"]:  # a failing import takes half a millisecond
        site.execsitecustomize = site.execusercustomize = bool
    built_in_paths = len(sys.path)
    site.main()  # the flags are those of a plain start, and the files are the sandbox's
    site.execsitecustomize, site.execusercustomize = customize
    sys.path[:0] = [os.path.dirname(settings["path"])]
    sys.path += [folder for folder in settings["extra_paths"] if folder not in sys.path]
    _add_layers(settings, 1 + built_in_paths)


def _add_layers(settings: dict[str, Any], position: int) -> None:
    """Put requested packages before those that are present, and after the interpreter's own modules."""
    layers = settings.get("layers")
    if "executable" in settings:  # of an environment of the sandbox's own
        sys.executable = settings["executable"]
    if layers:
        sys.path[position:position] = layers


def main_module(path: str) -> ModuleType:
    """Return a fresh `__main__`, in place of the one that was there, for the script at `path`."""
    import _frozen_importlib_external

    main = type(sys)("__main__")
    main.__file__ = path
    main.__loader__ = _frozen_importlib_external.SourceFileLoader("__main__", path)
    main.__dict__.update(__builtins__=sys.modules["builtins"], __annotations__={}, __cached__=None)
    sys.modules["__main__"] = main
    return main
