"""Sessions in containers, decided and bounded without one: programs, streams, frames."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest

from cloche.backends.containers.inside import link
from cloche.backends.containers.program import ANSWERS, LINK
from cloche.backends.docker.images import DockerImage
from cloche.backends.docker.sandbox import build_session_program
from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.limits import Limits
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
        assert [path_of_file for path_of_file, *_ in session.order({})["files"]] == [path]


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
    """A kill that crosses a file on its way in is neither taken for a piece of it nor lost."""
    caller = link.CallerLink()
    for tag, body in ((b"D", b"one"), (b"K", b""), (b"D", b"two"), (b"D", b""), (b"O", b"order")):
        caller.buffer += tag + len(body).to_bytes(4, "big") + body
    incoming = link.IncomingData(caller)
    assert incoming.read(6) == b"onetwo"
    incoming.drain()
    assert [caller.next() for _ in range(3)] == [(b"K", b""), (b"O", b"order"), None]
