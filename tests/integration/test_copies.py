"""What Cloche returns and raises can be copied, and comes out of a process that a caller started for it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import cloche
import cloche.core.errors as errors

pytestmark = pytest.mark.usefixtures("settings_of_nobody")
COPIES: list[Callable[[Any], Any]] = [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))]


@pytest.mark.parametrize("made_again", COPIES, ids=["copied", "pickled"])
def test_a_result_with_all_that_is_in_it(made_again: Callable[[Any], Any]) -> None:
    """It is equal to the first one, and what nobody could change of that, nobody can change of it."""
    code = "open('made', 'w').write('1'); import socket; socket.socket().connect(('192.0.2.1', 80))"
    result = cloche.run(code, timeout=60)
    again = made_again(result)
    assert (again, again.as_dict()) == (result, result.as_dict())
    with pytest.raises(TypeError):
        again.enforcement.controls["network"] = None


def _kinds(kind: type[errors.ClocheError]) -> Iterator[type[errors.ClocheError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _kinds(below)


@pytest.mark.parametrize("made_again", [*COPIES, copy.copy], ids=["copied", "pickled", "shallow"])
def test_every_error_with_its_attributes(made_again: Callable[[Any], Any]) -> None:
    """A pool of processes waits for ever for an error that cannot be made again."""
    given: dict[str, Any] = {"path": "/workspace/a", "kind": "full", "step": "mount", "errno": 28, "remedy": "more"}
    seen = set()
    for kind in _kinds(errors.ClocheError):
        if kind.__module__ == errors.__name__:
            takes = getattr(getattr(kind.__init__, "__code__", None), "co_varnames", ())
            error = kind("why", **{name: value for name, value in given.items() if name in takes})
            again = made_again(error)
            assert (type(again), str(again), vars(again)) == (kind, str(error), vars(error))
            seen.add(kind)
    assert {errors.SandboxFileNotFound, errors.StartFailed, errors.BackendUnavailable} <= seen
