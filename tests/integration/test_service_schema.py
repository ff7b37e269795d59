"""Requests made from the OpenAPI document, as each kind of key: no server's error, and no answer that is not written.

A part here; `make soak AREA=service` has more examples of each route.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.harness.service import Service, serving

KEYS = {"none": (), "run": ("run",), "read": ("read",), "approve": ("approve",), "admin": ("admin",)}
# What holds of each answer: the others ask for things that we do not mean (that each valid request is accepted, say).
WANTED = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")
FEW, MANY = 2, 60
MAY_BE_UNAVAILABLE = 503  # a backend or a place: an answer that is meant
# What does not end by itself, or has no answer to look at.
ENDLESS = (
    "/api/approvals/events", "/api/runs/{run_id}/events", "/api/sandboxes/{sandbox_id}/changes",
    "/api/sandboxes/{sandbox_id}/network/questions",
    "/api/sandboxes/{sandbox_id}/processes/{process_id}/output",
)  # fmt: skip


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Serve for all tests of this module; no run may take long."""
    home = tmp_path_factory.mktemp("service_schema")
    (home / "open").mkdir()
    words = ("--workspace-root", f"{home}/open:rw", "--timeout", "2s", "--drain", "1s")
    with serving(home, *words, CLOCHE_AUDIT="off") as one:
        yield one


def _try_all(service: Service, scopes: tuple[str, ...], examples: int) -> list[str]:
    """Try each operation with a key of some scopes; return what was wrong."""
    import schemathesis
    from schemathesis.checks import CHECKS

    headers = {"Authorization": f"Bearer {service.new_key(*scopes)}"} if scopes else {}
    admin = {"Authorization": f"Bearer {service.key}"}
    schema = schemathesis.openapi.from_url(f"{service.address}/api/openapi.json", headers=admin)
    checks = [CHECKS.get_one(name) for name in WANTED]
    operations = [found.ok() for found in schema.get_all_operations()]
    return [
        fault
        for operation in operations
        if operation.path not in ENDLESS
        for fault in _try(operation, headers, checks, examples)
    ]


def _try(operation: Any, headers: dict[str, str], checks: list[Any], examples: int) -> list[str]:
    from schemathesis.core.failures import FailureGroup

    faults: list[str] = []

    @given(case=operation.as_strategy())
    @settings(
        max_examples=examples, deadline=None, database=None, derandomize=True, phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    def attempt(case: Any) -> None:
        (case.query or {}).pop("wait", None)  # it would wait, for nobody
        answer = case.call(headers=headers)
        if answer.status_code == MAY_BE_UNAVAILABLE:
            return
        try:
            case.validate_response(answer, checks=checks)
        except FailureGroup as group:  # all of them are listed together
            told = [" ".join(str(one).split())[:400] for one in group.exceptions]
            faults.extend(f"{operation.label}: {answer.status_code}: {one}" for one in told)

    attempt()
    return faults


def test_every_answer_is_written(service: Service) -> None:
    """Whatever an admin sends."""
    assert "\n".join(_try_all(service, KEYS["admin"], FEW)) == ""


@pytest.mark.soak
@pytest.mark.parametrize("kind", KEYS)
def test_every_answer_is_written_many_times(service: Service, kind: str) -> None:
    """The same, with many examples of each route."""
    assert "\n".join(_try_all(service, KEYS[kind], MANY)) == ""
