"""What is kept of a request for a run, so that it can be looked at and run again."""

from __future__ import annotations

from typing import Any

import pytest

from cloche.wire.exec_options import MOST_KEPT_CHARS, ExecRequest


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"code": "1", "timeout": "5s"}, {"code": "1", "timeout": "5s"}),
        (
            {"code": "1", "env": {"TOKEN": "secret"}, "stdin": "secret", "files": [{"path": "a", "text": "secret"}]},
            {"code": "1", "leftOut": ["env", "files", "stdin"]},
        ),
        ({"code": "1", "returnFiles": True}, {"code": "1"}),
        (
            {"code": "x" * (MOST_KEPT_CHARS + 1), "language": "bash", "sessionId": "s"},
            {"language": "bash", "sessionId": "s", "leftOut": ["code"]},
        ),
        ({"argv": ["x" * MOST_KEPT_CHARS, "y"]}, {"leftOut": ["argv"]}),
    ],
)  # fmt: skip
def test_code_and_limits_are_kept_and_neither_secrets_nor_what_is_long(
    given: dict[str, Any], kept: dict[str, Any]
) -> None:
    """Environment, input and files are named and not kept, and code of more than the bound is not, either."""
    assert ExecRequest.model_validate(given).stored_fields() == kept
