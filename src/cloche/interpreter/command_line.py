"""Commands of the shell: `!cmd`, `x = !cmd`, scripts for other programs; and how the line of a magic is taken apart.

A command has its own process group, so that an interrupt ends all of it. Its output goes straight to the descriptors
1 and 2, except where the program has put something else in the place of its streams: then it is written there.

All magics share the options and words of a line, the names that `$name` and `{...}` put into it, and the error of a
wrong one, `UsageError`.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from typing import Any


class UsageError(Exception):
    """A magic that does not exist, or was not called as it is meant to be. A session prints it as one line."""


def print_line(text: str) -> None:
    """Print a line for the program's reader."""
    sys.stdout.write(f"{text}\n")


def warn(text: str) -> None:
    """Print a line beside the program's output."""
    if sys.stderr is not None:
        sys.stderr.write(f"{text}\n")


def split_line(line: str) -> list[str]:
    """Split a line as a shell does. Raises UsageError for a quote without end."""
    import shlex

    try:
        return shlex.split(line)
    except ValueError as error:
        raise UsageError(f"{error}: {line}") from None


def take_options(
    line: str, flags: str = "", valued: str = "", long: Collection[str] = ()
) -> tuple[dict[str, str], str]:
    """Take options from the beginning of a line; return them and the rest as it was written.

    `flags` are letters that stand alone (`-q`), `valued` letters with a value (`-n 5`, `-n5`), `long` whole words
    (`--no-stderr`), with a value when they end in `=`. `--` ends the options.
    """
    import re

    options: dict[str, str] = {}
    remainder = line.strip()
    while match := re.match(r"(--?[A-Za-z][\w-]*|--)(=?)(\S*)\s*", remainder):
        option, equals, value = match.groups()
        after = remainder[match.end() :]
        if option == "--":
            return options, after
        if option.startswith("--"):
            after = _take_long(option[2:], f"{equals}{value}", after, long, options)
        elif option[1] in valued:
            spelled = option[2:] + equals + value
            spelled, after = (spelled, after) if spelled else _first_argument(after)
            options[option[1]] = spelled
        elif not equals and not value and all(letter in flags for letter in option[1:]):
            options.update(dict.fromkeys(option[1:], ""))
        else:
            raise UsageError(f"unknown option {option}")
        remainder = after
    return options, remainder


def _take_long(name: str, spelled: str, after: str, long: Collection[str], options: dict[str, str]) -> str:
    if name in long and not spelled:
        options[name] = ""
    elif f"{name}=" in long:
        options[name], after = (spelled[1:], after) if spelled else _first_argument(after)
    else:
        raise UsageError(f"unknown option --{name}")
    return after


def _first_argument(line: str) -> tuple[str, str]:
    argument, _, remainder = line.partition(" ")
    if not argument:
        raise UsageError("an option lacks its value")
    return argument, remainder.lstrip()


def number(text: str, label: str) -> int:
    """Return a whole number of one or more. Raises UsageError."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise UsageError(f"{label} takes a whole number of one or more, not {text!r}")
    return int(text)


_SHELLS = ("/bin/bash", "/bin/sh")
_INTERRUPT_TIMEOUT_S = 1.0  # between an interrupt and the end
_CONVERSIONS: dict[str, Callable[[object], str]] = {"r": repr, "s": str, "a": ascii}


class SList(list[str]):
    """The lines a command printed; `l` and `list` are the lines, `n`, `s` and `p` other forms of them."""

    @property
    def l(self) -> list[str]:  # noqa: E743 - the name is IPython's
        return list(self)

    list_ = l

    @property
    def n(self) -> str:
        return "\n".join(self)

    @property
    def s(self) -> str:
        return " ".join(self)

    @property
    def p(self) -> list[Any]:
        from pathlib import Path

        return [Path(line) for line in self if os.path.exists(line)]

    nlstr, spstr, paths = n, s, p

    def grep(self, pattern: str, prune: bool = False) -> SList:
        """Return the lines that match a pattern, or with `prune` those that do not."""
        import re

        return SList(line for line in self if bool(re.search(pattern, line, re.IGNORECASE)) is not prune)

    def fields(self, *numbers: int) -> SList | list[list[str]]:
        """Return the words of each line, or of each line the words with these numbers."""
        split = [line.split() for line in self]
        if not numbers:
            return split
        return SList(" ".join(line[index] for index in numbers if -len(line) <= index < len(line)) for line in split)


def system(command: str, namespace: dict[str, Any]) -> None:
    """Run a command of the shell; how it ended is `_exit_code` in the namespace, negative for a signal."""
    namespace["_exit_code"] = run_attached([_shell(), "-c", command])


def getoutput(command: str, namespace: dict[str, Any] | None = None) -> SList:
    """Run a command of the shell and return the lines it printed, errors among them."""
    import subprocess

    code, output, _ = _run([_shell(), "-c", command], None, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if namespace is not None:
        namespace["_exit_code"] = code
    return SList(output.decode("utf-8", "replace").splitlines())


def run_attached(argv: list[str], script: str | None = None) -> int:
    """Run a program whose output is ours, with a script as its standard input; return its exit code."""
    import subprocess

    pipes = {name: subprocess.PIPE for name, fd in (("stdout", 1), ("stderr", 2)) if not _is_at(name, fd)}
    code, output, errors = _run(argv, script, **pipes)
    for stream, data in ((sys.stdout, output), (sys.stderr, errors)):
        if data:
            stream.write(data.decode("utf-8", "replace"))
    return code


def run_captured(argv: list[str], script: str) -> tuple[int, str, str]:
    """Run a program with a script as its standard input; return its exit code, output and errors."""
    import subprocess

    code, output, errors = _run(argv, script, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return code, output.decode("utf-8", "replace"), errors.decode("utf-8", "replace")


def _shell() -> str:
    return next((path for path in _SHELLS if os.path.exists(path)), _SHELLS[-1])


def _is_at(name: str, fd: int) -> bool:
    """Flush a standard stream, and tell whether its descriptor is still this number."""
    stream = getattr(sys, name)
    try:
        stream.flush()
        return bool(stream.fileno() == fd)
    except (AttributeError, OSError, ValueError):
        return stream is None  # a stream that is no file is written to


def _run(argv: list[str], script: str | None, **streams: Any) -> tuple[int, bytes, bytes]:
    """Run a program to its end; after an interrupt, end it and all that it started."""
    import subprocess

    process, early = None, _PutOff()
    try:
        with early:
            process = _start(argv, stdin=subprocess.DEVNULL if script is None else subprocess.PIPE, **streams)
        early.make_up()
        output, errors = process.communicate(None if script is None else script.encode("utf-8", "surrogateescape"))
    except BaseException:
        if process is not None:
            _end(process)
        raise
    return _exit_code(process.returncode), output or b"", errors or b""


def _start(argv: list[str], **streams: Any) -> Any:
    """Start a program in a new process group. Raises UsageError if it does not exist."""
    import subprocess

    try:
        return subprocess.Popen(argv, process_group=0, **streams)
    except FileNotFoundError:
        raise UsageError(f"there is no {argv[0]} in this sandbox") from None


class _PutOff:
    """Defer interrupts, as a context manager: one within `Popen` would leave an untracked program."""

    def __enter__(self) -> None:
        import signal
        import threading

        self._came: list[tuple[int, Any]] = []
        is_main = threading.current_thread() is threading.main_thread()
        self._handler: Any = signal.getsignal(signal.SIGINT) if is_main else None
        if callable(self._handler):
            signal.signal(signal.SIGINT, lambda *arguments: self._came.append(arguments))

    def __exit__(self, *_: object) -> None:
        if callable(self._handler):
            import signal

            signal.signal(signal.SIGINT, self._handler)

    def make_up(self) -> None:
        """Interrupt now, where it was to be."""
        for arguments in self._came[:1]:
            self._handler(*arguments)


def _end(process: Any) -> None:
    import signal
    import subprocess

    _kill(process.pid, signal.SIGINT)
    try:
        process.wait(_INTERRUPT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        _kill(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            _close(pipe)


def _close(pipe: Any) -> None:
    try:
        if pipe is not None:
            pipe.close()
    except OSError:
        pass  # the program has closed its input


def _kill(group: int, signal: int) -> None:
    try:
        os.killpg(group, signal)
    except (ProcessLookupError, PermissionError):
        pass  # all of it has ended


def _exit_code(code: int) -> int:
    """Return an exit code, or the negative number of a signal, also if a shell reports it as 128 and more."""
    return code if code <= 128 else 128 - code


def expand(line: str, names: Mapping[str, Any]) -> str:
    """Replace `{expression}` and `$name` by their values; `{{`, `}}` and `$$` stand for the characters themselves.

    Text without a value here is left for the shell: `$HOME`, `${HOME}`, `{print $1}`, and any `$` in single quotes.
    """
    if not any(sign in line for sign in "{}$"):
        return line
    out: list[str] = []
    position, quote = 0, ""
    while position < len(line):
        text, end = _expand_one(line, position, names, is_quoted=quote == "'")
        if text in ("'", '"') and quote in ("", text):
            quote = "" if quote else text
        out.append(text)
        position = end
    return "".join(out)


def _expand_one(line: str, position: int, names: Mapping[str, Any], *, is_quoted: bool) -> tuple[str, int]:
    """Return the replacement of the piece of a line that begins at `position`, and the position of the next piece."""
    pair = line[position : position + 2]
    if pair in ("{{", "}}"):
        return pair[0], position + 2
    if pair == "${":
        return pair, position + 2
    if line[position] == "{":
        return _expand_braces(line, position, names)
    if line[position] == "$" and not is_quoted:
        return _expand_name(line, position, names)
    return line[position], position + 1


def _expand_braces(line: str, position: int, names: Mapping[str, Any]) -> tuple[str, int]:
    depth, end = 0, position
    for end in range(position, len(line)):
        depth += {"{": 1, "}": -1}.get(line[end], 0)
        if depth == 0:
            break
    braced = line[position : end + 1]
    if depth or not braced[1:-1].strip():
        return braced, end + 1
    for expression, conversion, form in _readings(braced[1:-1]):
        try:
            value = eval(expression.strip(), dict(names))
            value = _CONVERSIONS[conversion](value) if conversion else value
            return format(value, form), end + 1
        except Exception:  # noqa: S112 - what is no expression here is the shell's
            continue
    return braced, end + 1


def _readings(inner: str) -> list[tuple[str, str, str]]:
    """Return the readings of braces: as an expression, or as one with a conversion and a format."""
    before, _, form = inner.rpartition(":")
    fields = [(inner, "", "")]
    for expression, spec in ((before, form), (inner, "")):
        head, mark, conversion = expression.rpartition("!")
        if mark and conversion in ("r", "s", "a"):
            fields.append((head, conversion, spec))
    return [*fields, (before, "", form)] if before else fields


def _expand_name(line: str, position: int, names: Mapping[str, Any]) -> tuple[str, int]:
    import re

    match = re.compile(r"\$(\$?)([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)").match(line, position)
    if match is None:
        return "$", position + 1
    escaped, dotted = match.groups()
    if escaped:
        return match.group()[1:], match.end()
    first, *attributes = dotted.split(".")
    if first not in names or first == "__builtins__":
        return match.group(), match.end()
    value, end = names[first], position + 1 + len(first)
    for name in attributes:
        try:
            value = getattr(value, name)
        except Exception:
            break  # `$name.txt` is a value and a text
        end += 1 + len(name)
    return str(value), end
