"""A backend over a fleet, with this machine as its only node: leases, the wire, and a node that is lost."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, ClassVar, cast

import pytest

from cloche.backends.cloche.leased import LeasedBackend
from cloche.cli import session
from cloche.cli.app import root
from cloche.core.errors import BackendUnavailable, InvalidRequest, NodeLost
from cloche.core.languages import LANGUAGES
from cloche.core.limits import Limits
from cloche.core.policy import BACKEND_ROWS, BackendRow, Policy
from cloche.core.record import replace
from cloche.core.request import Request
from cloche.core.result import Result, Status
from cloche.fleets import leases
from cloche.fleets.leases import Leases
from cloche.server.sandbox_fusion import CodeRequest, JupyterRequest
from cloche.server.sandbox_fusion_runs import run_cells, run_code
from cloche.wire.held import Terms, held_attachment, needs_worker, open_held, until_over
from tests.harness.fleets import LocalFleetBackend, node_pid

CLAIMED = Policy(accept_claimed=True)


@pytest.fixture(scope="module")
def backend() -> Iterator[LocalFleetBackend]:
    """Yield the backend; its fleet ends with the tests of this file."""
    backend = LocalFleetBackend()
    yield backend
    backend.leases.close()


async def _run(backend: LeasedBackend, code: str) -> Result:
    async with backend.open(CLAIMED, Limits()) as sandbox:
        sandbox.expect_single_run()
        return await sandbox.run(Request(code=code, language="python"))


def test_runs_one_after_the_other_have_one_place_and_say_where(backend: LocalFleetBackend) -> None:
    """Ten runs, from two event loops, are on one lease; the level is claimed by the node."""
    results = [asyncio.run(_run(backend, f"print({number})")) for number in range(2)]

    async def more() -> list[Result]:
        return [await _run(backend, f"print({number})") for number in range(2, 10)]

    results += asyncio.run(more())
    assert [result.stdout for result in results] == [f"{number}\n" for number in range(10)]
    places = [result.meta["remote"] for result in results]
    assert len({place["lease"] for place in places}) == 1
    assert {(place["provider"], place["node"]) for place in places} == {("local-fleet", "local")}
    assert {result.enforcement.level_source for result in results} == {"claimed"}


def test_requests_of_sandbox_fusions_callers_have_a_place_for_each_worker(
    backend: LocalFleetBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers, nine requests each: programs, programs whose files are fetched, and cells; two leases in all."""
    monkeypatch.setattr(leases, "IDLE_S", 60.0)
    options: Any = {"backend": backend, "accept_claimed": True, "memory": "200m"}
    code = CodeRequest(code="print(1)", language="python")
    fetched = code.model_copy(update={"fetch_files": ["left"]})
    seconds = {"run_timeout": 60.0}

    async def worker() -> list[Result | None]:
        answers = []
        for _ in range(3):
            answers += [await run_code(each, LANGUAGES["python"], {}, options, seconds) for each in (code, fetched)]
            answers.append(await run_cells(JupyterRequest(cells=["print(1)"]), {}, options, 60.0))
        return [answer.ran for answer in answers]

    async def both() -> list[list[Result | None]]:
        return await asyncio.gather(worker(), worker())

    results = [result for each in asyncio.run(both()) for result in each if result is not None]
    assert [result.status for result in results] == [Status.OK] * 18
    assert len({result.meta["remote"]["lease"] for result in results}) == 2


def test_what_no_node_has_is_refused_with_what_there_is(backend: LocalFleetBackend) -> None:
    """A run with more processors than the node has fails at once."""

    async def run() -> None:
        async with backend.open(CLAIMED, Limits(cpus=4096.0)):
            raise AssertionError("it was opened")

    with pytest.raises(BackendUnavailable, match=r"4096"):
        asyncio.run(run())


def test_a_node_that_is_lost_takes_its_session_and_the_next_run_has_a_place(backend: LocalFleetBackend) -> None:
    """A cell under way is NodeLost within seconds, named; another run works once the server is there again."""

    async def lose() -> NodeLost:
        async with backend.open_live(CLAIMED, Limits()) as sandbox:
            session = await sandbox.open_session("python", {})
            started = asyncio.get_running_loop().create_future()

            def note(_: Any) -> None:
                if not started.done():
                    started.set_result(None)

            code = "import time\nprint('here', flush=True)\ntime.sleep(60)"
            cell = asyncio.ensure_future(session.run(code, timeout_s=60, sink=note))
            await started
            os.kill(node_pid(), signal.SIGKILL)
            async with asyncio.timeout(50):
                with pytest.raises(NodeLost, match="node local or lease ls_") as raised:
                    await cell
            await session.close()  # it has ended with the node
            return raised.value

    lost = asyncio.run(lose())
    assert lost.node == "local"
    assert asyncio.run(_run(backend, "print('again')")).stdout == "again\n"


class ServedBackend(LocalFleetBackend):
    """What a service of this fleet runs code on, by the name of an engine."""

    name = "ray"
    of_tests: ClassVar[LocalFleetBackend]

    def __init__(self, _: object = None) -> None:
        super().__init__()

    def _leases(self) -> Leases:
        return self.of_tests.leases


@pytest.fixture
def served(backend: LocalFleetBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the backend of Ray be that of this machine."""
    monkeypatch.setattr(ServedBackend, "of_tests", backend, raising=False)
    row = replace(BACKEND_ROWS["ray"], provider=f"{__name__}:ServedBackend")
    monkeypatch.setitem(cast("dict[str, BackendRow]", BACKEND_ROWS), "ray", row)


def test_the_command_line_keeps_an_interpreter_on_a_node(
    served: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Cells from a pipe run in a live sandbox there. A level that is only claimed is refused by the backend's name."""
    monkeypatch.setattr(session, "read_code", lambda: "x = 6\n# %%\nprint(x * 7)")
    assert root.main(["session", "--backend", "ray"], standalone_mode=False) == 0
    assert root.main(["session", "--backend", "ray", "--require", "jail"], standalone_mode=False) == 125
    out, err = capfd.readouterr()
    assert out == "42\n"
    assert "backend 'ray': level jail is required, and jail is only claimed" in err


def test_a_service_holds_a_live_sandbox_on_a_node(backend: LocalFleetBackend, served: None) -> None:
    """Without a keeper; it is used like any other, and its end is noticed when the node is lost."""
    options: dict[str, Any] = {"backend": "ray", "accept_claimed": True}
    terms = Terms(lifetime_s=600.0, lease_s=300.0)

    async def hold() -> str:
        assert await asyncio.to_thread(needs_worker, options, terms)
        sandbox = await open_held(options, None, terms)
        try:
            assert (await sandbox.exec(shell="echo $((6 * 7))")).stdout == "42\n"
            os.kill(node_pid(), signal.SIGKILL)
            async with asyncio.timeout(50):
                return await until_over(held_attachment("sb_1", sandbox, terms), terms)
        finally:
            await sandbox.close()

    assert asyncio.run(hold()) == "found ended"
    with pytest.raises(InvalidRequest, match="idle"):
        needs_worker(options, Terms(lifetime_s=600.0, idle_s=60.0))


def test_the_server_of_a_fleet_ends_with_its_process() -> None:
    """No server is there after a caller that ended without closing anything."""
    code = (
        "import asyncio, os\n"
        "from tests.harness.fleets import LocalFleetBackend, node_pid\n"
        "from tests.integration.test_leased import _run\n"
        "asyncio.run(_run(LocalFleetBackend(), '1'))\n"
        "print(node_pid(), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.PIPE, text=True, timeout=120)
    server = int(ended.stdout)
    try:
        fd = os.pidfd_open(server)
    except ProcessLookupError:
        return
    import select

    assert select.select([fd], [], [], 30)[0]
    os.close(fd)
