"""Snapshots of an environment: what they have, what they never have, and the script that sets one again."""

import json
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from cloche import InvalidRequest
from cloche.config.keys import Settings
from cloche.core.errors import Conflict, NotFound, RecordsFailed
from cloche.hostfs import open_folder
from cloche.records.database import Database
from cloche.records.environment import (
    compare_dependencies,
    compare_snapshots,
    delete_snapshot,
    get_snapshot,
    list_snapshots,
    take_snapshot,
)
from cloche.records.environment_variables import keep_variables
from cloche.records.replication import SCRIPT, render_script, write_script

SECRET = "k9-zanzibar-4471"
KEY = bytes(32)
SHELLS: Mapping[str, Sequence[str]] = {
    name: [path, *more]
    for name, more in {"dash": (), "bash": (), "busybox": ("ash",), "zsh": ("-f",)}.items()
    if (path := shutil.which(name))
}


@pytest.fixture
def database(location: str) -> Iterator[Database]:
    """Open a database of its own."""
    opened = Database(location)
    yield opened
    opened.close()


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """Return a folder with a dependency in it."""
    folder = tmp_path / "workspace"
    folder.mkdir()
    folder.joinpath("requirements.txt").write_text("rich==13.9.3\n")
    return folder


@contextmanager
def opened(folder: Path) -> Iterator[int]:
    """Hold a folder open."""
    fd = open_folder(folder)
    try:
        yield fd
    finally:
        os.close(fd)


def taken(database: Database, workspace: Path, env: Mapping[str, str] | None = None, **more: Any) -> dict[str, Any]:
    """Take a snapshot."""
    with opened(workspace) as fd:
        return take_snapshot(database, fd, workspace_path=str(workspace), settings=Settings(), env=env, **more)


def test_a_snapshot_has_what_its_document_says(database: Database, workspace: Path) -> None:
    """Variables, dependencies, git and settings; the file, the row and the answer are the same."""
    env = {"PATH": "/bin", "OPENAI_API_KEY": SECRET, "a-b": "x", "LONG": "y" * 1025, "EDGE": "z" * 1024, "N": "a\0b"}
    found = taken(database, workspace, env, session_id="agent-7", label="before upgrade")
    assert found == get_snapshot(database, found["id"])
    at = Path(database.folder, "snapshots", found["file"])
    assert json.loads(at.read_text()) == {**found, "project": "default"}
    assert (stat.S_IMODE(at.stat().st_mode), stat.S_IMODE(at.parent.stat().st_mode)) == (0o600, 0o700)
    assert found | {"id": "", "createdAt": "", "file": "", "git": found["git"]["isRepository"]} == {
        "id": "",
        "version": 1,
        "createdAt": "",
        "sessionId": "agent-7",
        "label": "before upgrade",
        "workspacePath": str(workspace),
        "env": {"EDGE": "z" * 1024, "OPENAI_API_KEY": "***", "PATH": "/bin"},
        "maskedKeys": ["OPENAI_API_KEY"],
        "skippedEnv": [
            {"key": "LONG", "reason": "length"},
            {"key": "N", "reason": "encoding"},
            {"key": "a-b", "reason": "name"},
        ],
        "dependencies": [
            {"ecosystem": "python", "manager": "pip", "name": "rich", "version": "13.9.3", "source": "requirements.txt"}
        ],
        "git": False,
        "sandbox": {"runtime": "local", "timeout": 30.0, "memoryLimit": "256m"},
        "notes": [],
        "file": "",
    }
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z", found["createdAt"])


def test_without_variables_it_has_those_of_a_guest(database: Database, workspace: Path) -> None:
    """And not those of this process."""
    found = taken(database, workspace)["env"]
    assert {"PATH", "HOME", "LANG"} <= set(found)
    assert found["HOME"] == "/workspace"


SECRET_NAMES = (
    "API_KEY", "openai_api_key", "GH_TOKEN", "MY_SECRET_2", "DB_PASSWORD", "Password1", "AUTHOR", "X_CREDENTIALS",
    "PRIVATE_KEY", "AWS_ACCESS_KEY_ID", "PGPASSWD",
)  # fmt: skip
MASKED = {
    **dict.fromkeys(SECRET_NAMES, SECRET),
    "DATABASE_URL": f"postgres://user:{SECRET}@db.example/x",
    "SLASHED": f"postgres://user:{SECRET}/x@db.example/x",
    "PROXY": f"see http://:{SECRET}@proxy.example:3128 for more",
    "COPY_OF_ONE": f"prefix-{SECRET}",
    "LOOKS_LIKE_ONE": "ghp_" + "a1B2" * 9,
    "DSN": f"host=db password={SECRET}",
}  # fmt: skip
PLAIN = {
    "PATH": "/usr/bin",
    "ADDRESS": "http://example.org:80/a@b",
    "MAIL": "a@example.org",
    "SSH": "ssh://git@h/x",
    "Z": "",
}


def test_a_secret_is_nowhere(database: Database, workspace: Path) -> None:
    """Neither in an answer nor in any file of ours, nor its hash: not with our key, and not without."""
    found = taken(database, workspace, {**MASKED, **PLAIN, "b-ad_TOKEN": SECRET, "LONG_TOKEN": SECRET * 99})
    changed = taken(database, workspace, dict.fromkeys(MASKED, "other") | PLAIN)
    assert found["env"] == {**dict.fromkeys(MASKED, "***"), **PLAIN}
    listed = list_snapshots(database)
    compared = compare_snapshots(database, found["id"], changed["id"])
    answers = json.dumps([found, listed, compared, get_snapshot(database, found["id"])])
    files = {path.name: path.read_bytes() for path in Path(database.folder).rglob("*") if path.is_file()}
    assert {*(["records.db"] if database.is_sqlite else []), "snapshots.key", found["file"]} <= set(files)
    assert SECRET not in answers
    assert [name for name, data in files.items() if SECRET.encode() in data] == []
    with database.reading() as session:
        row = session.execute(text("SELECT CAST(document AS TEXT) FROM environment_snapshots")).scalars().first()
    stored = json.loads(row or "")
    hashes = [*stored["_hashes"].values()]
    assert len({*hashes}) == len(MASKED)
    assert [one for one in hashes if one in answers or one.encode() in files[found["file"]]] == []


def test_a_masked_value_that_changed_is_told(database: Database, workspace: Path) -> None:
    """By its hash; a row that was made from its file has none, and then it is unknown."""
    one = taken(database, workspace, {"A_TOKEN": "one", "B_TOKEN": "same", "PATH": "/a", "GONE": "x"})
    workspace.joinpath("requirements.txt").write_text("rich==13.9.4\nattrs==1\n")
    two = taken(database, workspace, {"A_TOKEN": "two", "B_TOKEN": "same", "PATH": "/b", "NEW": "y"})
    attrs = {"ecosystem": "python", "manager": "pip", "name": "attrs", "version": "1", "source": "requirements.txt"}
    expected = {
        "id1": one["id"],
        "id2": two["id"],
        "env": {
            "added": {"NEW": "y"},
            "removed": {"GONE": "x"},
            "changed": {"A_TOKEN": ["***", "***"], "PATH": ["/a", "/b"]},
        },
        "dependencies": {
            "added": [attrs],
            "removed": [],
            "changed": [{"name": "rich", "ecosystem": "python", "from": "13.9.3", "to": "13.9.4"}],
        },
    }
    assert compare_snapshots(database, one["id"], two["id"]) == expected
    with database.writing() as session:
        session.execute(text("DELETE FROM environment_snapshots WHERE id = :id"), {"id": two["id"]})
    found = compare_snapshots(database, one["id"], two["id"])["env"]
    assert (found["unknown"], found["changed"]) == (["A_TOKEN", "B_TOKEN"], {"PATH": ["/a", "/b"]})


def test_several_versions_of_one_package_are_compared() -> None:
    """What has another version is changed; where it is not clear which one became which, they come and go."""

    def of(*versions: str | None) -> list[dict[str, Any]]:
        return [{"ecosystem": "javascript", "name": "a", "version": version} for version in versions]

    assert compare_dependencies(of("1", "2"), of("2", "3"))["changed"] == [
        {"name": "a", "ecosystem": "javascript", "from": "1", "to": "3"}
    ]
    assert compare_dependencies(of("1"), of("1", None)) == {"added": of(None), "removed": [], "changed": []}
    assert compare_dependencies(of("1", "2"), of("3")) == {"added": of("3"), "removed": of("1", "2"), "changed": []}


def test_file_and_row_stand_in_for_each_other(database: Database, workspace: Path) -> None:
    """A missing row is made from the file, a missing file is told, either is enough to delete, and neither is none."""
    ids = [taken(database, workspace, label=name)["id"] for name in ("row gone", "file gone", "both there")]
    files = [Path(database.folder, "snapshots", f"{one}.json") for one in ids]
    with database.writing() as session:
        session.execute(text("DELETE FROM environment_snapshots WHERE id = :id"), {"id": ids[0]})
    files[1].unlink()
    assert [one["label"] for one in list_snapshots(database)["items"]] == ["both there", "file gone"]
    assert [get_snapshot(database, one).get("fileMissing", False) for one in ids] == [False, True, False]
    assert [one["label"] for one in list_snapshots(database)["items"]] == ["both there", "file gone", "row gone"]
    with database.writing() as session:
        session.execute(text("DELETE FROM environment_snapshots WHERE id = :id"), {"id": ids[0]})
    for one in ids:
        delete_snapshot(database, one)
        for refused in (get_snapshot, delete_snapshot):
            with pytest.raises(NotFound, match="there is no snapshot snap_"):
                refused(database, one)
    assert [path for path in files if path.exists()] == []


def test_what_another_project_has_is_not_there(database: Database, workspace: Path) -> None:
    """Its row, and a file from which a row would be made."""
    one = taken(database, workspace, project="other")["id"]
    for _ in range(2):
        for refused in (get_snapshot, delete_snapshot):
            with pytest.raises(NotFound):
                refused(database, one)
        with pytest.raises(NotFound):
            compare_snapshots(database, one, one)
        with database.writing() as session:
            session.execute(text("DELETE FROM environment_snapshots"))
    assert list_snapshots(database)["items"] == []
    assert get_snapshot(database, one, project="other")["id"] == one


def test_a_damaged_file_is_said(database: Database, workspace: Path) -> None:
    """And a link in place of one is not followed."""
    one = taken(database, workspace)
    path = Path(database.folder, "snapshots", one["file"])
    for damage in (b"{", b"[]", b"[" * 100_000, path.read_bytes().replace(one["id"].encode(), b"snap_x", 1)):
        path.write_bytes(damage)
        with database.writing() as session:
            session.execute(text("DELETE FROM environment_snapshots"))
        with pytest.raises(RecordsFailed, match=r"is damaged: .*; restore it, or remove it"):
            get_snapshot(database, one["id"])
    path.unlink()
    path.symlink_to(workspace / "requirements.txt")
    with pytest.raises(RecordsFailed, match="cannot be used"):
        get_snapshot(database, one["id"])


def test_a_key_that_others_may_read_is_refused(database: Database, workspace: Path) -> None:
    """And one that is cut short."""
    taken(database, workspace)
    key = Path(database.folder, "snapshots.key")
    assert (stat.S_IMODE(key.stat().st_mode), key.stat().st_nlink, len(key.read_bytes())) == (0o600, 1, 32)
    key.chmod(0o640)
    with pytest.raises(RecordsFailed, match="readable by its owner only"):
        taken(database, workspace)
    key.chmod(0o600)
    key.write_bytes(b"short")
    with pytest.raises(RecordsFailed, match="must have 32 bytes"):
        taken(database, workspace)


def test_the_list_is_by_session_and_page(database: Database, workspace: Path) -> None:
    """The newest first, with masks, and without what is long."""
    ids = [taken(database, workspace, {"A_TOKEN": SECRET}, session_id=name)["id"] for name in ("a", "b", "a")]
    page = list_snapshots(database, session_id="a", limit=1)
    assert [one["id"] for one in page["items"]] == [ids[2]]
    rest = list_snapshots(database, session_id="a", cursor=page["nextCursor"])
    assert ([one["id"] for one in rest["items"]], rest["nextCursor"]) == ([ids[0]], None)
    assert rest["items"][0]["env"] == {"A_TOKEN": "***"}
    assert "status" not in rest["items"][0]["git"]


def test_what_is_no_label_is_refused(database: Database, workspace: Path) -> None:
    """Too long, or no text; nothing is written then."""
    for wrong in ({"label": "x" * 201}, {"session_id": "x" * 65}, {"label": "\udcff"}, {"session_id": "\0"}):
        with pytest.raises(InvalidRequest, match="it is not text of at most"):
            taken(database, workspace, **wrong)
    with pytest.raises(InvalidRequest, match="2001 variables are more than 2000"):
        taken(database, workspace, {f"V{number}": "" for number in range(2001)})
    with pytest.raises(InvalidRequest, match="the values have more than 262144 characters"):
        taken(database, workspace, {f"V{number}": "x" * 1024 for number in range(257)})
    assert list(Path(database.folder).rglob("snap_*")) == []


# the script


def snapshot_of(env: Mapping[str, str], **more: Any) -> dict[str, Any]:
    """Return what of a snapshot the script is made of."""
    kept = keep_variables(env, KEY)
    skipped = [{"key": name, "reason": reason} for name, reason in kept.skipped]
    facts = {"id": "snap_x", "createdAt": "2026", "workspacePath": "/w", "label": None, **more}
    return {**facts, "env": kept.env, "maskedKeys": kept.masked, "skippedEnv": skipped}


def environment_after(
    folder: Path, script: str, shell: Sequence[str], env: Mapping[str, str] | None = None
) -> dict[bytes, bytes]:
    """Return the environment that a program gets which a shell starts after the script."""
    folder.joinpath(SCRIPT).write_text(script, newline="")
    print_all = shutil.which("env")
    done = subprocess.run(
        [*shell, "-c", f". ./{SCRIPT} && exec {print_all} -0"],
        cwd=folder,
        env=env or {},
        capture_output=True,
        check=True,
    )
    assert done.stderr == b""
    return dict(row.split(b"=", 1) for row in done.stdout.split(b"\0")[:-1])


ATTACKS = [
    "$(touch x)", "`touch x`", "${x:-$(touch x)}", '"; touch x; "', "'; touch x; '", "\n touch x\n", "\\", "\\\\",
    '\\"', "!!", "\\!x!", "$'\\ntouch x\\n'", "a\\\ntouch x", "$((x=1))", "~", "*", "a b  c", "\t", "\r\n touch x",
    "#", "-n", "\x1b]0;x\x07", "%s%n", "\x01\x81\x88\x82", "\u4e2d`touch x`", "\u4e2d\\$(touch x)", 'é"; touch x; "',
    "=", "", "\n\n", "\u202e\u200b\ufeff", "$HOME", "${cloche_newline}", "x\n", "\n", "_\n", "\U0001f600!",
]  # fmt: skip
NAIVE = 'export A="%s"\n'


@pytest.mark.parametrize("shell", SHELLS)
def test_no_value_is_obeyed_and_every_value_is_the_same(shell: str, tmp_path: Path) -> None:
    """Each attack as a value, all in one script; a naive script runs the first of them."""
    env = {f"A{number}": value for number, value in enumerate(ATTACKS)}
    script = render_script(snapshot_of(env, label="x\ntouch x", workspacePath="/a\ntouch x\u2028touch x\r"))
    found = environment_after(tmp_path, script.text, SHELLS[shell])
    assert {name: found[name.encode()].decode() for name in env} == env
    assert script.variables == len(env)
    assert [path.name for path in tmp_path.iterdir()] == [SCRIPT]
    assert {name for name in found if name not in map(str.encode, env)} <= {b"PWD", b"_", b"SHLVL", b"OLDPWD", b"PATH"}
    assert not re.search(r"[^\t\n -~]", re.sub(r"[\u4e2d\u00e9\U0001f600]", "", script.text))
    environment_after(tmp_path, NAIVE % ATTACKS[0], SHELLS[shell], {"PATH": os.environ["PATH"]})
    assert tmp_path.joinpath("x").exists()


CHARACTERS = st.one_of(
    st.sampled_from("\\\"$`!'\n\t (){}~*#;&|<>=\x1b\r\x7f\u4e2d"), st.characters(codec="utf-8", exclude_characters="\0")
)
VALUES = st.text(CHARACTERS, max_size=40)


@given(values=st.lists(VALUES, min_size=1, max_size=30))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_values_are_the_same_in_all_shells(values: list[str], tmp_path: Path) -> None:
    """Whatever text it is, every shell that is here gives the environment that the snapshot has."""
    script = render_script(snapshot_of({f"A{number}": value for number, value in enumerate(values)}))
    masked = set(script.placeholders)
    for shell in SHELLS.values():
        found = environment_after(tmp_path, script.text, shell)
        for number, value in enumerate(values):
            name = f"A{number}"
            assert found[name.encode()].decode() == ("" if name in masked else value)


def test_no_encoding_swallows_a_backslash(tmp_path: Path) -> None:
    """In GBK the last byte of a character and a backslash are one: without a gap between them a command is run."""
    made = ["localedef", "-i", "zh_CN", "-f", "GBK", tmp_path / "zh_CN.GBK"]
    subprocess.run(made, check=False, capture_output=True)
    env = {"LOCPATH": str(tmp_path), "LC_ALL": "zh_CN.GBK", "PATH": os.environ["PATH"]}
    value = "\u4e2d$(touch x)"
    script = render_script(snapshot_of({"A": value})).text
    for shell in SHELLS.values():
        assert environment_after(tmp_path, script, shell, env)[b"A"].decode() == value
    assert not tmp_path.joinpath("x").exists()
    if tmp_path.joinpath("zh_CN.GBK").exists():  # where the system has the encoding
        environment_after(tmp_path, script.replace('""', ""), SHELLS["bash"], env)
        assert tmp_path.joinpath("x").exists()


def test_the_script_has_placeholders_and_says_what_is_left_out(tmp_path: Path) -> None:
    """A secret is empty; what shells act on by themselves is not set; comments hold one line each."""
    env = {
        "A_TOKEN": SECRET,
        "B": "1",
        "PS4": "$(touch x)",
        "PROMPT_COMMAND": "touch x",
        "LD_PRELOAD": "/x",
        "UID": "0",
    }
    script = render_script(snapshot_of({**env, "a-b": "x", "C": "y" * 1025}, label="one\ntwo"))
    assert script.as_dict() == {
        "path": ".cloche-env-replication.sh",
        "variables": 1,
        "placeholders": ["A_TOKEN"],
        "skipped": [
            {"key": "C", "reason": "length"},
            {"key": "a-b", "reason": "name"},
            *({"key": name, "reason": "shell"} for name in ("LD_PRELOAD", "PROMPT_COMMAND", "PS4", "UID")),
        ],
    }
    lines = script.text.splitlines()
    assert {"# Label: one\\ntwo", 'export B="1"', 'export A_TOKEN=""', "#   C: it is too long"} <= set(lines)
    for shell in SHELLS.values():
        found = environment_after(tmp_path, script.text, shell)
        assert (found[b"A_TOKEN"], found[b"B"], found.get(b"PS4"), found.get(b"cloche_newline")) == (
            b"",
            b"1",
            None,
            None,
        )


def test_a_script_takes_the_place_of_nothing_by_itself(tmp_path: Path) -> None:
    """A file stays unless it is to be overwritten, and a link is replaced then: where it leads nothing changes."""
    script = render_script(snapshot_of({"A": "1"}))
    outside = tmp_path / "outside"
    outside.write_text("kept")
    folder = tmp_path / "folder"
    folder.mkdir()
    at = folder / SCRIPT
    with opened(folder) as fd:
        write_script(fd, script)
        assert (at.read_text(), stat.S_IMODE(at.stat().st_mode), at.stat().st_nlink) == (script.text, 0o600, 1)
        at.unlink()
        for place in (lambda: at.write_text("kept"), lambda: at.symlink_to(outside), lambda: at.symlink_to("nowhere")):
            place()
            with pytest.raises(Conflict, match="exists already"):
                write_script(fd, script)
            write_script(fd, script, overwrite=True)
            assert (at.is_symlink(), at.read_text(), outside.read_text()) == (False, script.text, "kept")
            at.unlink()
        at.mkdir()
        with pytest.raises(InvalidRequest, match="cannot be written"):
            write_script(fd, script, overwrite=True)
    assert [path.name for path in folder.iterdir()] == [SCRIPT]
