"""The answer to a model's call: bounded output, how the run ended, hints, figures, and where the full output is."""

from __future__ import annotations

import ast
import base64
import json
import re
from collections.abc import Awaitable, Callable, Mapping

from cloche.core.limits import MIB, Limits, format_size
from cloche.core.record import dataclass
from cloche.core.result import Output, Result, Status, as_on_screen

MOST_CHARS = 8_000  # of a stream; a model reads the rest with read_file, if it must
# How each kind begins: a provider refuses a whole conversation for one figure that is none.
IMAGES: Mapping[str, bytes] = {
    "image/png": b"\x89PNG\r\n\x1a\n", "image/jpeg": b"\xff\xd8\xff", "image/gif": b"GIF8", "image/webp": b"RIFF",
}  # fmt: skip
TEXTS = ("text/plain", "text/markdown", "text/latex")
MOST_IMAGES = 8
MOST_IMAGE_BYTES = 3_750_000  # 5 MB as base64, which providers take at most
MOST_IMAGES_BYTES = 8 * MIB  # of one call

_STATUS_TEXTS: Mapping[Status, Callable[[Result, Limits], str]] = {
    Status.TIMEOUT: lambda result, limits: f"{_ended(result)} after {limits.timeout_s:g} s",
    Status.OUT_OF_MEMORY: lambda result, limits: (
        f"Killed: it used more than {limits.memory_bytes // MIB} MiB of memory"
        f"{', with what earlier calls had left there' if 'state' in result.meta else ''}; work on less data at once."
    ),
    Status.OUTPUT_LIMIT: lambda result, limits: (
        f"{_ended(result)}: it {'showed' if 'refused' in result.meta else 'printed'} more than "
        f"{'is read of one run' if 'refused' in result.meta else f'{limits.flood_bytes // MIB} MiB'}; "
        "print a summary, or write to a file."
    ),
    Status.PIDS_LIMIT: lambda _, limits: f"It wanted more than {limits.pids} processes and threads; use fewer.",
    Status.DISK_LIMIT: lambda _, limits: (
        f"The workspace is full ({limits.disk_bytes // MIB} MiB); delete files, or write less."
    ),
    Status.SIGNALED: lambda result, _: f"It was ended by signal {result.exit_code - 128}.",
    Status.DENIED: lambda _, __: "The rules of this sandbox do not allow what it tried; do it in another way.",
}
_LOST = (
    "The interpreter ended with it, and what earlier calls defined is gone; files are still there. The next call "
    "begins in a new one."
)
_STATE_KEPT = "The interpreter goes on, with the definitions of earlier calls."
_PARTIAL = "Files may be missing from the result; write fewer, or one archive."
_NO_NETWORK = "There is no network here; use files of the workspace."
MOST_REFUSALS = 3  # of the network, that are told
# Hints for error messages whose cause is the sandbox.
_HINTS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), hint)
    for pattern, hint in (
        (r"ModuleNotFoundError|Cannot find module", "Packages cannot be installed here; use what is there."),
        (
            r"Network is unreachable|Name or service not known|Temporary failure in name resolution|getaddrinfo",
            _NO_NETWORK,
        ),
        (r"MemoryError|Cannot allocate memory", "There was no more memory; work on less data at once."),
        (r"Read-only file system", "Only the workspace and /tmp can be written to."),
        (r"EOFError: EOF when reading a line", "Nobody can answer questions; take values from the code or from files."),
    )
)
NONE, NEW, KEPT, LOST = "none", "new", "kept", "lost"
SaveOutput = Callable[
    [str, str], Awaitable[str]
]  # a stream's name and text; returns the path where all of it is, if so


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """Hold a figure: its MIME type, and its bytes as base64."""

    mime: str
    base64: str


def clip(text: str, *, where: str = "", is_whole: bool = True, most: int = MOST_CHARS) -> str:
    """Return text of at most about `most` characters: head, the number of characters left out and their place, tail.

    `is_whole` says that `text` is complete.
    """
    if len(text) <= most:
        return text
    half = most // 2
    missing = len(text) - 2 * half
    source = f"; {'the full text' if is_whole else 'more of it, not all,'} is in {where}" if where else ""
    return f"{text[:half]}\n[… {missing} characters left out{source} …]\n{text[-half:]}"


def what_happened(result: Result, limits: Limits, *, most_s: float = 0.0) -> str:
    """Say how a run ended, which output may be missing, and the next step; empty for a plain success.

    `most_s` is the longest time-out that the model may request, if any.
    """
    status = result.status or Status.OK
    status_text = _STATUS_TEXTS.get(status)
    sentences = [status_text(result, limits)] if status_text else []
    if status is Status.TIMEOUT:
        is_most = limits.timeout_s >= most_s
        sentences[0] += "; split the work: there is no more time." if is_most else "; split the work or raise timeout."
    if status is Status.ERROR:
        sentences.append(f"It ended with exit code {result.exit_code}.")
    refused = result.network_refused
    if status is not Status.OK:
        sentences += [row["why"][:1].upper() + row["why"][1:] + "." for row in refused[:MOST_REFUSALS]]
        hints = [hint for pattern, hint in _HINTS if pattern.search(result.stderr)]
        sentences += [hint for hint in hints if hint is not _NO_NETWORK or "network" not in result.meta]
    if status is Status.ERROR and "advice" in result.meta:
        sentences.append(f"{result.meta['advice'][:1].upper()}{result.meta['advice'][1:]}.")
    if result.meta.get("state") == "lost":
        sentences.append(_LOST)
    elif status_text and _is_kept(result):
        sentences.append(_STATE_KEPT)
    if result.meta.get("files_partial"):
        sentences.append(_PARTIAL)
    return " ".join(sentences)


def python_text(result: Result, limits: Limits, *, most_s: float = 0.0) -> str:
    """Return a program's output, or `Error (exit_code=N):`, its standard error and the next step (R6).

    `most_s` is as for `what_happened`.
    """
    if result.ok:
        return clip(as_on_screen(result.stdout))
    happened = what_happened(result, limits, most_s=most_s)
    return f"Error (exit_code={result.exit_code}): {clip(as_on_screen(result.stderr))}\n{happened}".rstrip()


def _is_kept(result: Result) -> bool:
    return result.meta.get("state") == "kept"


def _ended(result: Result) -> str:
    """Say how a run over its limit was ended: a session's cell is interrupted, another run is killed."""
    return "Interrupted" if _is_kept(result) else "Killed"


def images_of(result: Result) -> tuple[tuple[Image, ...], int]:
    """Return the figures of a run, the first few that fit, and how many were left out."""
    images: list[Image] = []
    left_out, bytes_left = 0, MOST_IMAGES_BYTES
    for output in result.outputs:
        figure = next(((mime, output.data[mime]) for mime in IMAGES if mime in output.data), None)
        if figure is None:
            continue
        mime, content = figure
        if isinstance(content, bytes) and len(images) < MOST_IMAGES and _fits(mime, content, bytes_left):
            bytes_left -= len(content)
            images.append(Image(mime=mime, base64=base64.b64encode(content).decode("ascii")))
        else:
            left_out += 1
    return tuple(images), left_out


def _fits(mime: str, content: bytes, bytes_left: int) -> bool:
    return content.startswith(IMAGES[mime]) and len(content) <= min(bytes_left, MOST_IMAGE_BYTES)


def displayed_text(result: Result) -> str:
    """Return a run's displayed outputs as text, without figures and the repr of its value; empty without outputs."""
    texts, chars_left = list[str](), 2 * MOST_CHARS
    for index, output in enumerate(result.outputs):
        text = "" if any(mime in output.data for mime in IMAGES) else _text_of(output)
        is_value = index == len(result.outputs) - 1 and result.value is not None and _means(text, result)
        if text and not is_value and chars_left > 0:
            texts.append(text)
            chars_left -= len(text)
    return clip("\n".join(texts))


def _text_of(output: Output) -> str:
    """Return the text that an output offers, else which formats it has."""
    text = next((output.data[mime] for mime in TEXTS if mime in output.data), None)
    if isinstance(text, str):
        return text
    return "\n".join(f"[{mime}, {format_size(len(content))}]" for mime, content in output.data.items())


def _means(text: str, result: Result) -> bool:
    """Tell whether a text is the repr of a value; of a long one only the beginning is read."""
    if result.value_is_repr:
        return bool(text == result.value)
    if len(text) > MOST_CHARS:
        beginnings = [
            "".join(candidate[:MOST_CHARS].split())[: MOST_CHARS // 8] for candidate in (text, repr(result.value))
        ]
        return beginnings[0] == beginnings[1]
    try:
        return bool(ast.literal_eval(text) == result.value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # TypeError: of `{[]}`
        return False


def value_text(result: Result) -> str:
    """Return the value of the last expression as text, empty for none."""
    if result.value is None:
        return ""
    if result.value_is_repr or isinstance(result.value, str):
        return str(result.value)
    return json.dumps(result.value, ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """Hold the outcome of one call. `note` is for the model.

    `state` is `none` where no interpreter is kept; else the call began in a `new` interpreter, went on in a `kept` one,
    or ended it: `lost`.
    """

    result: Result
    state: str = NONE
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Hold the answer to one call of a model: text of bounded length, and figures.

    `is_error` says that the call failed. `result` is the run's, for the program around the model, and `state` that of
    the interpreter, see `CallResult`; the text begins with the `note`, if there is one.
    """

    text: str
    images: tuple[Image, ...] = ()
    is_error: bool = False
    result: Result | None = None
    state: str = NONE
    note: str = ""


async def answer_of(ran: CallResult, limits: Limits, save_output: SaveOutput, *, most_s: float) -> Answer:
    """Return the answer for a run; `save_output` stores output above the bound.

    `most_s` is the longest time-out that the model could have requested.
    """
    result = ran.result
    sections = [ran.note] if ran.note else []
    is_silent = True
    for stream, text in (("stdout", result.stdout), ("stderr", result.stderr)):
        where = await save_output(stream, text)
        if text.strip():
            label = "" if stream == "stdout" else "[stderr]\n"
            shown = as_on_screen(text).rstrip("\n")
            sections.append(label + clip(shown, where=where, is_whole=not result.truncated))
            is_silent = False
    for text in (displayed_text(result), _value(result), what_happened(result, limits, most_s=most_s)):
        if text:
            sections.append(text)
            is_silent = False
    images, left_out = images_of(result)
    if left_out:
        sections.append(f"Figures left out: {left_out}. Show up to {MOST_IMAGES} small ones of a usual format.")
    elif is_silent:
        sections.append("It showed a figure." if images else "It ended well, and printed nothing.")
    return Answer(
        text="\n".join(sections), images=images, is_error=not result.ok, result=result, state=ran.state, note=ran.note
    )


def _value(result: Result) -> str:
    value = value_text(result)
    return f"[value]\n{clip(value)}" if value else ""
