"""What a cell leaves behind is its own: no later cell answers for it, and its session outlives it."""

from __future__ import annotations

import asyncio

import pytest

import cloche

pytestmark = [pytest.mark.both_users, pytest.mark.usefixtures("settings_of_nobody")]

FOR_EVER = "import time\nprint('up', flush=True)\nwhile True: time.sleep(0.01)"
CHANGING = """\
import sys
kept = [0]
def change(frame, event, _):
    if event == "return" and frame.f_code.co_name == "as_json":
        kept[0] = object()
sys.setprofile(change)
kept
"""


def test_what_a_cell_said_that_is_cancelled_twice_is_not_the_next_one_s() -> None:
    """Who is cancelled once more while the cell is being interrupted leaves nothing of its output behind."""

    async def scenario() -> None:
        async with cloche.AsyncSandbox(live=False) as sandbox:
            session = await sandbox.session()
            begun = asyncio.Event()
            running = asyncio.ensure_future(session.run(FOR_EVER, on_output=lambda *_: begun.set()))
            await asyncio.wait_for(begun.wait(), 60)
            for _ in range(3):
                running.cancel()
                await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await running
            after = await session.run("print('mine')")
            assert (after.stdout, after.stderr) == ("mine\n", "")

    asyncio.run(scenario())


def test_a_value_that_changes_while_it_is_told_is_told_as_it_was() -> None:
    """A program's thread, say, may change it into what cannot be told: that ends no session."""
    with cloche.Sandbox(live=False) as sandbox, sandbox.session() as session:
        assert session.run(CHANGING).value == [0]
        assert session.run("sys.setprofile(None)\nlen(kept)").value == 1
