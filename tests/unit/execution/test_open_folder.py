"""When a folder was opened tells what was changed before from what is changed after."""

from pathlib import Path

from cloche.execution.open_folder import after_now


def test_what_was_changed_before_is_older(tmp_path: Path) -> None:
    """Whichever of the kernel's clocks a file has its time from: it was looked at just before."""
    file = tmp_path / "file"
    for _ in range(25):
        file.write_text("before")
        before = file.stat().st_ctime_ns
        file.write_text("again")
        before = max(before, file.stat().st_ctime_ns)
        opened_ns = after_now()
        file.write_text("after")
        assert before < opened_ns <= file.stat().st_ctime_ns
