"""Writing a sandbox's changes to the host's folder: all or nothing, whenever it is interrupted."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cloche.core.errors import InvalidRequest, WorkspaceConflict, WorkspaceFailed
from cloche.execution.commits import CommitChoice, write_changes
from cloche.execution.open_folder import FolderOptions, open_new
from cloche.workspace import journal as journals
from cloche.workspace.recover import recover, recover_all
from tests.harness.workspaces import (
    content_of,
    everything,
    file,
    folder,
    interrupted_at,
    left_in,
    link,
    make_old,
    removed,
    snapshot_of,
    write,
)

pytestmark = pytest.mark.both_users
ROOT = Path(__file__).parents[2]


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """Give a folder of the host with something for each kind of change."""
    (tmp_path / "host").mkdir()
    make_old(tmp_path / "host")
    return tmp_path / "host"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Give a state folder."""
    (tmp_path / "state").mkdir(mode=0o700)
    return tmp_path / "state"


def recovered(host: Path, state: Path) -> str:
    """Recover one folder."""
    at = os.open(host, os.O_RDONLY)
    try:
        return recover(at, os.fspath(state))
    finally:
        os.close(at)


def test_every_kind_of_change_is_written(host: Path, state: Path) -> None:
    """Files, folders and links come, change, go and move, with their modes; the rest stays."""
    done = write(host, state, everything())
    now = {path: (mode & 0o7777, data) for path, (mode, _, _, data) in content_of(host).items()}
    assert now == {
        "added": (0o750, b""),
        "added/deep": (0o555, b""),
        "added/deep/0": (0o644, b"added 0\n"),
        "added/deep/1": (0o644, b"added 1\n"),
        "kept": (0o755, b""),
        "kept/changed0": (0o640, b"new 0\n"),
        "kept/changed1": (0o640, b"new 1\n"),
        "moved-twin": (0o644, b"old moved\n"),
        "new-link": (0o777, b"../outside"),
        "old-link": (0o777, b"kept"),
        "renamed": (0o644, b"old moved\n"),
        "script": (0o755, b"old script\n"),
        "shut": (0o500, b""),
        "shut/in": (0o644, b"old shut/in\n"),
        "turns": (0o644, b"a file now\n"),
        "turns-too": (0o755, b""),
        "turns-too/inside": (0o644, b"in what was a file\n"),
        "untouched": (0o644, b"old untouched\n"),
    }
    assert "renamed" in done.written
    assert done.left == {}
    assert left_in(state) == []


@pytest.fixture
def both(tmp_path: Path) -> tuple[dict[str, tuple[int, int, int, bytes]], ...]:
    """Give the old tree and the new one."""
    place, records = tmp_path / "reference", tmp_path / "reference-state"
    place.mkdir()
    make_old(place)
    old = content_of(place)
    write(place, records, everything())
    return old, content_of(place)


@pytest.mark.user_soak
def test_an_error_at_any_step_undoes_all(
    tmp_path: Path, both: tuple[dict[str, tuple[int, int, int, bytes]], ...]
) -> None:
    """Whatever fails, and wherever, the folder is as it was, and neither stage nor journal is left."""
    old, new = both

    def fail() -> None:
        raise RuntimeError("as asked")

    number = 0
    while True:
        host, state = tmp_path / f"host{number}", tmp_path / f"state{number}"
        host.mkdir()
        make_old(host)
        step, told = interrupted_at(number, fail)
        try:
            write(host, state, everything(), step=step)
        except RuntimeError:
            is_done = "written done" in told
            if is_done or told[-1] == "write done":
                recovered(host, state)
            assert content_of(host) == (new if is_done else old), told[-1]
            assert left_in(state) == [], told[-1]
        else:
            break
        number += 1
    assert content_of(host) == new
    assert number > 40


def killed(place: Path, *, files: int, every: int) -> str:
    """Run the program that is killed at every step, and return what it told."""
    program = [sys.executable, "-m", "tests.harness.programs.killed_commit", os.fspath(place), str(files), str(every)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.user_soak
def test_kill_9_at_any_step_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    """A commit is killed at each of its steps, and its recovery at those of some; either tree is found."""
    told = killed(tmp_path, files=2, every=7)
    assert "old" in told
    assert "new" in told


def test_a_conflict_refuses_everything(host: Path, state: Path) -> None:
    """One path that differs on the host, and nothing at all is written; the error names it."""
    before = content_of(host)
    with pytest.raises(WorkspaceConflict, match="untouched: it was changed") as caught:
        write(host, state, [file("fine"), file("untouched", what="modified", conflict="it was changed")])
    assert caught.value.paths == {"untouched": "it was changed"}
    assert content_of(host) == before


def test_ours_is_the_sandboxs_and_theirs_the_hosts(host: Path, state: Path) -> None:
    """A conflict that was decided is written, or left and told."""
    wanted = [file(f"kept/changed{n}", b"mine", "modified", conflict="changed") for n in range(2)]
    done = write(host, state, wanted, choose={"kept/changed0": "ours", "kept/changed1": "theirs"})
    assert (host / "kept/changed0").read_bytes() == b"mine"
    assert (host / "kept/changed1").read_bytes() == b"old 1\n"
    assert done.written == ("kept/changed0",)
    assert done.left == {"kept/changed1": "the host's version was kept"}


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (file("untouched"), "it has appeared"),
        (file("nothing", what="modified"), "it is gone"),
        (file("untouched", what="modified", old_size=3), "it has changed"),
        (file("untouched/below"), "not a folder"),
        (file("old-link/below"), "not a folder"),
        (file("kept", what="modified"), "not removed"),
    ],
)
def test_what_the_host_has_by_now_is_a_conflict(host: Path, state: Path, wanted: object, why: str) -> None:
    """The commit looks itself, too, since the comparison was some time ago."""
    before = content_of(host)
    with pytest.raises(WorkspaceConflict, match=why):
        write(host, state, [wanted])  # type: ignore[list-item]
    assert content_of(host) == before


def test_a_file_changed_since_the_comparison_is_a_conflict(host: Path, state: Path) -> None:
    """The caller says when it began to compare; a change time from then on is somebody else's."""
    since = os.stat(host / "untouched").st_ctime_ns
    with pytest.raises(WorkspaceConflict, match="it has changed"):
        write(host, state, [file("untouched", what="modified")], unchanged_since_ns=since)
    write(host, state, [file("untouched", what="modified")], unchanged_since_ns=since + 1)
    assert (host / "untouched").read_bytes() == b"new\n"


def test_a_folder_that_holds_more_stays(host: Path, state: Path) -> None:
    """What the sandbox did not see in a folder that it removed is not removed with it."""
    (host / "goes" / ".env").write_text("hidden")
    wanted = [removed("goes", "directory"), removed("goes/deeper", "directory"), removed("goes/deeper/one")]
    done = write(host, state, wanted)
    assert (host / "goes" / ".env").read_text() == "hidden"
    assert not (host / "goes" / "deeper").exists()
    assert list(done.left or ()) == ["goes"]


def test_set_id_bits_are_not_carried(host: Path, state: Path) -> None:
    """A guest's set-id program becomes a plain one."""
    write(host, state, [file("program", mode=0o6755)])
    assert (host / "program").stat().st_mode & 0o7777 == 0o755


@pytest.mark.root
def test_what_root_writes_is_the_folders_owners(host: Path, state: Path) -> None:
    """Files, folders and links get the owner that was given, also where an existing file is replaced."""
    write(host, state, everything(), owner=(1234, 2345))
    for name in ("added", "added/deep", "added/deep/0", "kept/changed0", "new-link", "renamed", "turns"):
        facts = os.lstat(host / name)
        assert (facts.st_uid, facts.st_gid) == (1234, 2345), name


def test_content_that_is_not_what_was_seen_is_refused(host: Path, state: Path) -> None:
    """The hash of what is written is compared with that of the change."""
    before = content_of(host)
    change, _ = file("fine", b"seen")
    with pytest.raises(InvalidRequest, match="has changed since the comparison"):
        write(host, state, [(change, b"evil")])
    assert content_of(host) == before
    assert left_in(state) == []


@pytest.mark.parametrize("path", ["../out", "/etc/x", "a//b", "a/./b", "", ".git/config", "sub/.GIT/hooks/x", "a\0b"])
def test_a_path_that_leads_elsewhere_is_refused(host: Path, state: Path, path: str) -> None:
    """Paths are plain names below the folder, and none is git's."""
    before = content_of(host)
    with pytest.raises(InvalidRequest):
        write(host, state, [file(path)] if path else [(file("x")[0], b""), file("/")])
    assert content_of(host) == before


def test_names_of_any_bytes_are_written(host: Path, state: Path) -> None:
    """A line feed, bidi controls and bytes that are no UTF-8 are names like others, also in the journal."""
    names = ["line\nfeed", "bidi\u202etxt", os.fsdecode(b"\xff\xfe"), "-rf", " "]
    write(host, state, [file(name) for name in names])
    assert {os.fsencode(name) for name in names} <= set(os.listdir(os.fsencode(host)))


def test_two_commits_wait_for_each_other(host: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who finds the folder's lock held waits, and then refuses."""
    monkeypatch.setattr(journals.locked.__wrapped__, "__defaults__", (0.1,))  # type: ignore[attr-defined]
    with journals.open_records(os.fspath(state)) as at, journals.locked(at, journals.key_of(host.stat())) as is_ours:
        assert is_ours
        with pytest.raises(WorkspaceFailed, match="another commit"):
            write(host, state, [file("fine")])


# What an interrupted commit left.


def interrupt(host: Path, state: Path, name: str) -> None:
    """Leave a commit as a kill at a named step does: in a child of this process."""
    child = os.fork()
    if child == 0:
        try:
            write(host, state, everything(), step=lambda told: os.kill(os.getpid(), 9) if told == name else None)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


def test_all_folders_are_recovered_at_once(tmp_path: Path, host: Path, state: Path) -> None:
    """`cloche gc` needs no folder's name: the journal has it."""
    before = content_of(host)
    interrupt(host, state, "folders synced")
    assert content_of(host) != before
    (told,) = recover_all(os.fspath(state))
    assert told == f"{host}: an interrupted commit was undone"
    assert content_of(host) == before


def test_the_next_commit_recovers_first(host: Path, state: Path) -> None:
    """What was interrupted is undone before anything new is written."""
    before = content_of(host)
    interrupt(host, state, "after 3")
    write(host, state, [file("next")])
    now = content_of(host)
    del now["next"]
    assert now == before


def test_a_journal_of_another_folder_is_left(
    tmp_path: Path, host: Path, state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the path has another folder by now, neither is touched."""
    interrupt(host, state, "after 3")
    host.rename(tmp_path / "elsewhere")
    host.mkdir()
    (told,) = recover_all(os.fspath(state))
    assert "another folder now" in told
    assert list(host.iterdir()) == []
    assert len(left_in(state)) == 1
    assert "undone" in recovered(tmp_path / "elsewhere", state)


def test_what_the_host_wrote_after_a_kill_is_kept(host: Path, state: Path) -> None:
    """A path that somebody has replaced since keeps that, and the old version stays in the stage, which is named."""
    interrupt(host, state, "folders synced")
    (host / "kept/changed0").unlink()
    (host / "kept/changed0").write_text("the user's newer one")
    told = recovered(host, state)
    assert (host / "kept/changed0").read_text() == "the user's newer one"
    assert (host / "kept/changed1").read_text() == "old 1\n"
    (stage,) = host.glob(".cloche-*")
    assert stage.name in told
    assert "kept/changed0 (in n" in told
    assert "old 0\n" in [one.read_text() for one in stage.iterdir() if one.is_file()]
    assert recover_all(os.fspath(state)) == []
    assert stage.is_dir()


def test_what_was_written_into_a_new_file_after_a_kill_is_kept(host: Path, state: Path) -> None:
    """A file that was to be taken back, and was written to since, stays with its folders."""
    interrupt(host, state, "folders synced")
    (host / "added/deep/0").write_text("the user's own words")
    recovered(host, state)
    assert (host / "added/deep/0").read_text() == "the user's own words"
    assert not (host / "added/deep/1").exists()
    assert list(host.glob(".cloche-*")) == []


def test_a_folder_that_looks_like_a_stage_is_left(host: Path, state: Path) -> None:
    """A checkout may have such a name; only a journal makes a folder a stage."""
    fake = host / f".cloche-{'0' * 32}"
    fake.mkdir(mode=0o700)
    (fake / "n0").write_text("the user's")
    interrupt(host, state, "staged")
    recovered(host, state)
    write(host, state, [file("fine")])
    recover_all(os.fspath(state))
    assert (fake / "n0").read_text() == "the user's"
    assert [one.name for one in host.glob(".cloche-*")] == [fake.name]


def test_a_stage_whose_name_is_taken_is_not_used(host: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever guesses the name gets nothing: the commit refuses, and their folder or link stays."""
    before = content_of(host)
    for make in (Path.mkdir, lambda path: path.symlink_to("kept")):
        taken = host / f".cloche-{b'guessed guessed!'.hex()}"
        make(taken)
        with monkeypatch.context() as patched:
            patched.setattr(os, "urandom", lambda _: b"guessed guessed!")
            with pytest.raises(WorkspaceFailed, match="File exists"):
                write(host, state, everything())
        assert os.path.lexists(taken)
        assert left_in(state) == []
        taken.unlink() if taken.is_symlink() else taken.rmdir()
    assert content_of(host) == before


@pytest.mark.parametrize("name", ["synced", "between kept/changed1", "folders synced"])
def test_what_fails_on_the_disk_is_told_and_undone(host: Path, state: Path, name: str) -> None:
    """A full disk or a folder that may not be written is the environment's fault; the error has the kernel's words."""
    before = content_of(host)

    def fill() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(WorkspaceFailed, match="as it was: No space left"):
        write(host, state, everything(), step=at_step(name, fill))
    assert content_of(host) == before
    assert left_in(state) == []


def test_a_stage_that_was_replaced_is_left(host: Path, state: Path) -> None:
    """A folder of the stage's name and another inode is not removed."""
    interrupt(host, state, "staged")
    (stage,) = host.glob(".cloche-*")
    stage.rename(host / "away")
    stage.mkdir(mode=0o700)
    (stage / "n0").write_text("not ours")
    recovered(host, state)
    assert (stage / "n0").read_text() == "not ours"


def test_a_forged_journal_is_refused(host: Path, state: Path) -> None:
    """A journal that others may write, or whose paths lead out, is read by nobody; one in the folder never is."""
    interrupt(host, state, "folders synced")
    (journal,) = (state / "workspaces").glob("*.json")
    good = journal.read_text()
    (host / "workspaces").mkdir()
    (host / "workspaces" / journal.name).write_text(good)
    journal.chmod(0o644)
    with pytest.raises(WorkspaceFailed, match="not this user's alone"):
        recovered(host, state)
    journal.chmod(0o600)
    for old, new in (
        ('"kept/changed0"', '"../changed0"'),
        ('"slot": "n', '"slot": "../n'),
        ('"version": 1', '"version": 9'),
    ):
        journal.write_text(good.replace(old, new))
        with pytest.raises(WorkspaceFailed, match="not written by Cloche"):
            recovered(host, state)
    (state / "workspaces").chmod(0o755)
    with pytest.raises(WorkspaceFailed, match="yours alone"):
        recovered(host, state)


# Somebody else is at work in the folder, between look and act.


def at_step(name: str, act: object) -> object:
    """Return a function for `step` that acts once, at a named step."""

    def step(told: str) -> None:
        nonlocal act
        if told == name and act is not None:
            now, act = act, None
            now()  # type: ignore[operator]

    return step


@pytest.mark.parametrize("name", ["staged", "written applying", "before 3", "between kept/changed0", "before 12"])
def test_a_link_swapped_in_for_a_folder_is_not_followed(tmp_path: Path, host: Path, state: Path, name: str) -> None:
    """Nothing outside is written, replaced or removed through it, and no file of the host's is lost."""
    outside = tmp_path / "outside"
    outside.mkdir()
    for one in ("changed0", "changed1", "removed0", "removed1"):
        (outside / one).write_text("outside")

    def swap() -> None:
        (host / "kept").rename(host / "kept-away")
        (host / "kept").symlink_to(outside)

    before, beyond = content_of(host), content_of(outside)
    with pytest.raises(WorkspaceConflict):
        write(host, state, everything(), step=at_step(name, swap))
    assert content_of(outside) == beyond
    texts = {data for mode, _, _, data in content_of(host).values() if stat.S_ISREG(mode)}
    assert {data for mode, _, _, data in before.values() if stat.S_ISREG(mode)} <= texts
    assert not (host / "added").exists()


@pytest.mark.parametrize("name", ["between kept/changed1", "written applying", "staged"])
def test_a_file_that_the_host_changes_meanwhile_is_kept(host: Path, state: Path, name: str) -> None:
    """Whenever another writes to a file that is to be replaced, its text is there afterwards, all else as before."""
    before = content_of(host)
    target = host / "kept/changed1"
    with pytest.raises(WorkspaceConflict, match="kept/changed1"):
        write(host, state, everything(), step=at_step(name, lambda: target.write_text("the host's newer text")))
    assert target.read_text() == "the host's newer text"
    assert {**content_of(host), "kept/changed1": None} == {**before, "kept/changed1": None}
    assert left_in(state) == []


def test_a_file_written_through_an_open_descriptor_is_kept(host: Path, state: Path) -> None:
    """Text that reaches the old file after it was exchanged, and before the end, stops the commit."""
    with open(host / "kept/changed1", "a") as editor:

        def late() -> None:
            editor.write("late")
            editor.flush()

        with pytest.raises(WorkspaceConflict, match="kept/changed1"):
            write(host, state, [file("kept/changed1", what="modified"), file("z")], step=at_step("after 0", late))
    assert (host / "kept/changed1").read_text() == "old 1\nlate"


def test_a_file_that_appears_meanwhile_is_not_overwritten(host: Path, state: Path) -> None:
    """A new name is taken by nobody else, or the commit stops."""
    before = content_of(host)
    appear = at_step("between z", lambda: (host / "z").write_text("the host's"))
    with pytest.raises(WorkspaceConflict, match="z: "):
        write(host, state, [*everything(), file("z")], step=appear)
    assert (host / "z").read_text() == "the host's"
    (host / "z").unlink()
    assert content_of(host) == before


def test_a_file_that_becomes_a_folder_meanwhile_is_kept(host: Path, state: Path) -> None:
    """A folder with files that takes a file's place comes back with them."""

    def swap() -> None:
        (host / "untouched").unlink()
        (host / "untouched").mkdir()
        (host / "untouched" / "deep").write_text("the host's")

    with pytest.raises(WorkspaceConflict, match="untouched"):
        write(host, state, [file("untouched", what="modified")], step=at_step("between untouched", swap))
    assert (host / "untouched" / "deep").read_text() == "the host's"
    assert left_in(state) == []
    assert list(host.glob(".cloche-*")) == []


def test_a_file_put_into_a_removed_folder_meanwhile_is_kept(host: Path, state: Path) -> None:
    """A folder goes only while it is empty."""
    wanted = [removed("goes", "directory"), removed("goes/deeper", "directory"), removed("goes/deeper/one")]
    before = content_of(host)
    late = at_step("between goes/deeper", lambda: (host / "goes/deeper/late").write_text("the host's"))
    with pytest.raises(WorkspaceConflict, match="goes/deeper"):
        write(host, state, wanted, step=late)
    assert (host / "goes/deeper/late").read_text() == "the host's"
    (host / "goes/deeper/late").unlink()
    assert content_of(host) == before


def test_a_file_of_several_names_keeps_its_content_elsewhere(tmp_path: Path, host: Path, state: Path) -> None:
    """Neither new content nor a new mode reaches a file outside by a hard link."""
    for name in ("kept/changed0", "script"):
        os.link(host / name, tmp_path / name.replace("/", "-"))
    write(host, state, everything())
    assert (tmp_path / "kept-changed0").read_text() == "old 0\n"
    assert (tmp_path / "script").stat().st_mode & 0o777 == 0o644
    assert (host / "script").stat().st_mode & 0o777 == 0o755


def test_two_names_of_one_file_are_both_replaced(host: Path, state: Path) -> None:
    """That the first rename sets the file's change time is no conflict of the second."""
    write(host, state, [file("moved", b"1", "modified"), file("moved-twin", b"2", "modified")])
    assert ((host / "moved").read_bytes(), (host / "moved-twin").read_bytes()) == (b"1", b"2")


def test_a_commit_that_nobody_waits_for_ends_while_it_stages(
    host: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of as many files as one likes no more are written beside; the folder is as it was, and nothing is left there."""
    monkeypatch.setenv("XDG_STATE_HOME", os.fspath(state))
    (state / "cloche" / "workspaces").mkdir(parents=True, mode=0o700)
    before = content_of(host)
    most = 0

    def check() -> None:
        nonlocal most
        most = max([most, *(len(list(stage.iterdir())) for stage in host.glob(".cloche-*"))])
        if most >= 3:
            raise KeyboardInterrupt

    choice = CommitChoice(paths=None, dangerous=True, ours=(), theirs=())
    snapshot, found = (
        snapshot_of([file(f"new{number}") for number in range(20)]),
        open_new(FolderOptions(path=str(host))),
    )
    with pytest.raises(KeyboardInterrupt):
        write_changes(found, snapshot, None, "name", choice, None, None, check)
    found.close()
    snapshot.close()
    assert (most, content_of(host), left_in(state / "cloche" / "workspaces")) == (3, before, [])


def test_a_link_on_the_host_is_replaced_and_not_written_through(tmp_path: Path, host: Path, state: Path) -> None:
    """What it leads to keeps its text."""
    (tmp_path / "outside").write_text("outside")
    (host / "way-out").symlink_to(tmp_path / "outside")
    write(host, state, [file("way-out", what="modified")])
    assert (tmp_path / "outside").read_text() == "outside"
    assert not (host / "way-out").is_symlink()


@pytest.mark.root
@pytest.mark.parametrize("is_bind", [True, False])
def test_a_mount_below_the_folder_is_not_written_to(tmp_path: Path, host: Path, state: Path, is_bind: bool) -> None:
    """Neither another file system nor the same one at another place: not by a look, nor when it comes in between."""
    outside = tmp_path / "outside"
    outside.mkdir()
    words = ["--bind", outside] if is_bind else ["-t", "tmpfs", "none"]
    mount = ["mount", *map(os.fspath, words), os.fspath(host / "kept")]
    before = content_of(host)
    subprocess.run(mount, check=True)
    try:
        with pytest.raises(WorkspaceFailed, match="mounted there"):
            write(host, state, [file("fine"), file("kept/new")])
        assert list((host / "kept").iterdir()) == []
    finally:
        subprocess.run(["umount", host / "kept"], check=True)
    try:
        swap = at_step("before 1", lambda: subprocess.run(mount, check=True))
        with pytest.raises(WorkspaceFailed, match="mounted there"):
            write(host, state, [file("fine"), file("kept/new")], step=swap)
        assert list((host / "kept").iterdir()) == []
    finally:
        subprocess.run(["umount", host / "kept"], check=True)
    assert content_of(host) == before
    assert link("x", "y")[0].kind == "link"
    assert folder("x")[0].kind == "directory"
