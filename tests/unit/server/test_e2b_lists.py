"""Lists of E2B's protocol: filters, then the order by time and id, then pages that stay right."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from cloche.records.ids import moment
from cloche.records.sandboxes import SandboxFacts
from cloche.server.e2b.errors import E2BError
from cloche.server.e2b.sandbox_lists import Query, page_of, read_metadata, read_query, read_token, token_of

NOW = 4_000_000_000.0  # later than any time of these tests' clock


def row(number: int, *, second: int = 0, status: str = "running", **own: Any) -> SandboxFacts:
    """Return the row of a sandbox that was created in a second."""
    document = {"e2b": {"templateID": "base", "alias": "base", "metadata": {}, **own}, "endsAt": moment(NOW)}
    return SandboxFacts(
        id=f"sb_{number:03}", project="default", name=f"sb-{number}", status=status, created_at=moment(1e9 + second),
        ended_at=None, api_key="k", worker="w", document=document,
    )  # fmt: skip


def all_pages(rows: list[SandboxFacts], **query: Any) -> list[str]:
    """Return the ids of all pages, one after the other."""
    ids, token = [], None
    while True:
        after = {} if token is None else {"after": read_token(token)}
        page, token = page_of(rows, Query(**query, **after))
        ids += [facts.id for facts in page]
        if token is None:
            return ids


@pytest.mark.parametrize("is_ascending", [False, True])
@pytest.mark.parametrize("limit", [1, 2, 3, 100])
def test_pages_together_have_each_sandbox_once(limit: int, is_ascending: bool) -> None:
    """Sandboxes of the same moment are on different pages, and none is left out at the edge."""
    rows = [row(number, second=number // 3) for number in range(10)]
    ids = all_pages(rows[::2] + rows[1::2], limit=limit, is_ascending=is_ascending)
    assert ids == sorted((facts.id for facts in rows), reverse=not is_ascending)


def test_a_page_is_full_although_others_do_not_match() -> None:
    """The limit counts what matches, and what comes or goes meanwhile moves no page."""
    rows = [row(number, second=number, status="paused" if number % 2 else "running") for number in range(10)]
    page, token = page_of(rows, Query(states=["paused"], limit=3))
    assert ([facts.id for facts in page], bool(token)) == (["sb_009", "sb_007", "sb_005"], True)
    assert token is not None
    rows = [row(99, second=99, status="paused"), *(facts for facts in rows if facts.id != "sb_005")]
    page, token = page_of(rows, Query(states=["paused"], limit=3, after=read_token(token)))
    assert ([facts.id for facts in page], token) == (["sb_003", "sb_001"], None)


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ({}, ["sb_003", "sb_002", "sb_001"]),
        ({"metadata": {"a": "1"}}, ["sb_002", "sb_001"]),
        ({"metadata": {"a": "1", "b": "2"}}, ["sb_002"]),
        ({"metadata": {"c": ""}}, []),
        ({"template": "other"}, ["sb_003"]),
        ({"started_after": moment(1e9 + 2)}, ["sb_003", "sb_002"]),
    ],
)
def test_filters(query: Mapping[str, Any], ids: list[str]) -> None:
    """Each filter applies, and one that nothing matches gives nothing; what has ended is in no list."""
    rows = [
        row(1, second=1, metadata={"a": "1"}),
        row(2, second=2, metadata={"a": "1", "b": "2"}),
        row(3, second=3, templateID="tpl", alias="other"),
        row(4, second=4, status="ended"),
        row(5, second=5, status="starting"),
    ]
    assert [facts.id for facts in page_of(rows, Query(**query))[0]] == ids


@pytest.mark.parametrize("metadata", [{"a b": "c&d"}, {"ü=": "%+", "x": "1 2"}, {"a": ""}])
def test_metadata_is_read_as_sdks_write_it(metadata: dict[str, str]) -> None:
    """They encode names and values, then the whole; the framework has decoded the query once."""
    assert read_metadata(urlencode({quote(name): quote(value) for name, value in metadata.items()})) == metadata


def test_a_token_is_that_of_its_row() -> None:
    """It names the time and the id."""
    facts = row(7, second=7)
    assert read_token(token_of(facts)) == (facts.created_at, facts.id)


@pytest.mark.parametrize(
    "given",
    [
        {"state": "stopped"}, {"limit": "0"}, {"limit": "101"}, {"limit": "x"}, {"order": "up"}, {"nextToken": "x"},
        {"nextToken": "YWJj"}, {"startedAfter": "soon"}, {"metadata": "a"}, {"metadata": "a=b=c"},
    ],
)  # fmt: skip
def test_a_wrong_parameter_is_named(given: dict[str, str]) -> None:
    """None is ignored."""
    with pytest.raises(E2BError, match=next(iter(given))) as error:
        read_query(given)
    assert error.value.status == 400
