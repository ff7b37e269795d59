"""Functions of cells in other processes: the result, or at once why not, with the state kept."""

from __future__ import annotations

import pytest

from cloche.sync import Session

pytestmark = [pytest.mark.user_soak, pytest.mark.usefixtures("settings_of_nobody")]

BEGIN = """\
import multiprocessing, concurrent.futures
def twice(x): return 2 * x
class Point:
    def __repr__(self): return 'Point()'
context = multiprocessing.get_context({method!r})
"""
WAYS = {
    "pool": "with context.Pool(1) as pool:\n    found = pool.map({function}, [{argument}])",
    "executor": "with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:\n"
    "    found = list(pool.map({function}, [{argument}]))",
    "process": "queue = context.SimpleQueue()\nprocess = context.Process(target={function}, args=({argument},))\n"
    "process.start()\nprocess.join()\nfound = [6] if not process.exitcode else []",
}


def ran(session: Session, way: str, function: str, argument: str) -> str:
    """Run a function in another process, and return the error's message, if there is one."""
    code = WAYS[way].format(function=function, argument=argument)
    result = session.run(f"{code}\nfound", timeout=20)
    assert result.meta["state"] == "kept"
    if result.ok:
        assert result.value == [6]
        return ""
    assert (result.status, result.meta["error"]["name"]) == ("error", "PicklingError")
    return str(result.meta["error"]["message"])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_function_of_a_cell_that_cannot_reach_a_process_is_said_at_once(
    session: Session, method: str, way: str
) -> None:
    """And what to do instead, which works: fork, or a module file; a class in an argument is the same."""
    assert session.run(BEGIN.format(method=method)).ok
    for function, argument, name in (("twice", "3", "twice"), ("repr", "Point()", "Point")):
        why = ran(session, way, function, argument)
        assert why.startswith(f"{name} was defined in a cell")
        assert "get_context('fork')" in why
        assert f"write {name} to a module file" in why
    session.sandbox.write_file("written.py", b"def twice(x): return 2 * x\n")
    assert session.run("import written").ok
    assert ran(session, way, "written.twice", "3") == ""
    assert session.run("context = multiprocessing.get_context('fork')").ok
    assert ran(session, way, "twice", "3") == ""


def test_a_pool_that_was_forked_is_none_that_was_spawned(session: Session) -> None:
    """Each takes what it can, beside the other."""
    assert session.run(BEGIN.format(method="spawn")).ok
    code = "spawned, forked = context.Pool(1), multiprocessing.get_context('fork').Pool(1)\nforked.map(twice, [3])"
    assert session.run(code, timeout=20).value == [6]
    assert session.run("spawned.map(twice, [3])", timeout=20).meta["error"]["name"] == "PicklingError"
    assert session.run("forked.map(twice, [3]) + spawned.map(abs, [-6])", timeout=20).value == [6, 6]
    assert session.run("for one in (spawned, forked): one.terminate()").ok
