"""Induced faults, with control groups and with rlimits only, each twice; the soak repeats them."""

from __future__ import annotations

import asyncio

import pytest

from tests.harness.faults import GUEST_FAULTS, OUR_FAULTS, fail, induce
from tests.harness.leaks import Snapshot, wait_for_leftovers

pytestmark = pytest.mark.both_users

# The ordinary user after root has no control groups.
MODES = pytest.mark.parametrize("use_cgroups", [pytest.param(True, id="cgroups"), pytest.param(False, id="rlimits")])


@MODES
@pytest.mark.parametrize("name", GUEST_FAULTS)
def test_what_the_guest_does_is_a_status(name: str, use_cgroups: bool) -> None:
    """Each fault of the guest has its status and exit code, and no other."""
    fault = GUEST_FAULTS[name]
    for _ in range(2):
        status, exit_code, words = asyncio.run(induce(fault, use_cgroups=use_cgroups))
        assert (status, exit_code) == (fault.status, fault.exit_code), words


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
