"""A folder of the system, a home, and what holds credentials or Cloche's own files are never shown to a sandbox."""

import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from platformdirs import user_cache_dir, user_config_dir, user_data_dir, user_state_dir

from cloche.audit import log
from cloche.config.sources import ConfigPaths, operator_layers
from cloche.config.state import records_file, state_file
from cloche.core.errors import InvalidRequest
from cloche.jail.setup.cache import own_cache
from cloche.keeper import registry
from cloche.packages import folders
from cloche.workspace import allowed
from cloche.workspace.allowed import AllowedFolder, OwnPlace, at_for, check_folder, homes, own_folders

pytestmark = pytest.mark.both_users


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home of the test's own, without any variable that moves Cloche's folders."""
    for name in os.environ:
        if name.startswith(("CLOCHE_", "XDG_")):
            monkeypatch.delenv(name)
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    return folder


@pytest.fixture(autouse=True)
def _no_descriptor_is_left(home: Path) -> Iterator[None]:
    """However it ends, all that was opened is closed."""
    before = os.listdir("/proc/self/fd")
    yield
    assert os.listdir("/proc/self/fd") == before


def _check(path: str | Path) -> AllowedFolder:
    found = check_folder(path)
    os.close(found.fd)
    return found


def _refusal(path: str | Path) -> str:
    with pytest.raises(InvalidRequest) as caught:
        _check(path)
    return str(caught.value)


def test_a_project_is_allowed(home: Path) -> None:
    """What comes back is its real path, its owner, and a descriptor of it."""
    (home / "project").mkdir()
    (home / "link").symlink_to("project")
    found = check_folder(home / "link" / "." / "..//link")
    facts = os.fstat(found.fd)
    os.close(found.fd)
    assert found.path == os.path.realpath(home / "project")
    assert (found.dev, found.ino) == (facts.st_dev, facts.st_ino)
    assert found.owner == (os.geteuid(), facts.st_gid)
    assert os.path.samestat(facts, (home / "project").stat())


def test_a_path_may_be_relative_or_begin_with_the_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user writes it."""
    (home / "project").mkdir()
    monkeypatch.chdir(home / "project")
    assert _check(".").path == _check("~/project").path == os.path.realpath(home / "project")


@pytest.mark.parametrize("name", ["line\nfeed", "\udcff", "a:b,c\\d", ".cloche-x", "ssh", "x.git"])
def test_a_folder_may_have_any_name(home: Path, name: str) -> None:
    """Names that only look like refused ones are none."""
    (home / name).mkdir()
    assert _check(home / name).path.endswith(name)


def test_a_folder_that_everybody_may_write_to_is_allowed(home: Path) -> None:
    """What others put there is shown like the rest."""
    (home / "shared").mkdir()
    (home / "shared").chmod(0o777)
    assert _check(home / "shared")


@pytest.mark.parametrize(
    "path",
    [
        "/", "/.", "//", "/usr", "/usr/local/lib", "/bin", "/sbin", "/lib", "/etc", "/etc/ssl", "/proc", "/proc/self",
        "/sys", "/dev", "/dev/shm", "/run", "/boot", "/var", "/var/lib", "/var/lib/dpkg", "/var/run", "/var/log",
        "/root", "/home", "/opt", "/srv", "/mnt", "/media", "/tmp", "/var/tmp", "/tmp/..", "/proc/self/root/etc",
        "/proc/self/cwd/../../../../../../../../etc", "/tmp/../usr/../etc",
    ],
)  # fmt: skip
def test_a_folder_of_the_system_is_refused(path: str) -> None:
    """By whatever spelling."""
    assert "Name a" in _refusal(path)


@pytest.mark.parametrize("target", ["/", "/etc", "/usr/lib"])
def test_a_link_to_a_folder_of_the_system_is_refused(home: Path, target: str) -> None:
    """What counts is where it leads."""
    (home / "link").symlink_to(target)
    assert "of the system" in _refusal(home / "link") or "is the root" in _refusal(home / "link")


def test_a_mount_of_a_refused_folder_elsewhere_is_refused(home: Path) -> None:
    """A folder is known by device and inode, not by its path alone."""
    (home / "project").mkdir()
    (home / ".config/cloche").mkdir(parents=True)
    program = (
        "import sys; from cloche.core.errors import InvalidRequest\n"
        "from cloche.workspace.allowed import check_folder\n"
        "try: check_folder(sys.argv[1])\n"
        "except InvalidRequest as error: print(error)"
    )
    for source in ("/etc", os.fspath(home), os.fspath(home / ".config"), os.fspath(home / ".config/cloche")):
        script = 'mount --bind "$1" "$2" && exec "$3" -c "$4" "$2"'
        done = subprocess.run(
            ["unshare", "-Urm", "sh", "-c", script, "sh", source, home / "project", sys.executable, program],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout.startswith(f"workspace: {home / 'project'} "), source


def test_the_home_itself_and_what_holds_it_is_refused(home: Path) -> None:
    """HOME's, and that of the accounts."""
    assert "is a home" in _refusal(home)
    assert "holds the home" in _refusal(home.parent)
    for own in homes():
        assert "workspace: " in _refusal(own)


def test_the_home_of_the_folders_owner_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under sudo, HOME is root's, and the folder a user's."""
    other = home.parent / "alice"
    (other / "project").mkdir(parents=True)
    entry = pwd.struct_passwd(("alice", "x", os.geteuid(), 1, "", os.fspath(other), "/bin/sh"))
    monkeypatch.setattr(allowed.pwd, "getpwuid", lambda _: entry)
    assert "is a home" in _refusal(other)
    assert _check(other / "project")


@pytest.mark.parametrize(
    "path",
    [
        ".ssh", ".ssh/keys", ".aws", ".gnupg/x", ".kube", ".azure", ".password-store", ".config/gcloud",
        ".config/gh/x", "project/.ssh", "project/.aws/x", ".docker", ".mozilla/firefox", ".local/share/keyrings",
    ],
)  # fmt: skip
def test_a_credential_folder_is_refused(home: Path, path: str) -> None:
    """Itself, and what lies in it."""
    (home / path).mkdir(parents=True)
    assert "credentials are kept" in _refusal(home / path)


@pytest.mark.parametrize("path", [".git", "sub/.git/modules"])
def test_a_repositorys_own_folder_is_refused(home: Path, path: str) -> None:
    """A workspace is what a repository holds, not what git keeps."""
    (home / "project" / path).mkdir(parents=True)
    assert "only git may change" in _refusal(home / "project" / path)


@pytest.mark.parametrize("path", ["project/.docker", "project/.config/tool", "project/kube"])
def test_a_projects_own_folder_of_that_name_is_allowed(home: Path, path: str) -> None:
    """Not every `.docker` is the one with the keys."""
    (home / path).mkdir(parents=True)
    assert _check(home / path)


OWN = (".config/cloche", ".local/state/cloche", ".local/share/cloche", ".cache/cloche", ".cloche")


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("is_there", [True, False])
def test_what_holds_or_lies_in_cloches_own_folders_is_refused(home: Path, own: str, is_there: bool) -> None:
    """Also where the folder is not there yet: Cloche may make it later."""
    (home / own).parent.mkdir(parents=True, exist_ok=True)
    if is_there:
        (home / own / "deep").mkdir(parents=True)
        assert "lies in Cloche's own" in _refusal(home / own / "deep")
        assert "lies in Cloche's own" in _refusal(home / own)
    if own != ".cloche":
        assert "holds Cloche's own" in _refusal((home / own).parent)


@pytest.mark.parametrize(
    ("variable", "value", "refused"),
    [
        ("XDG_CONFIG_HOME", "{}/moved", "moved"),
        ("XDG_STATE_HOME", "{}/moved", "moved"),
        ("XDG_DATA_HOME", "{}/moved", "moved"),
        ("XDG_CACHE_HOME", "{}/moved", "moved"),
        ("XDG_RUNTIME_DIR", "{}/moved", "moved"),
        ("CLOCHE_CONFIG", "{}/moved/cloche.yaml", "moved"),
        ("CLOCHE_CONFIG", "moved/cloche.yaml", "moved"),
        ("CLOCHE_ENV_FILE", "{}/moved/settings", "moved"),
        ("CLOCHE_AUDIT", "{}/moved/audit", "moved"),
        ("CLOCHE_AUDIT", "~/moved/audit", "moved"),
        ("CLOCHE_DATABASE", "{}/moved/records.db", "moved"),
        ("CLOCHE_DATABASE", "sqlite:///{}/moved/records.db?x=1", "moved"),
        ("CLOCHE_APPROVALS", "{}/moved/approvals.db", "moved"),
        ("CLOCHE_MICROVM_IMAGE", "{}/moved/image", "moved"),
    ],
)
def test_a_variable_that_moves_cloches_files_is_followed(
    home: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, refused: str
) -> None:
    """What holds them is refused, and without the variable it is not."""
    monkeypatch.chdir(home)
    (home / refused).mkdir()
    assert _check(home / refused)
    monkeypatch.setenv(variable, value.format(home))
    assert "holds Cloche's own" in _refusal(home / refused)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("CLOCHE_ENV_FILE", "{}/moved/.env"), ("CLOCHE_AUDIT", "on"), ("CLOCHE_DATABASE", "postgresql://host/moved"),
        ("CLOCHE_DATABASE", "sqlite:///:memory:"), ("XDG_STATE_HOME", "moved"),
    ],
)  # fmt: skip
def test_a_variable_that_names_nothing_to_protect_refuses_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    """A `.env` that settings come from is hidden anyway; a switch or a server is no path."""
    (home / "moved").mkdir()
    monkeypatch.chdir(home / "moved")
    monkeypatch.setenv(variable, value.format(home))
    assert _check(home / "moved")


@pytest.mark.parametrize("name", ["snapshots", "blobs/sha256"])
def test_what_lies_beside_moved_records_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Snapshots and what files held are kept in the folder of the database; another folder there is a project."""
    (home / "data" / name).mkdir(parents=True)
    (home / "data/project").mkdir()
    monkeypatch.setenv("CLOCHE_DATABASE", f"{home}/data/records.db")
    assert "lies in Cloche's own records" in _refusal(home / "data" / name)
    assert _check(home / "data/project")


def test_the_key_of_records_on_a_server_is_in_the_working_directory(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What holds it is refused, where it is there."""
    (home / "project").mkdir()
    monkeypatch.chdir(home / "project")
    monkeypatch.setenv("CLOCHE_DATABASE", "postgresql://host/records")
    assert _check(".")
    (home / "project/snapshots.key").write_text("")
    assert "holds Cloche's own records" in _refusal(".")


def test_every_place_that_cloche_uses_is_known(home: Path) -> None:
    """What the rest of Cloche says of its folders lies in a place of the table."""
    used = [
        user_config_dir("cloche"), user_state_dir("cloche"), user_data_dir("cloche"), user_cache_dir("cloche"),
        log.default_folder(), folders.default_folder(), own_cache("jail"), records_file(), state_file("approvals.db"),
        f"{registry.SYSTEM}/1000",
    ]  # fmt: skip
    places = own_folders()
    assert [path for path in used if not any(allowed.is_below(str(path), one.path) for one in places)] == []
    (home / ".cloche").mkdir()
    (home / ".cloche/config.json").write_text("{}")
    assert operator_layers(ConfigPaths(environ=os.environ)) == [{}]


def test_the_caller_may_name_further_places(home: Path) -> None:
    """Such as a folder that only the settings name."""
    (home / "logs/project").mkdir(parents=True)
    places = own_folders({os.fspath(home / "logs"): "audit log"})
    with pytest.raises(InvalidRequest, match="lies in Cloche's own audit log"):
        check_folder(home / "logs/project", own_places=places)
    assert OwnPlace(path=os.fspath(home / "logs"), contents="audit log") in places


@pytest.mark.parametrize(("name", "why"), [("none", "cannot be opened"), ("file", "is not a folder")])
def test_what_is_no_folder_is_refused(home: Path, name: str, why: str) -> None:
    """And the sentence says what to do."""
    (home / "file").write_text("")
    assert why in _refusal(home / name)
    assert "Name a" in _refusal(home / name) or "Name the" in _refusal(home / name)


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_what_is_no_path_is_refused(path: str) -> None:
    """Before the system is asked."""
    assert "is not a path" in _refusal(path)


def test_a_folder_that_was_removed_meanwhile_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has no path any more cannot be shown at it."""
    (home / "gone").mkdir()
    monkeypatch.chdir(home / "gone")
    (home / "gone").rmdir()
    assert "removed" in _refusal(".")


def test_a_refusal_shows_no_control_characters(home: Path) -> None:
    """A name may be anything, and a message goes to a terminal."""
    assert "\x1b" not in _refusal(home / "\x1b[2J\n")


@pytest.mark.parametrize(
    ("path", "at", "found"),
    [
        ("/home/a/p", "same", "/home/a/p"),
        ("/tmp/x", "same", "/tmp/x"),
        ("/workspace", "same", "/workspace"),
        ("/workspace/p", "same", "/workspace"),
        ("/workspaces/p", "same", "/workspaces/p"),
        ("/home/a/p", "/workspace", "/workspace"),
        ("/home/a/p", "/project", "/project"),
        ("/home/a/p", "/opt/p", "/opt/p"),
    ],
)
def test_a_folder_is_shown_at_its_own_path_unless_said_otherwise(path: str, at: str, found: str) -> None:
    """The name /workspace is taken inside, so what is there on the host is shown as that."""
    assert at_for(path, at) == found


@pytest.mark.parametrize(
    "at",
    [
        "", "project", "./p", "/p/", "/p/../q", "/p//q", "//p", "/p/.", "/a\0b", "/", "/usr", "/usr/p", "/proc/p",
        "/etc/p", "/dev/p", "/run/p", "/lib/p", "/tmp", "/home", "/root", "/var", "/workspace/p", "/" + "a" * 5000,
    ],
)  # fmt: skip
def test_a_place_inside_that_is_none_is_refused(at: str) -> None:
    """It must be a plain absolute path outside of what the sandbox itself has."""
    with pytest.raises(InvalidRequest, match=r"^at: "):
        at_for("/home/a/p", at)
