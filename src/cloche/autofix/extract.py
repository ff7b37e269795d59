"""Find the program in a model's answer. The answer is hostile text: bounded, and never run here.

Theory of operation: line ends, thinking and a wrapping of JSON are removed from the answer, which is then read as
fenced blocks. Of the blocks in the language, else of those without one, the longest that is not the old program counts.
A unified diff is applied to the old program; its hunks are found by their text, since a model's line numbers are seldom
right. Text without any block counts only where nearly all of it looks like code. What leaves parts out ("rest
unchanged"), is cut off or is empty counts as no program.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import accumulate, islice

from cloche.core.errors import InvalidRequest
from cloche.core.languages import language_named
from cloche.core.record import dataclass

MOST_HUNKS = 200
MOST_OLD_LINES = 5_000  # of all hunks
MOST_LINES = 20_000
MOST_COMPARED = 10_000_000  # the program's lines times those of all hunks
_HUNK = re.compile(r"^@@(?: -(\d{1,9})(?:,\d+)? \+\d+(?:,\d+)?)? ?.*$")
_HEADERS = ("diff ", "index ", "--- ", "+++ ", "new file", "old mode", "new mode", "\\ No newline")
MOST_REPLY_CHARS = 400_000
MOST_CODE_CHARS = 200_000
MOST_FENCES = 1_000
MOST_FENCE_CHARS = 200
MOST_PATCHES = 16  # of one answer that are tried
MOST_ELISION_CHARS = 120
MOST_LINE_CHARS = 400  # that are looked at to tell code from prose
MOST_DEPTH = 5  # of JSON in fences in JSON
NAMES = (
    "code", "fixed_code", "fixedCode", "corrected_code", "program", "source", "solution", "script", "answer",
    "content", "text", "response", "output", "result", "python", "javascript", "typescript", "bash",
)  # fmt: skip
DATA = ("json", "json5", "jsonc")
PATCHES = ("diff", "patch", "udiff")
_THINKING = "think|thinking|thought|reasoning|analysis|scratchpad|reflection"
_THOUGHT = re.compile(rf"\A\s*<({_THINKING})>.*?</\1>", re.DOTALL | re.IGNORECASE)
_OPEN_THOUGHT = re.compile(rf"\A\s*<({_THINKING})>", re.IGNORECASE)
_END_OF_THOUGHT = re.compile(rf"\A.*?</(?:{_THINKING})>", re.DOTALL | re.IGNORECASE)
_FENCE = re.compile(r"[ \t]*(?P<marks>`{3,}|~{3,})(?P<info>[^`\n]*)")
_TICKED = ("js", "javascript", "ts", "typescript", "go", "golang", "mjs", "jsx", "tsx")
_QUOTED = ("", "py", "python", "python3", "py3")
_LONG_STRINGS: Mapping[str, tuple[str, ...]] = {'"""': _QUOTED, "'''": _QUOTED, "`": _TICKED}
_ELISION_BEGINS = ("#", "/", "-", "<", ".", "…", "[", "(")
_WORD = re.compile(r"[\w#+.-]+")
_ELISION = re.compile(
    r"(?:#|//|--|/\*|<!--)?[ \t]*(?:\.{3}|…)?[ \t]*[\[(<]?"
    r"(?:the )?(?:rest|remainder|remaining|existing|previous|other|unchanged)\b.{0,60}?"
    r"(?:code|program|script|file|function|class|lines|imports|unchanged|same|as before|here|goes here|omitted)"
    r".{0,30}?(?:\.{3}|…|\*/|-->)?[\])>]?",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"[A-Z]\S*(?: \S+){2,}[.!?:]")
_CODE_LIKE = re.compile(
    r"[{};\\]\s*$|^\s*[})\]]|\w\(.*\)|[\w\])]\s*(?:[-+*/|&%]|:)?=[^=]|^\s*(?:#|//|/\*|\*/|--|@)|=>|->|::|\$\w|^\s{2,}\S|"
    r"^\s*(?:import|from|def|class|return|for|while|if|elif|else|try|except|finally|with|func|fn|let|const|var|use|"
    r"package|fi|done|do|then|end|puts|echo|print|raise|require|module|export|async|await|pub|impl|struct|using|"
    r"namespace|pass|break|continue)\b(?!.*[.!?]$)"
)
_COMMENT = re.compile(r"^\s*(?:#(?!!)|//|--|/\*.*\*/\s*$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hunk:
    """Hold the lines that a hunk replaces and those it puts there; `line` is where it says they are, counted from 1."""

    line: int
    old: tuple[str, ...]
    new: tuple[str, ...]


def looks_like_patch(text: str) -> bool:
    """Tell whether a text is a diff: a hunk's header, or the names of both files, and lines that change."""
    lines = text.strip("\n").split("\n")
    has_hunk = any(line.startswith("@@ ") or line.strip() == "@@" for line in lines)
    has_names = any(line.startswith("--- ") for line in lines) and any(line.startswith("+++ ") for line in lines)
    changes = sum(line[:1] in "+-" and bool(line) for line in lines)
    return (has_hunk or has_names) and changes > 0


def apply_patch(code: str, patch: str) -> str | None:
    """Return the code with a diff applied; None where it does not fit, or changes nothing."""
    lines = code.split("\n")
    shift = 0
    hunks = list(_hunks(patch))
    if not hunks or len(hunks) > MOST_HUNKS or len(lines) > MOST_LINES:
        return None
    old_lines = sum(len(hunk.old) for hunk in hunks)
    if old_lines > MOST_OLD_LINES or old_lines * len(lines) > MOST_COMPARED:
        return None
    bare = [line.rstrip() for line in lines]
    for hunk in hunks:
        position = _line_of(bare, hunk, hunk.line - 1 + shift)
        if position is None:
            return None
        lines[position : position + len(hunk.old)] = hunk.new
        bare[position : position + len(hunk.old)] = [line.rstrip() for line in hunk.new]
        shift += len(hunk.new) - len(hunk.old)
    patched = "\n".join(lines)
    return patched if patched != code else None


def _hunks(patch: str) -> Iterator[Hunk]:
    """Yield the hunks; lines before the first header belong to one without a place."""
    line, old, new = 1, list[str](), list[str]()
    is_changed = False
    for text in patch.strip("\n").split("\n"):
        match = _HUNK.match(text)
        if match is not None or text.startswith(_HEADERS):
            if is_changed:
                yield Hunk(line=line, old=tuple(old), new=tuple(new))
            line, old, new, is_changed = int(match[1] or 1) if match else line, [], [], False
            continue
        sign, content = text[:1], text[1:]
        if sign not in ("+", "-"):
            content = content if sign == " " else text
        else:
            is_changed = True
        if sign != "+":
            old.append(content)
        if sign != "-":
            new.append(content)
    if is_changed:
        yield Hunk(line=line, old=tuple(old), new=tuple(new))


def _line_of(bare: list[str], hunk: Hunk, expected: int) -> int | None:
    """Return where a hunk's lines are, the nearest to where it says; blanks at the ends of lines do not count."""
    if not hunk.old:
        return min(max(expected, 0), len(bare)) if len(bare) > 1 or bare == [""] else None
    old = [line.rstrip() for line in hunk.old]
    first = old[0]
    matches = [index for index, line in enumerate(bare) if line == first and bare[index : index + len(old)] == old]
    return min(matches, key=lambda index: abs(index - expected), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extracted:
    """Hold the program of an answer, or empty, and then the reason for a human."""

    code: str = ""
    why_not: str = ""


_NO_PROGRAM = Extracted(why_not="the answer is JSON without a program")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Hold a fenced block: the first word of its info string in lower case, its text, whether it was closed."""

    tag: str
    text: str
    is_closed: bool


def extract_code(reply: str, *, language: str, code: str) -> Extracted:
    """Return the program that `reply` offers in the place of `code`."""
    return _extract(reply[:MOST_REPLY_CHARS], language_named(language).name, code, 0)


def _extract(reply: str, language: str, code: str, depth: int) -> Extracted:
    text = _without_thinking(_plain(reply)).strip("\n")
    if not text.strip():
        return Extracted(why_not="the answer is empty")
    if depth < MOST_DEPTH and (inner := _unwrapped(text)) is not None:
        return _extract(inner, language, code, depth + 1) if inner else _NO_PROGRAM
    blocks = [block for block in fenced_blocks(text) if block.text.strip()]
    if not blocks:
        return _unfenced(text, code, depth)
    if (extracted := _best_of(blocks, language, code)) is not None:
        return _checked(extracted)
    if depth < MOST_DEPTH:
        for block in blocks:
            if block.tag in DATA and (inner := _unwrapped(block.text)):
                return _extract(inner, language, code, depth + 1)
    tags = ", ".join(dict.fromkeys(block.tag for block in blocks if block.tag))
    return Extracted(why_not=f"no block of the answer is {language}" + (f" (they are: {tags[:80]})" if tags else ""))


def _plain(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n").removeprefix("\ufeff")


def _without_thinking(text: str) -> str:
    """Return the text after the thinking; empty if it never ends."""
    while (match := _THOUGHT.match(text)) is not None:
        text = text[match.end() :]
    if _OPEN_THOUGHT.match(text):
        return ""
    before_fence = re.split(r"^[ \t]*(?:`{3,}|~{3,})", text, maxsplit=1, flags=re.MULTILINE)[0]
    if _END_OF_THOUGHT.match(before_fence):  # some templates leave out where it began
        text = _END_OF_THOUGHT.sub("", text, count=1)
    return text


def _unwrapped(text: str) -> str | None:
    """Return the program under one of the usual names in JSON, empty without one; None for text that is not JSON."""
    stripped = text.strip()
    if not stripped.startswith(("{", '"', "[")):
        return None
    try:
        return _program_of(json.loads(stripped), 0) or ""
    except RecursionError:
        return ""
    except ValueError:
        return None


def _program_of(value: object, depth: int) -> str | None:
    if isinstance(value, str):
        return value
    if depth > MOST_DEPTH:
        return None
    if isinstance(value, list):
        return _program_of(value[0], depth + 1) if len(value) == 1 else None
    if isinstance(value, Mapping):
        for name in NAMES:
            if name in value and (program := _program_of(value[name], depth + 1)):
                return program
    return None


def fenced_blocks(text: str) -> Iterator[Block]:
    """Yield the fenced blocks of a text, of ticks or tildes; one that is never closed ends with the text.

    A fence with an info string inside of a block of the same fence opens a nested one, which belongs to the block's
    text; so does a bare one inside of a string over several lines.
    """
    page = _Lines(text)
    index = 0
    for start, fence in page.fences.items():
        if start < index:
            continue
        end = page.end_of(start, fence)
        body = _dedented(page.lines[start + 1 : end], page.lines[start])
        yield Block(tag=_tag(fence["info"]), text="\n".join(body) + "\n", is_closed=end < len(page.lines))
        index = end + 1


class _Lines:
    """Hold an answer's lines, its fences by line, and how many marks of long strings come before each line."""

    def __init__(self, text: str):
        self.lines = text.split("\n")
        matches = (
            (index, _FENCE.fullmatch(line)) for index, line in enumerate(self.lines) if len(line) <= MOST_FENCE_CHARS
        )
        self.fences = dict(islice(((index, match) for index, match in matches if match is not None), MOST_FENCES))
        lines = [(index in self.fences, line) for index, line in enumerate(self.lines)]
        self._before = {
            mark: list(accumulate((0 if fenced else line.count(mark) for fenced, line in lines), initial=0))
            for mark in _LONG_STRINGS
        }  # fmt: skip

    def end_of(self, start: int, fence: re.Match[str]) -> int:
        """Return the number of the line that closes a block, that after the last when none does."""
        nested, marks, tag = 0, fence["marks"], _tag(fence["info"])
        first_bare = None
        for index, other in self.fences.items():
            if index <= start or other["marks"][0] != marks[0] or len(other["marks"]) < len(marks):
                continue
            if other["info"].strip():
                nested += 1
            elif nested:
                nested -= 1
                first_bare = index if first_bare is None else first_bare
            elif self._is_inside_string(start + 1, index, tag):
                first_bare = index if first_bare is None else first_bare
            else:
                return index
        return len(self.lines) if first_bare is None else first_bare

    def _is_inside_string(self, start: int, end: int, tag: str) -> bool:
        """Tell whether a block so far ends inside of a string over several lines, as far as counting tells."""
        return any(
            (before[end] - before[start]) % 2 == 1
            for mark, before in self._before.items()
            if tag in _LONG_STRINGS[mark]
        )


def _tag(info: str) -> str:
    match = _WORD.search(info)
    return match.group().lower() if match else ""


def _dedented(lines: list[str], fence: str) -> list[str]:
    """Remove the indent of the fence itself, in a list for example."""
    indent = len(fence) - len(fence.lstrip())
    if not indent or any(line.strip() and not line[:indent].isspace() for line in lines):
        return lines
    return [line[indent:] for line in lines]


def _best_of(blocks: list[Block], language: str, code: str) -> str | None:
    """Return the program among the blocks: the longest of the language, else untagged, else a diff, applied."""
    ours = [block.text for block in blocks if _is_of(block.tag, language)]
    bare = [block.text for block in blocks if not block.tag]
    patches = [block.text for block in blocks if block.tag in PATCHES]
    patches += [text for text in (*ours, *bare) if looks_like_patch(text)]
    for texts in (ours, bare):
        programs = [text for text in texts if not looks_like_patch(text)]
        changed = [text for text in programs if text.strip() != code.strip()]
        if changed:
            return max(reversed(changed), key=len)
    for patch in patches[:MOST_PATCHES]:
        if (patched := apply_patch(code, patch)) is not None:
            return patched
    return code if ours or (bare and not patches) else None


def _is_of(tag: str, language: str) -> bool:
    if not tag:
        return False
    try:
        return language_named(tag.removeprefix("{").removeprefix(".").split(".")[0]).name == language
    except InvalidRequest:
        return tag in _MORE_TAGS.get(language, ())


# Tags of code blocks beyond the names and aliases of `core/languages.py`.
_MORE_TAGS: Mapping[str, tuple[str, ...]] = {
    "python": ("py3", "python2", "ipython", "pycon"),
    "javascript": ("mjs", "cjs", "jsx"),
    "typescript": ("mts",),
    "bash": ("zsh", "shellscript"),
}


def _unfenced(text: str, code: str, depth: int) -> Extracted:
    """Read an answer without blocks: a diff, a bare program, or prose, which is nothing."""
    if looks_like_patch(text):
        patched = apply_patch(code, text)
        return _checked(patched) if patched is not None else Extracted(why_not="the diff does not fit the program")
    lines = text.split("\n")
    code_lines = [index for index, line in enumerate(lines) if line.strip() and _is_code_like(line)]
    if not code_lines:
        return Extracted(why_not="the answer holds no code")
    candidate = lines[code_lines[0] : code_lines[-1] + 1]
    filled = [line for line in candidate if line.strip()]
    all_filled = [line for line in lines if line.strip()]
    is_whole_answer = depth > 0 or 2 * len(filled) >= len(all_filled)
    if not is_whole_answer or 10 * len(code_lines) < 6 * len(filled):
        return Extracted(why_not="the answer is prose, not code")
    return _checked("\n".join(candidate) + "\n")


def _is_code_like(line: str) -> bool:
    head = line[:MOST_LINE_CHARS]
    return bool(_CODE_LIKE.search(head)) and not _SENTENCE.fullmatch(line.strip()[-MOST_LINE_CHARS:])


def _checked(code: str) -> Extracted:
    """Refuse text that cannot be a whole program."""
    if len(code) > MOST_CODE_CHARS:
        return Extracted(why_not=f"the program has {len(code)} characters; at most {MOST_CODE_CHARS} are taken")
    if "\0" in code:
        return Extracted(why_not="the program holds NUL characters")
    if not any(line.strip() and not _COMMENT.match(line) for line in code.split("\n")):
        return Extracted(why_not="the program is empty")
    for line in map(str.strip, code.split("\n")):
        if len(line) <= MOST_ELISION_CHARS and line[:1] in _ELISION_BEGINS and _ELISION.fullmatch(line):
            return Extracted(why_not=f"the program leaves out parts: {line[:80]}")
    return Extracted(code=code)
