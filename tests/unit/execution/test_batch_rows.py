"""Rows of a batch: what a line says, what a row of results says, and the summary."""

from __future__ import annotations

import io
import json

import pytest

from cloche.core.errors import InternalError, InvalidRequest, OutcomeUnknown, PolicyDenied, StartFailed
from cloche.core.result import Result
from cloche.execution import batch_rows
from cloche.execution.batch_rows import BatchSummary, InputRow, begins_row, encode_row, outcome_row, read_row


def test_lines_are_numbered_blank_ones_are_left_out_and_long_ones_are_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A long line takes no more memory than the bound, and the next one is read whole."""
    monkeypatch.setattr(batch_rows, "MAX_ROW_BYTES", 8)
    data = b"\xef\xbb\xbf{}\n\n  \n" + b"x" * 50 + b"\n1234567\nlast"
    lines = list(batch_rows.read_lines(io.BytesIO(data)))
    assert lines == [(1, b"{}\n"), (4, None), (5, b"1234567\n"), (6, b"last")]


def test_a_row_is_a_program() -> None:
    """Content is text, or bytes as base64."""
    data = {"code": "1", "id": 5, "stdin": {"base64": "AAE="}, "files": {"a": "b", "c": {"base64": "/w=="}}}
    row = read_row(json.dumps(data).encode(), index=3, line=7)
    assert row.program is not None
    assert (row.index, row.line, row.id) == (3, 7, 5)
    assert (row.program.stdin, row.program.files) == (b"\x00\x01", {"a": "b", "c": b"\xff"})


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (None, "128 MiB"),
        (b"{\n", "not JSON: Expecting property name enclosed in double quotes at character 1"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff\xfe", "not UTF-8: invalid start byte at byte 0"),
        (b'{"id": ' + b"1" * 5000 + b"}", "not JSON"),
        (b'{"id": [' + b"[]," * 500_000 + b"[]]}", "more than 500000 values"),
        (b'{"argv": [' + b'"",' * 500_000 + b'""]}', "more than 500000 values"),
        (b'{"code": "' + b'[\\\\\\",' * 500_000 + b'", "cod": 1}', "unknown key 'cod'"),
        (b"[]", "not a JSON object"),
        (b'{"id": "a"}', "give `code`"),
        (b'{"code": "1", "cod": 2}', "unknown key 'cod'"),
        (b'{"code": "1", "files": ["/etc/passwd"]}', "files: give an object"),
        (b'{"code": "1", "files": {"a": {"path": "/etc/passwd"}}}', "base64"),
        (b'{"code": "1", "stdin": {"base64": "?"}}', "stdin: "),
        (b'{"code": "1", "stdin": 5}', "stdin: give text"),
        (b'{"code": "1", "stdin": "\\ud800"}', "surrogates"),
        (b'{"code": "1", "files": {"\\ud800": "a"}}', "surrogates"),
        (b'{"code": "1", "env": [1]}', "env: give Mapping"),
    ],
)
def test_a_wrong_row_says_why(line: bytes | None, told: str) -> None:
    """It is no exception, and no path of the host is read."""
    row = read_row(line, index=0, line=1)
    assert row.program is None
    assert told in row.why


@pytest.mark.parametrize(
    ("outcome", "status", "error"),
    [
        (Result("out", "", 0, 0.1), "ok", None),
        (Result("", "", 3, 0.1), "error", None),
        (InvalidRequest("wrong"), "invalid", "invalid"),
        (PolicyDenied("no"), "invalid", "invalid"),
        (OutcomeUnknown("gone"), None, "lost"),
        (InternalError("gone"), None, "lost"),
        (StartFailed("no room"), None, "start_failed"),
    ],
)
def test_a_failure_of_cloche_is_never_a_status(
    outcome: Result | InvalidRequest, status: str | None, error: str | None
) -> None:
    """A program that may have run, or did not start, has an error and no status."""
    row = outcome_row(InputRow(index=4, line=9, id="x"), outcome, is_full=False)
    assert (row["index"], row["id"], row["line"]) == (4, "x", 9)
    assert (row.get("status"), row.get("error")) == (status, error)
    assert encode_row(row).startswith(begins_row(4))


def test_a_row_is_one_line_whatever_is_in_it() -> None:
    """Line ends of any reader, controls and lone surrogates are escaped; a row keeps to the space reserved for it."""
    text = "\n\x00\x85\u2028\u2029\x7f\x9b2J\xe9" + "\x01" * 1000
    row = outcome_row(InputRow(index=0, line=1, id="\ud800"), Result(text, text, 0, 0.1), is_full=False)
    line = encode_row(row)
    assert line.count(b"\n") == 1
    assert len(line.decode().splitlines()) == 1
    shown = encode_row(row | {"id": 0}).decode()
    assert not set("\x00\x7f\x85\x9b\u2028\u2029") & set(shown)
    assert "\xe9" in shown
    assert json.loads(line)["stdout"] == text
    assert len(line) <= batch_rows.most_row_bytes(len(text.encode()))


def test_the_summary_counts_and_measures_in_bounded_memory() -> None:
    """Quantiles are right to 2 %; the slowest are named."""
    summary = BatchSummary()
    for number in range(10_000):
        result = Result("", "", number % 2, (number + 1) / 1000)
        summary.add(outcome_row(InputRow(index=number, line=number + 1), result, is_full=False))
    summary.add(outcome_row(InputRow(index=1, line=2), OutcomeUnknown(""), is_full=False))
    summary.add(outcome_row(InputRow(index=2, line=3), InvalidRequest(""), is_full=False))
    told = summary.as_dict()
    assert told["rows"] == 10_002
    assert summary.first_invalid == (3, "")
    assert told["statuses"] == {"ok": 5000, "error": 5000, "invalid": 1}
    assert told["errors"] == {"lost": 1, "invalid": 1}
    assert told["p50"] == pytest.approx(5.0, rel=0.02)
    assert told["p99"] == pytest.approx(9.9, rel=0.02)
    assert [row["program"] for row in told["slowest"]] == [f"line {line}" for line in range(10_000, 9_995, -1)]
    assert len(summary._durations) < 1_000
    assert BatchSummary().as_dict()["p50"] is None
