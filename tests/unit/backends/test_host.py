"""What was found out about this host is kept for the next process, and believed only where it is this user's own."""

from __future__ import annotations

import marshal
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import cloche
from cloche.backends import host
from cloche.backends.host import KeptAnswers, circumstances, why_unread_memory
from cloche.jail.setup.cache import write_cache


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have a cache of the test's own, and return where answers are kept in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "cloche" / "answers"


def question() -> KeptAnswers[str]:
    """Return what another process would have: it knows nothing yet, keeps what is not empty, believes letters only."""
    return KeptAnswers("letters", to_plain=lambda text: text or None, from_plain=_letters)


def _letters(plain: object) -> str | None:
    if not isinstance(plain, str):
        raise TypeError("no text")
    return plain if plain.isalpha() else None


def ask(about: str = "a", answer: str = "new") -> str:
    """Return what a new process is told, which would find out `answer` by itself."""
    return question().find((about,), lambda: answer)


def test_an_answer_is_found_out_once() -> None:
    """In this process, and in the next one; what it is asked about tells answers apart."""
    found = question()
    assert [found.find(("a",), lambda: "one"), found.find(("a",), lambda: "two")] == ["one", "one"]
    assert [ask(answer="two"), ask("b", "three")] == ["one", "three"]


def test_an_answer_may_be_for_one_process_alone(folder: Path) -> None:
    """What is not to be kept is known to this process, and found out by the next one."""
    found = question()
    assert [found.find(("a",), str), found.find(("a",), lambda: "two")] == ["", ""]
    assert ask() == "new"
    assert len([*folder.iterdir()]) == 1


def test_a_failure_is_no_answer() -> None:
    """Who asks next finds it out."""
    found = question()
    with pytest.raises(ZeroDivisionError):
        found.find(("a",), lambda: str(1 // 0))
    assert found.find(("a",), lambda: "one") == "one"


def test_nobody_else_can_write_to_what_is_kept(folder: Path) -> None:
    """Not to the folder, not to a file of it."""
    ask()
    (kept,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, kept.stat().st_mode & 0o777) == (0o700, 0o600)


FOREIGN: Mapping[str, Callable[[Path], object]] = {
    "a file that others may write to": lambda file: file.chmod(0o666),
    "a folder that others may write to": lambda file: file.parent.chmod(0o777),
    "a link": lambda file: (file.rename(file.with_suffix(".there")), file.symlink_to(file.with_suffix(".there"))),
    "a FIFO": lambda file: (file.unlink(), os.mkfifo(file, 0o600)),
    "nothing": lambda file: file.write_bytes(b""),
    "half": lambda file: file.write_bytes(file.read_bytes()[:-10]),
    "nonsense": lambda file: file.write_bytes(b"[" + b"\xff" * 40),
    "other kinds of values": lambda file: file.write_bytes(marshal.dumps(("a", "b", "c"))),
    "an answer that is none": lambda file: _replace(file, marshal.dumps(7)),
    "an answer that is not believed": lambda file: _replace(file, marshal.dumps("1")),
    "an answer of no values": lambda file: _replace(file, b""),
}


def _replace(file: Path, data: bytes) -> None:
    key, _, _ = marshal.loads(file.read_bytes())
    assert write_cache(str(file.parent), file.name, key, data, is_own=True)


@pytest.mark.parametrize("change", FOREIGN.values(), ids=FOREIGN)
def test_what_is_foreign_or_broken_is_passed_by(folder: Path, change: Callable[[Path], object]) -> None:
    """It is found out again, and no error."""
    assert ask(answer="old") == "old"
    (kept,) = folder.iterdir()
    change(kept)
    assert ask() == "new"


@pytest.mark.root
def test_another_users_file_is_passed_by(folder: Path) -> None:
    """Also where nobody but that user may write to it."""
    ask(answer="old")
    (kept,) = folder.iterdir()
    os.chown(kept, 65534, 65534)
    assert ask() == "new"
    os.chown(folder, 65534, 65534)
    assert ask(answer="newer") == "newer"


def test_where_nothing_can_be_kept_all_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file stands where the folder should be; or there is no cache."""
    (tmp_path / "cloche").write_text("in the way")
    assert [ask(answer="one"), ask(answer="two")] == ["one", "two"]
    monkeypatch.setenv("XDG_CACHE_HOME", "no/folder")
    assert ask(answer="three") == "three"


def test_what_is_kept_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest goes; what a killed writer left goes like an answer; what is too large is not kept at all."""
    monkeypatch.setattr(KeptAnswers, "MOST", 3)
    folder.mkdir(mode=0o700, parents=True)
    (folder / "left.123.456").write_bytes(b"x")
    os.utime(folder / "left.123.456", ns=(0, 0))
    for number, about in enumerate("abcd", start=1):
        known = {*folder.iterdir()}
        ask(about, "old")
        for new in {*folder.iterdir()} - known:
            os.utime(new, ns=(number, number))
    assert not (folder / "left.123.456").exists()
    assert [ask(about) for about in "bcd"] == ["old"] * 3
    assert ask("a") == "new"
    before = {*folder.iterdir()}
    assert ask("e", "x" * (KeptAnswers.MOST_BYTES + 1))[:2] == "xx"
    assert {*folder.iterdir()} == before


def test_a_wrong_answer_can_be_forgotten() -> None:
    """By whoever found that it does not hold."""
    found = question()
    found.find(("a",), lambda: "old")
    found.forget(("a",))
    assert [found.find(("a",), lambda: "new"), ask(answer="newer")] == ["new", "new"]


def test_another_host_is_another_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where anything changed that an answer depends on, it is found out again; what no host changes stays."""
    everywhere = KeptAnswers("images", to_plain=str, from_plain=str, is_of_host=False)
    assert [ask(answer="old"), everywhere.find((), lambda: "old")] == ["old", "old"]
    monkeypatch.setattr(host, "circumstances", lambda: ("another boot",))
    again = KeptAnswers("images", to_plain=str, from_plain=str, is_of_host=False)
    assert [ask(), again.find((), lambda: "new")] == ["new", "old"]


BEHIND = "import resource, os, sys; {}; from cloche.backends.host import circumstances; print(hash(circumstances()))"


@pytest.mark.parametrize(
    ("change", "is_seen"),
    [
        ("pass", False),
        ("resource.setrlimit(resource.RLIMIT_CPU, (3000, 3000))", False),
        ("resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))", True),
        ("resource.setrlimit(resource.RLIMIT_NPROC, (5000, 5000))", True),
        ("import ctypes; assert ctypes.CDLL(None).prctl(38, 1, 0, 0, 0) == 0", True),
        ("sys.executable = '/bin/sh'", True),
    ],
)
def test_what_answers_depend_on(change: str, is_seen: bool) -> None:
    """Limits that sandboxes fail on, what a process gave up, and the interpreter; not what changes from run to run."""
    env = {**os.environ, "PYTHONHASHSEED": "1"}

    def hashed(change: str) -> str:
        command = [sys.executable, "-c", BEHIND.format(change)]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout

    assert (hashed("pass") != hashed(change)) == is_seen
    assert all(isinstance(part, str) for part in circumstances())


def test_a_forked_child_asks_for_itself() -> None:
    """It knows nothing of its parent's, and waits for no thread that it does not have."""
    found, is_asked, may_end = question(), threading.Event(), threading.Event()
    found.find(("a",), str)

    def measure() -> str:
        is_asked.set()
        may_end.wait(30)
        return "b"

    thread = threading.Thread(target=found.find, args=(("b",), measure))
    thread.start()
    is_asked.wait(30)
    child = os.fork()
    if child == 0:
        os._exit(0 if [found.find((one,), lambda: "child") for one in "ab"] == ["child", "child"] else 1)
    status = os.waitpid(child, 0)[1]
    may_end.set()
    thread.join()
    assert status == 0


def test_it_is_fast_to_import() -> None:
    """Nothing of a run's own is needed to look up what is kept."""
    heavy = ("asyncio", "json", "subprocess", "socket", "ctypes", "platformdirs", "logging")
    program = f"import sys, cloche.backends.host; print([name for name in {heavy} if name in sys.modules])"
    env = {"PYTHONPATH": str(Path(cloche.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-S", "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


WHOLE = {
    "landlock": 5, "seccomp": "", "namespaces": "", "idmapped": "needs root", "can_switch_identity": False,
    "processes": "",
}  # fmt: skip


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Return what probe processes will find, one after the other; none is run where it is empty."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(host, "run_probe", lambda _: found.pop(0))
    monkeypatch.setattr(host, "_is_filtered", lambda: False)  # as these tests may be
    _in_a_new_process()
    yield found
    _in_a_new_process()


def _in_a_new_process() -> None:
    host.measure_host.cache_clear()
    host._tried.cache_clear()


def _namespaces() -> str:
    _in_a_new_process()
    return host.measure_host().namespaces


def test_a_whole_host_is_probed_once(probed: list[dict[str, Any]]) -> None:
    """The next process needs no probe process; what a look tells is looked at by each."""
    probed += [WHOLE]
    first = host.measure_host()
    _in_a_new_process()
    assert (host.measure_host(), probed, first.uid, first.landlock_abi) == (first, [], os.geteuid(), 5)


@pytest.mark.parametrize(
    "lacking",
    [{"namespaces": "refused"}, {"seccomp": "refused"}, {"idmapped": "refused"}],
    ids=["namespaces", "seccomp", "idmapped"],
)
def test_a_refusal_is_found_out_each_time(probed: list[dict[str, Any]], lacking: dict[str, str]) -> None:
    """Nothing runs on less because of what was refused once."""
    probed += [{**WHOLE, **lacking}, WHOLE]
    host.measure_host()
    assert (_namespaces(), probed) == ("", [])


def test_behind_a_filter_the_host_is_probed_each_time(
    probed: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which system calls it refuses cannot be read, so what was found behind another one says nothing."""
    probed += [WHOLE, WHOLE]
    host.measure_host()
    monkeypatch.setattr(host, "_is_filtered", lambda: True)
    assert (_namespaces(), probed) == ("", [])


def test_a_start_that_failed_has_the_host_probed_anew(probed: list[dict[str, Any]]) -> None:
    """By this process and by the next ones."""
    probed += [WHOLE, {**WHOLE, "namespaces": "refused"}, {**WHOLE, "namespaces": "still refused"}]
    host.measure_host()
    host.forget_host()
    assert (host.measure_host().namespaces, _namespaces()) == ("refused", "still refused")


def test_what_refuses_namespaces_is_part_of_the_question(
    probed: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a setting of the kernel has changed, the host is probed anew."""
    probed += [WHOLE, {**WHOLE, "namespaces": "refused"}]
    host.measure_host()
    monkeypatch.setattr(host, "_reads", lambda path: f"other {path}")
    assert _namespaces() == "refused"


@pytest.mark.parametrize(
    "wrong", [{"landlock": "5"}, {"namespaces": None}, {"namespaces": "refused"}, {"more": 1}], ids=str
)
def test_what_no_probe_has_found_is_not_believed(probed: list[dict[str, Any]], wrong: dict[str, object]) -> None:
    """Kept data of another form, or that says a jail is impossible, is as none."""
    tried = host._tried()
    tried._write(host._about(sys.executable), WHOLE)
    probed += [{**WHOLE, "namespaces": "refused"}]
    assert host._from_plain({**WHOLE, **wrong}) is None
    assert (_namespaces(), len(probed)) == ("", 1)


@pytest.mark.parametrize(("scope", "is_read"), [("", True), ("0", True), ("1", True), ("2", False), ("3", False)])
def test_yama_decides_whether_a_child_is_read(tmp_path: Path, scope: str, is_read: bool) -> None:
    """Where it forbids that to all but root, a sentence names the setting."""
    file = tmp_path / "ptrace_scope"
    if scope:
        file.write_text(scope)
    why = why_unread_memory(str(file))
    assert (why == "") is is_read
    assert is_read or f"kernel.yama.ptrace_scope is {scope}" in why
