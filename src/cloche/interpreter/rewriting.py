"""Lines that are no Python: `!cmd`, `%magic`, `x = !cmd`, `obj?`, rewritten into calls; and `%%magic` cells.

A cell is compiled as it stands first, so nothing that is Python is ever touched. Where the compiler stops, that one
line is looked at. Rewriting keeps the number of lines, so that tracebacks point to what was written.
"""

from __future__ import annotations

_NAME = r"[A-Za-z_]\w*"
_OBJECT = rf"{_NAME}(?:\.{_NAME}|\[[^\[\]]*\])*"


def rewrite(source: str, lineno: int) -> str | None:
    """Rewrite the line at `lineno` (the first is 1), and what it continues, into a call of `get_ipython()`.

    Returns the new source, or None when that line is nothing of ours.
    """
    import re

    lines = source.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    first = last = lineno - 1
    if not 0 <= first < len(lines):
        return None
    while first > 0 and lines[first - 1].endswith("\\"):
        first -= 1
    while last + 1 < len(lines) and lines[last].endswith("\\"):
        last += 1
    parts = [line[:-1].rstrip() if line.endswith("\\") else line.rstrip() for line in lines[first : last + 1]]
    text = " ".join(parts)
    line = text.strip()
    for pattern, write in _LINES:
        found = re.fullmatch(pattern, line)
        call = write(*(part or "" for part in found.groups())) if found else None
        if call is not None:
            indent = text[: len(text) - len(text.lstrip())]
            lines[first : last + 1] = [indent + call, *[""] * (last - first)]
            return "\n".join(lines)
    return None


def cell_magic(source: str) -> tuple[str, str, str] | None:
    """Take `%%name line` from the first line of a cell; return name, line and the rest, or None."""
    if not source.lstrip().startswith("%%"):
        return None
    import re

    text = re.sub(r"\r\n?", "\n", source)
    found = re.match(rf"\s*%%({_NAME})(?:[ \t]+([^\n]*))?[ \t]*(?:\n|\Z)", text)
    return (found[1], (found[2] or "").strip(), text[found.end() :]) if found else None


def _help(one: str, other: str) -> str:
    marks, name = (one, other) if one.startswith("?") else (other, one)
    return _magic("pinfo2" if marks == "??" else "pinfo", name)


def _magic(name: str, line: str) -> str:
    return f"get_ipython().run_line_magic({name!r}, {line.strip()!r})"


def _system(command: str) -> str:
    return f"get_ipython().system({command.strip()!r})"


def _output(command: str) -> str:
    return f"get_ipython().getoutput({command.strip()!r})"


def _assigned_output(target: str, command: str) -> str | None:
    return f"{target} = {_output(command)}" if _is_target(target) else None


def _assigned_magic(target: str, name: str, line: str) -> str | None:
    return f"{target} = {_magic(name, line)}" if _is_target(target) else None


def _is_target(text: str) -> bool:
    try:
        compile(f"{text} = 0", "", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


# What is tried, in this order, on a line without its indentation.
_LINES = (
    (rf"(\?\??)\s*({_OBJECT})\s*;?", _help),
    (rf"({_OBJECT})\s*(\?\??)\s*;?", _help),
    (r"!!(.+)", _output),
    (r"!(.+)", _system),
    (rf"%({_NAME})(?:\s+(.*))?", _magic),
    (r"([^!%]*?[^!%=<>\s])\s*=\s*!(.+)", _assigned_output),
    (rf"([^!%]*?[^!%=<>\s])\s*=\s*%({_NAME})(?:\s+(.*))?", _assigned_magic),
)
