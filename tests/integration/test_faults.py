"""Induced faults, with control groups and with rlimits only, ours each twice; the soak repeats them."""

from __future__ import annotations

import asyncio

import pytest

from cloche.backends.local.backend import LocalBackend
from cloche.core.enforcement import Level
from cloche.core.limits import MIB
from cloche.core.result import Status
from cloche.testing.conformance.subject import Subject, python
from tests.harness.faults import OUR_FAULTS, fail
from tests.harness.leaks import Snapshot, wait_for_leftovers

pytestmark = pytest.mark.user_soak

# The ordinary user after root has no control groups.
MODES = pytest.mark.parametrize("use_cgroups", [pytest.param(True, id="cgroups"), pytest.param(False, id="rlimits")])


FILLS = """
for number in range(64):
    with open(f"fill{number}", "wb", 0) as file:
        file.write(bytes(1 << 20))
        file.write(b"x")
"""


@MODES
def test_a_program_that_finds_no_room_ends_by_itself(use_cgroups: bool) -> None:
    """In a jail a workspace is a mount of its own: what overfills it is told so, and has its own exit code."""
    subject = Subject(backend=LocalBackend(use_cgroups=use_cgroups)).at(Level.JAIL)
    result = asyncio.run(subject.run(python(FILLS), disk_bytes=8 * MIB))
    assert (result.status, result.exit_code) == (Status.DISK_LIMIT, 1), result.stderr


@MODES
@pytest.mark.parametrize("name", OUR_FAULTS)
def test_what_we_cannot_do_is_an_exception(name: str, use_cgroups: bool) -> None:
    """Each fault of ours raises what says whether the code may have run, and leaves nothing behind."""
    _, wanted = OUR_FAULTS[name]
    before = Snapshot.take()
    for _ in range(2):
        raised = asyncio.run(fail(name, use_cgroups=use_cgroups))
        assert raised.startswith(f"{wanted.__name__}: "), raised
    left = wait_for_leftovers(before, patience_s=10)
    assert not left, "\n".join(left)


@pytest.mark.parametrize("warm", [False, True])
def test_a_sandbox_whose_helper_was_killed_says_so(warm: bool) -> None:
    """A later run in it is refused with what to do; it does not begin again with an empty workspace."""
    raised = asyncio.run(_run_after_loss(warm=warm))
    assert "open another sandbox" in str(raised)


async def _run_after_loss(*, warm: bool) -> BaseException:
    from cloche.core.enforcement import Level
    from cloche.core.errors import OutcomeUnknown, StartFailed
    from cloche.core.events import OutputChunk
    from cloche.core.request import Request
    from tests.harness.faults import _host, _kill_helper, _sandbox, _warm_sandbox

    host = _host(use_cgroups=True)
    sandbox = await _warm_sandbox(host) if warm else _sandbox(host, Level.JAIL)
    try:
        await sandbox.write_file("kept", b"x")
        begun = asyncio.Event()
        request = Request(code="print('up', flush=True); import time; time.sleep(60)")
        running = asyncio.ensure_future(
            sandbox.run_streaming(request, lambda event: begun.set() if isinstance(event, OutputChunk) else None)
        )
        await asyncio.wait_for(begun.wait(), 60)
        assert sandbox._connection is not None
        _kill_helper(sandbox._connection)
        with pytest.raises(OutcomeUnknown):
            await running
        with pytest.raises(StartFailed) as caught:
            await sandbox.run(Request(code="1"))
    finally:
        await sandbox.close()
    return caught.value
