"""Sessions in containers, decided and bounded without one: programs, streams, frames."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, cast, get_args, get_type_hints

import pytest

from cloche.backends.containers.container import ENDED, OUT, Container
from cloche.backends.containers.inside import link
from cloche.backends.containers.program import ANSWERS, LINK, python_session
from cloche.backends.containers.run import Outputs
from cloche.backends.containers.session import FROM_SESSION, ContainerTransport, SessionOwner
from cloche.backends.docker.images import DockerImage
from cloche.backends.docker.sandbox import build_session_program
from cloche.backends.session import MAX_RECEIVED_BYTES
from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.events import OutputChunk, discard
from cloche.core.frames import MAX_FRAMES, encode
from cloche.core.languages import language_named
from cloche.core.limits import Limits
from cloche.core.result import Observed
from cloche.execution.registry import OPTIONS, row_of

LIMITS = Limits(output_bytes=1000)


def image(**versions: str) -> DockerImage:
    """Return an image that holds these programs."""
    programs = {name: f"/bin/{name}" for name in versions}
    return DockerImage(
        name="some", id="1", env={"FROM": "image", "HOME": "/root"}, programs=programs, versions=versions
    )


ALL = image(python3="Python 3.12.1", node="v22.1.0", bash="GNU bash, version 5.2")


def test_python_is_forked_and_others_are_driven() -> None:
    """The first process becomes Python's interpreter; any other is started with its driver and its link."""
    python = build_session_program("python", {"A": "b"}, ALL)
    assert (python.commands, python.generated, python.env["A"], python.env["HOME"]) == ((), {}, "b", "/workspace")
    for language, program in (("javascript", "node"), ("bash", "bash")):
        session = build_session_program(language, {}, ALL)
        (command,), (path,) = session.commands, session.generated
        assert (command[0], command[-3:]) == (f"/bin/{program}", (path, str(LINK), str(ANSWERS)))
        assert session.python is None
        assert json.loads(json.dumps(session.order(LIMITS)))["generated"][path]


@pytest.mark.parametrize(
    ("language", "holds", "lacking"),
    [
        ("python", image(python3="Python 3.10.2"), "no Python 3.11"),
        ("javascript", image(node="v22"), "no Python 3.11"),
        ("javascript", image(python3="Python 3.12"), "no node"),
        ("bash", image(python3="Python 3.12", sh=""), "no bash"),
    ],
)
def test_an_image_that_cannot_hold_one_is_refused(language: str, holds: DockerImage, lacking: str) -> None:
    """The error names what is missing and how to name another image."""
    with pytest.raises(BackendUnavailable, match=rf"{lacking}.*CLOCHE_IMAGE_{language.upper()}"):
        build_session_program(language, {}, holds)


def test_variables_that_come_too_late_are_refused() -> None:
    """The interpreter that is forked has read its own already."""
    with pytest.raises(InvalidRequest, match="PYTHON"):
        build_session_program("python", {"PYTHONPATH": "/x"}, ALL)
    with pytest.raises(BackendUnavailable, match="no sessions of go"):
        build_session_program("go", {}, ALL)


def test_whatever_auto_may_choose_has_sessions() -> None:
    """A choice that was made before a session was wanted is never wrong by its kind."""
    import importlib
    import inspect

    for option in OPTIONS:
        module, _, name = str(row_of(option.backend).provider).partition(":")
        opening: Any = getattr(importlib.import_module(module), name).open
        opened, *_ = get_args(get_type_hints(inspect.unwrap(opening))["return"])
        assert callable(getattr(opened, "open_session", None)), option


def test_words_between_pieces_are_heard_after_them() -> None:
    """A signal that crosses a file on its way in is neither taken for a piece of it nor lost."""
    caller = link.CallerLink()
    for tag, body in ((b"D", b"one"), (b"W", b"word"), (b"L", b"cell"), (b"D", b"two"), (b"D", b""), (b"O", b"order")):
        caller.buffer += tag + len(body).to_bytes(4, "big") + body
    incoming = link.IncomingData(caller)
    assert incoming.read(6) == b"onetwo"
    incoming.drain()
    assert [caller.next() for _ in range(4)] == [(b"W", b"word"), (b"L", b"cell"), (b"O", b"order"), None]


def test_output_is_bounded_and_begins_anew() -> None:
    """Beyond a flood nothing is handed on; the end of what came between two runs is the next one's, uncounted."""
    posted: list[tuple[Callable[..., object], tuple[object, ...]]] = []
    flooded: list[bool] = []
    outputs = Outputs(LIMITS, discard, lambda call, *rest: posted.append((call, rest)), lambda: flooded.append(True))
    outputs.take("stdout", b"between")
    heard: list[OutputChunk] = []
    outputs.hand_on_to(cast("Callable[[Any], None]", heard.append))
    outputs.take("stdout", b" and in")
    for call, rest in posted:
        call(*rest)
    assert b"".join(chunk.data for chunk in heard) == b"between and in" == outputs.kept_bytes("stdout")
    outputs.take("stderr", bytes(LIMITS.flood_bytes + 1))
    outputs.take("stderr", b"more")
    assert (outputs.is_truncated, len(outputs.kept_bytes("stderr")) < 2000) == (True, True)
    assert sum(call.__name__ == "<lambda>" for call, _ in posted) == 1
    outputs.renew()
    outputs.take("stdout", b"new")
    assert (outputs.kept_bytes("stdout"), outputs.kept_bytes("stderr"), outputs.is_truncated) == (b"new", b"", False)
    outputs.take("stdout", bytes(LIMITS.output_bytes - 3) + b"end")
    outputs.hand_on_to(discard)
    outputs.take("stdout", b"own")
    note, _, kept = outputs.kept_bytes("stdout").partition(b"\n")
    assert (note, outputs.is_truncated) == (b"[cloche: 3 bytes left out]", True)
    assert kept == bytes(LIMITS.output_bytes - 3) + b"endown"


async def heard_of(*frames: tuple[bytes, bytes]) -> tuple[ContainerTransport, list[bool]]:
    """Return what hears these frames of a container, and its floods, once all are heard."""
    floods: list[bool] = []
    program = python_session(language_named("python"), {})
    transport = ContainerTransport(cast("SessionOwner", None), cast("Container[Any]", None), program, LIMITS)
    transport.on_flood = lambda: floods.append(True)
    for tag, body in frames:
        transport.receive(tag, body)
    for _ in range(3 + len(frames)):  # a turn of the loop takes what its slice of time lets it
        await asyncio.sleep(0)
    return transport, floods


def test_a_session_is_heard_in_order() -> None:
    """What was printed is there when the answer is; the report ends it."""

    async def scenario() -> None:
        word = encode({"op": "ready", "runtime": "some"})
        report = {"wait_status": 0, "cause": "", "wall_s": 0.1}
        transport, _ = await heard_of((OUT, b"printed"), (FROM_SESSION, word[:3]), (FROM_SESSION, word[3:]))
        assert (transport.collect().stdout, transport.link.ready.result()["runtime"]) == (b"printed", "some")
        assert not transport._end.done()
        transport.receive(ENDED, json.dumps(report).encode())
        await transport._end
        assert transport.known_end() == Observed(exit_code=0)
        assert transport.link.lost.result() == "the interpreter has ended"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("frames", "why", "is_flood"),
    [
        ([b""], "closed its link", False),
        ([b"\xff" * 100], "is longer than", True),
        ([b"\0\0\0\2[]"], "an invalid message", False),
        (
            [encode({"op": "x", "a": "y" * 9_000_000})] * (MAX_RECEIVED_BYTES // 9_000_000 + 3),
            "more than is read",
            True,
        ),
        ([encode({"op": "x"}) * (MAX_FRAMES + 1)], "more than is read", True),
    ],
)
def test_what_a_guest_says_is_bounded(frames: list[bytes], why: str, *, is_flood: bool) -> None:
    """Nonsense, or too much of anything, ends the session."""

    async def scenario() -> None:
        transport, floods = await heard_of(*((FROM_SESSION, frame) for frame in frames))
        assert why in transport.link.lost.result()
        assert bool(floods) is is_flood
        assert not transport._end.done()  # which the first process alone can tell

    asyncio.run(scenario())


def test_a_container_that_is_gone_ends_the_session() -> None:
    """Without a report nothing is known of how."""

    async def scenario() -> None:
        transport, _ = await heard_of((OUT, b"last"))
        transport.lose()
        await transport._end
        assert (transport._report, transport.collect().stdout) == (None, b"last")

    asyncio.run(scenario())
