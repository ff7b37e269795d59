"""Whatever a verb prints of strangers' text, a terminal obeys none of it, and nothing of it is unseen."""

import logging
import os
import pty
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from cloche.agent.approval import ApprovalRequest, Risk
from cloche.agent.terminal import show_request
from cloche.audit.verify import AuditState
from cloche.cli.audit import _row, _write
from cloche.cli.output import GuestWriter, PlainFormatter, guarded, say, show
from cloche.cli.run import conclude_fix
from cloche.cli.session import print_line
from cloche.cli.skill import check_skill, show_skills
from cloche.cli.system import audit_lines
from cloche.core.errors import InvalidRequest
from cloche.core.escape import is_visible
from cloche.core.result import FixReport, FixStop, code_diff

# What drives a terminal, what turns text round, what nobody sees, what rich would make something else of.
UNSEEN = (
    "\x1b\x07\x7f\x9b\xad\u034f\u115f\u180b\u200b\u200d\u202e\u2028\u2066\u2800\u3164\ue000\ufe0f\ufeff\uffa0\ud800"
)
UNSEEN += "\U000e0001\U000e0041\U000e0100\U0010ffff"
EVIL = f"<{'|'.join(UNSEEN)}>[red]b[/red]:heart:"


def _fail() -> int:
    raise InvalidRequest(EVIL)


def _skill(folder: Path) -> str:
    """Return the folder of a skill that says of itself what it likes."""
    home = folder / "a-skill"
    home.mkdir()
    said = EVIL.replace("\ud800", "").encode("unicode_escape").decode().replace("\\x", "\\u00").replace('"', "")
    home.joinpath("SKILL.md").write_text(f'---\nname: a-skill\ndescription: "{said}"\nmetadata: {{a: "{said}"}}\n---\n')
    return str(home)


def _approval() -> None:
    request = ApprovalRequest(
        tool="run_code", risk=Risk.HIGH, arguments={"code": EVIL, EVIL: EVIL}, rules={"policy": {"network": EVIL}},
        changes=EVIL,
    )  # fmt: skip
    show_request(request, Console(emoji=False, width=4000))


def _logged() -> None:
    record = logging.LogRecord("cloche", logging.INFO, "", 0, EVIL, (), None)
    print(PlainFormatter("%(message)s").format(record))


def _exported() -> None:
    """Print what a terminal is shown of an audit log as CSV."""
    ours, theirs = pty.openpty()
    with open(theirs, "w", encoding="utf-8") as terminal, open(ours, "rb", buffering=0) as shown:
        _write(iter([{"kind": EVIL, "else": EVIL}]), "csv", terminal)
        terminal.flush()
        printed = b""
        while printed.count(b"\n") < 2:
            printed += shown.read(10_000)
        print(printed.decode().replace("\r\n", "\n"))


REPORT = FixReport(stop=FixStop.MAX_ROUNDS, message=EVIL, code=EVIL, diff=code_diff("a", EVIL), model=EVIL, host=EVIL)
PRINTED: dict[str, Callable[[], object]] = {
    "a table": lambda: show([{"a": EVIL, "b": [EVIL, EVIL]}], as_json=False),
    "a word about the run": lambda: say(EVIL),
    "an error": lambda: guarded(_fail),
    "an error and where it was": lambda: guarded(_fail, debug=True),
    "a line of the session's prompt": lambda: print_line(EVIL),
    "a diff of auto-fix": lambda: conclude_fix(REPORT),
    "a row of the audit log": lambda: show(
        [_row({"seq": 1, "time": EVIL, "kind": EVIL, "status": EVIL, "code_sha256": EVIL, "backend": EVIL})],
        as_json=False,
    ),
    "an audit log as CSV": _exported,
    "the doctor about the log": lambda: print(*audit_lines(AuditState(is_on=True, origin=EVIL, problem=EVIL))),
    "a request for approval": _approval,
    "the log of --sandbox-debug": _logged,
}


def hidden_in(text: str) -> list[str]:
    """Return the characters of a text that are obeyed or not seen."""
    return sorted({f"U+{ord(char):04X}" for char in text if not is_visible(char)})


@pytest.mark.parametrize("what", PRINTED)
def test_nothing_of_strangers_is_obeyed_or_unseen(what: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Each door shows every such character as an escape, and leaves to rich's markup what only looks like some."""
    PRINTED[what]()
    printed = "".join(capfd.readouterr())
    assert hidden_in(printed) == []
    assert "\\u3164" in printed.replace("\n", "") or what == "a row of the audit log"
    assert ":heart:" in printed.replace("\n", "") or "table" in what or "row" in what


def test_a_skill_is_shown_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`skill check` and `skill list` show what a stranger's skill says of itself."""
    folder = _skill(tmp_path)
    check_skill(folder, {}, as_json=False)
    show_skills([str(tmp_path)], None, as_json=False)
    printed = "".join(capfd.readouterr())
    assert (hidden_in(printed), "\\u200b" in printed, "\\U000e0041" in printed) == ([], True, True)


def test_a_program_on_a_terminal() -> None:
    """What a program prints reaches a terminal without escapes; only to the beginning of its line it may go back."""
    ours, theirs = pty.openpty()
    try:
        GuestWriter(theirs).write(f"50%\r{EVIL}\n".encode("utf-8", "replace"))
        shown = os.read(ours, 10_000).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert (hidden_in(shown.replace("\r", "")), "50%\r<\\x1b" in shown, "\\u3164" in shown) == ([], True, True)
