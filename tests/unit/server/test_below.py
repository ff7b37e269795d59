"""A root path is a few plain names, none of which begins a path of the service."""

from __future__ import annotations

import pytest

from cloche.core.errors import InvalidRequest
from cloche.server.below import read_root_path


@pytest.mark.parametrize("word", ["cloche", "/../x", "/a//b", "//x", "/api", "/api/x"])
def test_a_path_that_would_lead_elsewhere_is_refused(word: str) -> None:
    """The error names the option."""
    with pytest.raises(InvalidRequest, match="--root-path"):
        read_root_path(word, ["/api/runs", "/login"])


@pytest.mark.parametrize(
    ("word", "root"), [("", ""), ("/", ""), ("/tools/cloche/", "/tools/cloche"), ("/apis", "/apis")]
)
def test_a_path_of_names_is_taken(word: str, root: str) -> None:
    """Without a slash behind it."""
    assert read_root_path(word, ["/api/runs", "/login"]) == root
