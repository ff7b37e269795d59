"""A file that the user names, in a folder that may be a stranger's, takes the place of whatever is there."""

import json
import os
import pty
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from cloche.audit.log import Audit
from cloche.bench.report import write_plot
from cloche.cli.audit import Filters, export
from cloche.cli.bench import BenchCommand, bench
from cloche.cli.run import save_code
from cloche.core.result import FixReport, FixStop
from cloche.hostfs import open_named

REPORT = FixReport(stop=FixStop.FIXED, message="", code="print('fixed')\n")
FIGURES = {"leaks": [], "events": [{"title": "", "rows": {"cloche": {"p50": 1.0, "p95": 2.0, "p99": 3.0}}}]}


def _bench(path: str) -> None:
    bench(BenchCommand(rounds=1, runs=1, json_file=path, plot_file=None))


def _export(path: str) -> None:
    log = os.path.join(os.path.dirname(path), "log")
    Audit(log).record("denial", by="policy")
    export(log, Filters(), form="jsonl", out=path)


WRITTEN: dict[str, tuple[Callable[[str], object], str]] = {
    "run --save-fix": (lambda path: save_code(REPORT, path), "print('fixed')"),
    "audit export --out": (_export, '"kind":"denial"'),
    "bench --json": (_bench, '"leaks": []'),
    "bench --plot": (lambda path: write_plot(FIGURES, path), "<svg"),
}
IN_THE_WAY: dict[str, Callable[[Path, Path], object]] = {
    "link": lambda place, elsewhere: place.symlink_to(elsewhere),
    "hard link": lambda place, elsewhere: os.link(elsewhere, place),
    "fifo": lambda place, _: os.mkfifo(place),
}


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have figures at once: how they are come by is not what is tested here."""
    monkeypatch.setattr("cloche.bench.report.measure", lambda _, report, *__: report.update(FIGURES))
    monkeypatch.setattr("cloche.cli._bench_report.show_end", lambda _: None)


@pytest.mark.timeout(120)  # a FIFO that is waited for is waited for without end
@pytest.mark.both_users
@pytest.mark.parametrize("make", IN_THE_WAY.values(), ids=IN_THE_WAY.keys())
@pytest.mark.parametrize("what", WRITTEN)
def test_what_a_stranger_left_there_is_replaced(
    what: str, make: Callable[[Path, Path], object], tmp_path: Path
) -> None:
    """No link is written through, and no FIFO is waited for."""
    write, expected = WRITTEN[what]
    (elsewhere := tmp_path / "elsewhere").write_text("precious")
    make(place := tmp_path / "out.svg", elsewhere)
    write(str(place))
    assert elsewhere.read_text() == "precious"
    assert stat.S_ISREG(place.lstat().st_mode)
    assert expected in place.read_text()


def test_a_file_of_ones_own_passes_its_mode_on(tmp_path: Path) -> None:
    """A program that was executable is so when it was repaired."""
    (place := tmp_path / "program").write_text("1 / 0")
    place.chmod(0o750)
    save_code(REPORT, str(place))
    assert (place.read_text(), place.stat().st_mode & 0o777) == (REPORT.code, 0o750)


def test_what_devices_names_is_written_to_itself() -> None:
    """A terminal and a descriptor, as `/dev/stdout` is one, get what is written and stay what they are."""
    reading, writing = os.pipe()
    ours, theirs = pty.openpty()
    try:
        open_named(f"/dev/fd/{writing}", b"to a pipe").close()
        open_named(os.ttyname(theirs), json.dumps("to a terminal").encode()).close()
        assert (os.read(reading, 100), os.read(ours, 100)) == (b"to a pipe", b'"to a terminal"')
    finally:
        for fd in (reading, writing, ours, theirs):
            os.close(fd)
