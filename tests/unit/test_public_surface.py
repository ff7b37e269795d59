"""The public surface is deliberate: it changes here and in the changelog, or not at all."""

import pytest

import cloche

PUBLIC = [
    "ApprovalDenied",
    "AsyncSandbox",
    "BackendUnavailable",
    "ClocheError",
    "CodeSandbox",
    "DockerSandbox",
    "E2BSandbox",
    "ExecutionResult",
    "InternalError",
    "InvalidRequest",
    "Level",
    "Limits",
    "LocalSandbox",
    "OutcomeUnknown",
    "PolicyDenied",
    "Result",
    "Sandbox",
    "SandboxFileError",
    "Secret",
    "StartFailed",
    "Status",
    "Tool",
    "__version__",
    "acheck",
    "amap",
    "arun",
    "check",
    "get_sandbox",
    "map",
    "placement",
    "run",
    "run_python_code",
]


def test_the_public_names_are_these() -> None:
    """`cloche.__all__` is the list above, of at most 32 names."""
    assert cloche.__all__ == PUBLIC
    assert len(PUBLIC) <= 32


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there(name: str) -> None:
    """A name in the list can be imported, lazily or not."""
    assert getattr(cloche, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    """A misspelt name fails as it does for any module."""
    with pytest.raises(AttributeError, match="sanbox"):
        _ = cloche.sanbox  # type: ignore[attr-defined]
