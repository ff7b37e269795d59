"""What came of a run."""

import json
from pathlib import Path

import pytest

from cloche.core.errors import InvalidRequest
from cloche.core.result import ExecutionResult, FileRecord, Output, Result, Status, as_on_screen


def test_the_first_four_fields_are_positional() -> None:
    """R1: stdout, stderr, exit code and duration by position, everything else has a default."""
    result = ExecutionResult("out", "err", 0, 1.5)
    assert (result.stdout, result.stderr, result.exit_code, result.duration) == ("out", "err", 0, 1.5)
    assert (result.truncated, result.timed_out, result.meta) == (False, False, {})
    assert ExecutionResult is Result


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\n\ttext ", "plain\n\ttext "),
        ("windows\r\nlines\r\n", "windows\r\nlines\r\n"),
        ("\r 10 %\r100 %\ndone\n", "100 %\ndone\n"),
        ("longer\rab", "abnger"),
        ("longer\r\x1b[Kab\n", "ab\n"),
        ("\router 1\n\rinner 1\x1b[A\n\rinner 2\x1b[A\router 2", "outer 2\ninner 2"),
        ("\r50 %\r", "50 %\r"),
        ("\x1b[A\x1b[Aup", "up"),
    ],
)
def test_text_is_as_a_terminal_shows_it_in_the_end(text: str, shown: str) -> None:
    """Carriage returns and moves up let later text take the place of earlier; other text is as it was."""
    assert as_on_screen(text) == shown


@pytest.mark.parametrize(
    ("result", "status"),
    [
        (Result("", "", 0, 0), Status.OK),
        (Result("", "", 3, 0), Status.ERROR),
        (Result("", "", -1, 0, timed_out=True), Status.TIMEOUT),
        (Result("", "", 137, 0, status=Status.OUT_OF_MEMORY), Status.OUT_OF_MEMORY),
    ],
)
def test_status_of_a_bare_result(result: Result, status: Status) -> None:
    """A result without a status derives one; a given one stands."""
    assert result.status is status
    assert result.ok is (status is Status.OK)


def test_a_result_is_plain_data() -> None:
    """`as_dict` is ready for JSON, binary outputs included."""
    result = Result("a", "", 0, 0.1, outputs=(Output(data={"image/png": b"\x89P", "text/plain": "x"}),))
    read_back = json.loads(json.dumps(result.as_dict()))
    assert read_back["outputs"][0]["data"] == {"image/png": "iVA=", "text/plain": "x"}
    assert read_back["status"] == "ok"


def test_every_reader_of_json_takes_names_that_are_no_text() -> None:
    """A file's name that is no UTF-8 is an escape in the JSON; its record, and what opens it, keep it."""
    record = FileRecord(path="d/\udcff\U0001f514", size=0, sha256="")
    result = Result("", "", 0, 0, files=(record,), meta={"files_left_out": ["\udcfe"]})
    read_back = json.loads(json.dumps(result.as_dict(), ensure_ascii=False).encode())
    assert read_back["files"][0]["path"] == "d/\\udcff\U0001f514"
    assert read_back["meta"] == {"files_left_out": ["\\udcfe"]}
    assert result.files == (record,)


def test_bytes_follow_the_text() -> None:
    """Where no bytes are given they are those of the text."""
    assert Result("\u00e4", "", 0, 0).stdout_bytes == b"\xc3\xa4"


def test_an_output_shows_itself_in_a_notebook_and_is_short_as_text() -> None:
    """Its bundle is what a notebook displays; no picture is spelled out."""
    output = Output(data={"image/png": bytes(5000), "text/plain": "x"}, metadata={"image/png": {"width": 1}})
    assert output._repr_mimebundle_() == (output.data, output.metadata)
    assert repr(output) == "Output(image/png: 5000 bytes, text/plain: 1 characters)"


def test_the_summary_is_short() -> None:
    """A summary says status, exit code and the start of what matters."""
    assert Result("4\n", "noise", 0, 0.01).summary() == "ok (exit 0, 0.01 s): 4"
    assert Result("4\n", "x" * 1000, 1, 0.01).summary().startswith("error (exit 1, 0.01 s): xxx")
    assert len(Result("", "x" * 1000, 1, 0).summary()) == 400


def test_saving_without_files(tmp_path: Path) -> None:
    """A result without files makes the folder; one whose files are gone says what to do."""
    assert Result("", "", 0, 0).save(tmp_path / "out") == ()
    assert (tmp_path / "out").is_dir()
    lost = Result("", "", 0, 0, files=(FileRecord(path="a", size=1, sha256="0" * 64),))
    with pytest.raises(InvalidRequest, match="pass out=DIR"):
        lost.save(tmp_path)
