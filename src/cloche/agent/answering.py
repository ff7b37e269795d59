"""What a model is told of one call: text of bounded length, figures, and where the rest of it is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from cloche.core.limits import Limits
from cloche.core.result import Result

from .live import NONE, Ran
from .wording import MOST_IMAGES, Image, clip, images_of, value_text, what_happened

Keep = Callable[[str, str], Awaitable[str]]  # a stream's name and text; returns the path where all of it is, if so


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Hold what a model is told of one call: text of bounded length, and figures.

    `is_error` says that the call did not do what was asked. `result` is the run's, for the program around the model,
    and `state` what became of the interpreter, see `live.Ran`; the text begins with the `note`, if there is one.
    """

    text: str
    images: tuple[Image, ...] = ()
    is_error: bool = False
    result: Result | None = None
    state: str = NONE
    note: str = ""


async def answer_of(ran: Ran, limits: Limits, keep: Keep, *, most_s: float) -> Answer:
    """Return what is told of a run; `keep` puts away what is too long for that.

    `most_s` is the longest time-out that could have been asked for.
    """
    result = ran.result
    parts = [ran.note] if ran.note else []
    is_silent = True
    for stream, text in (("stdout", result.stdout), ("stderr", result.stderr)):
        where = await keep(stream, text)
        if text.strip():
            label = "" if stream == "stdout" else "[stderr]\n"
            parts.append(label + clip(text.rstrip("\n"), where=where, is_whole=not result.truncated))
            is_silent = False
    for told in (_value(result), what_happened(result, limits, most_s=most_s)):
        if told:
            parts.append(told)
            is_silent = False
    images, left_out = images_of(result)
    if left_out:
        parts.append(f"Figures left out: {left_out}. Show up to {MOST_IMAGES} small ones of a usual format.")
    elif is_silent:
        parts.append("It showed a figure." if images else "It ended well, and printed nothing.")
    return Answer(
        text="\n".join(parts), images=images, is_error=not result.ok, result=result, state=ran.state, note=ran.note
    )


def _value(result: Result) -> str:
    value = value_text(result)
    return f"[value]\n{clip(value)}" if value else ""
