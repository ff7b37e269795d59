"""E2B's own SDK for Python, unmodified: every method of it; `make soak AREA=e2b` has it of half a year before, too."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.harness.e2b import E2BService, serving, variables
from tests.harness.e2b_sdk.both import Both, run
from tests.harness.e2b_sdk.rows import Shown, all_methods, calls_noted, shown

IS_ASYNC = {"sync": False, "async": True}
# `make test` has what is long with one of the two SDKs.
PROGRAMS = [
    pytest.param(kind, row, id=f"{kind}-{row.name}", marks=pytest.mark.soak if row.is_long and kind == "sync" else ())
    for kind in IS_ASYNC
    for row in shown()
    if not row.methods or {*row.methods} & {*all_methods(is_async=IS_ASYNC[kind])}  # an older SDK lacks some
]


@pytest.fixture(scope="module")
def e2b(tmp_path_factory: pytest.TempPathFactory) -> Iterator[E2BService]:
    """Serve for all tests here, and have the SDKs of this process use it."""
    with serving(tmp_path_factory.mktemp("e2b")) as service, variables(service):
        yield service


@pytest.fixture(scope="module")
def sdks(e2b: E2BService) -> Iterator[dict[str, tuple[Both, asyncio.Runner]]]:
    """Give both SDKs, the asynchronous one with a loop for all of its programs."""
    with asyncio.Runner() as runner:
        both = {kind: Both(e2b, is_async=is_async) for kind, is_async in IS_ASYNC.items()}
        yield {kind: (sdk, runner) for kind, sdk in both.items()}
        runner.run(both["async"].end(with_shared=True))
        asyncio.run(both["sync"].end(with_shared=True))


@pytest.mark.parametrize(("kind", "row"), PROGRAMS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_program_of_the_sdk_works(sdks: dict[str, tuple[Both, asyncio.Runner]], kind: str, row: Shown) -> None:
    """It asserts what E2B's documents promise, and calls each method that it stands for in docs/e2b.md."""
    is_async = IS_ASYNC[kind]
    here = [method for method in row.methods if method in all_methods(is_async=is_async)]
    with calls_noted(here, is_async=is_async) as called:
        run(row.program, *sdks[kind])
    assert called == set(here)


@pytest.mark.parametrize("kind", IS_ASYNC)
def test_every_method_has_a_program(kind: str) -> None:
    """A method of a new SDK is not in the table until a program calls it."""
    assert set(all_methods(is_async=IS_ASYNC[kind])) - {method for row in shown() for method in row.methods} == set()
