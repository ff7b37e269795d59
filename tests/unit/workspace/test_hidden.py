"""Credentials of a project are hidden from a sandbox, and nothing that the project's programs need."""

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloche.core.errors import InvalidRequest
from cloche.workspace import hidden as module
from cloche.workspace.hidden import Hidden, Mask, MaskFolder, find_hidden, mask_rows
from cloche.workspace.ignore import MOST_BYTES

PEM = "-----BEGIN {}-----\nMIIE\n-----END {}-----\n"
PRIVATE, CERTIFICATE = PEM.format("PRIVATE KEY", "PRIVATE KEY"), PEM.format("CERTIFICATE", "CERTIFICATE")
pytestmark = pytest.mark.both_users
HEAD = "ref: refs/heads/main\n"
WITH_TOKEN = "//registry.example/:_authToken=npm_abc\n"


@pytest.fixture(autouse=True)
def _no_descriptor_is_left() -> Iterator[None]:
    """However it ends, all that was opened is closed."""
    before = os.listdir("/proc/self/fd")
    yield
    assert os.listdir("/proc/self/fd") == before


def _put_all(folder: Path, files: dict[str, str]) -> None:
    """Write files by path; a slash behind one makes a folder."""
    for name, text in files.items():
        path = folder / name
        if name.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _find(folder: Path, *patterns: str) -> Hidden:
    fd = os.open(folder, os.O_RDONLY)
    try:
        return find_hidden(fd, patterns=patterns)
    finally:
        os.close(fd)


def _mask(folder: Path, hidden: Hidden) -> Mask:
    fd = os.open(folder, os.O_RDONLY)
    try:
        return mask_rows(fd, hidden)
    finally:
        os.close(fd)


def _git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.mark.parametrize(
    "path",
    [
        *("id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "id_ecdsa_sk", "id_ed25519_sk"),
        *(".netrc", "_netrc", ".pgpass", ".git-credentials", ".pypirc", "credentials.json", "service-account.json"),
        *(".env", ".env.local", ".env.production", ".envrc", ".env.example.local"),
        *(".docker/config.json", ".config/gcloud", ".config/gh", ".cargo/credentials.toml"),
        *(".ssh", ".aws", ".gnupg", ".kube", ".azure", ".password-store", ".env.d", ".cloche-stage-1"),
        ".claude/.credentials.json",
    ],
)  # fmt: skip
@pytest.mark.parametrize("above", ["", "deep/er/"])
def test_credentials_are_hidden_by_name(tmp_path: Path, above: str, path: str) -> None:
    """Each name of the table is hidden, at the top and further down, and what is beside it is not."""
    is_folder = path.rpartition("/")[2] in module.CREDENTIAL_FOLDERS | {"gcloud", "gh", ".env.d"}
    _put_all(tmp_path, {f"{above}{path}" + ("/inside/file" if is_folder else ""): "x", f"{above}beside": "x"})
    assert _find(tmp_path).paths == (above + path,)


@pytest.mark.parametrize(
    "path",
    [
        *(".env.example", ".env.sample", ".env.template", ".env.dist", ".env.local.example", ".env-sample"),
        *("env", "my.env", "dotenv/main.py", "environment.yml", "id_rsa.pub", "my_id_rsa", "id_rsa/file"),
        "id_token.py",
        *("id_generator.py", "ssh/config", "aws/credentials", "config.json", "docker/config.json", ".dockerignore"),
        *(".config/other", ".cargo/config.toml", ".gitignore", ".github/workflows/ci.yml", ".clocheignore"),
        ".vscode/x",
        *(".git/config", ".git/HEAD", ".git/objects/ab/id_rsa", ".npmrc", "cacert.pem", "empty.key"),
        "hooks/pre-commit",
        *("credentials.json.md", "netrc", "credentials/index.ts", "keys.py", "monkey.key.py"),
    ],
)  # fmt: skip
def test_what_only_looks_like_a_credential_is_shown(tmp_path: Path, path: str) -> None:
    """Near misses of the table stay."""
    _put_all(tmp_path, {path: CERTIFICATE if path.endswith(".pem") else ""})
    assert _find(tmp_path).paths == ()


@pytest.mark.parametrize(
    ("name", "text", "is_hidden"),
    [
        ("a.pem", PRIVATE, True),
        ("a.key", PEM.format("RSA PRIVATE KEY", "RSA PRIVATE KEY"), True),
        ("a.KEY", PEM.format("ENCRYPTED PRIVATE KEY", ""), True),
        ("a.pem", PEM.format("OPENSSH PRIVATE KEY", ""), True),
        ("a.asc", PEM.format("PGP PRIVATE KEY BLOCK", ""), True),
        ("a.ppk", "PuTTY-User-Key-File-3: ssh-ed25519", True),
        ("both.pem", CERTIFICATE + PRIVATE, True),
        ("a.pem", CERTIFICATE, False),
        ("a.pem", PEM.format("PUBLIC KEY", ""), False),
        ("a.key", "translation key", False),
        ("a.txt", PRIVATE, False),
        (".npmrc", WITH_TOKEN, True),
        (".npmrc", "registry=https://a/\n_auth = abc\n", True),
        (".npmrc", "//r/:_authToken=${NPM_TOKEN}\n", False),
        (".npmrc", f"# {WITH_TOKEN}", False),
        (".npmrc", "save-exact=true\n", False),
        (".yarnrc.yml", "npmAuthToken: abc\n", True),
        (".yarnrc.yml", 'npmAuthToken: "${TOKEN}"\n', False),
        ("pip.conf", "[global]\nindex-url = https://me:secret@host/simple\n", True),
        ("pip.conf", "[global]\nindex-url = https://host/simple\n", False),
    ],
)
def test_some_files_are_hidden_by_what_is_in_them(tmp_path: Path, name: str, text: str, is_hidden: bool) -> None:
    """A name that may hold a key is looked into: only a private key or a token hides the file."""
    _put_all(tmp_path, {name: text})
    assert bool(_find(tmp_path).paths) == is_hidden


@pytest.mark.parametrize(
    "above",
    [
        "v/lib/python3.11/site-packages",
        "v/lib/python3/dist-packages",
        "node_modules/ssh2",
        "a/node_modules/b/node_modules/c",
    ],
)
def test_nothing_that_is_installed_is_hidden_but_a_users_own_files(tmp_path: Path, above: str) -> None:
    """Inside of installed packages, keys are examples; an environment file or a token is somebody's."""
    names = ("id_rsa", "test/a.pem", "credentials.json", "x.key", ".env/index.js")
    _put_all(tmp_path, {f"{above}/{name}": PRIVATE for name in names})
    assert _find(tmp_path).paths == ()
    _put_all(tmp_path, {f"{above}/.netrc": "", f"{above}/p/.env": "", f"{above}/p/.npmrc": WITH_TOKEN})
    assert _find(tmp_path).paths == (f"{above}/.netrc", f"{above}/p/.env", f"{above}/p/.npmrc")


@pytest.mark.parametrize("mark", ["pyvenv.cfg", "conda-meta/history"])
@pytest.mark.parametrize("name", [".env", ".env311", ".envs/one", "plain"])
def test_a_virtual_environment_is_shown_whatever_its_name(tmp_path: Path, name: str, mark: str) -> None:
    """A folder called .env that is an environment is no file of secrets, nor are the keys in it."""
    _put_all(tmp_path, {f"{name}/{mark}": "", f"{name}/share/a.pem": PRIVATE, f"{name}/bin/python": ""})
    assert _find(tmp_path).paths == ()


def test_a_folder_called_env_without_an_environment_is_hidden(tmp_path: Path) -> None:
    """A folder of environment files is hidden whole, and its children are not listed."""
    _put_all(tmp_path, {".envs/production/django": "", ".envs/.env": ""})
    found = _find(tmp_path)
    assert dict(found.reasons) == {".envs": "environment variables"}


@pytest.mark.parametrize("name", ["line\nfeed", "\udcff\udcfe", "\u202egpj", " ", "-rf", "a\\b", "%s", "*"])
def test_hostile_names_are_walked_and_listed_as_they_are(tmp_path: Path, name: str) -> None:
    """A name may be any bytes: what is in such a folder is found, and masked."""
    _put_all(tmp_path, {f"{name}/.env": "", f"{name}/id_rsa{name}": ""})
    found = _find(tmp_path)
    assert found.paths == (f"{name}/.env",)
    assert _mask(tmp_path, found).whiteouts == found.paths


def test_no_link_is_followed(tmp_path: Path) -> None:
    """Behind a link nothing is looked for, be it a folder's, a file's or one to itself."""
    _put_all(tmp_path, {"outside/.env": "", "outside/a.pem": PRIVATE, "in/": ""})
    (tmp_path / "in/link").symlink_to(tmp_path / "outside")
    (tmp_path / "in/a.pem").symlink_to(tmp_path / "outside/a.pem")
    (tmp_path / "in/loop").symlink_to(".")
    assert _find(tmp_path / "in").paths == ()
    assert _find(tmp_path / "in").scanned == 3


@pytest.mark.parametrize("name", [".env", "id_rsa", ".ssh", ".docker/config.json"])
def test_a_link_with_a_hidden_name_is_hidden(tmp_path: Path, name: str) -> None:
    """What a credential's name leads to does not matter."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).symlink_to("/nowhere")
    assert _find(tmp_path).paths == (name,)


def test_a_fifo_does_not_stop_the_walk(tmp_path: Path) -> None:
    """Only regular files are read."""
    os.mkfifo(tmp_path / "a.pem")
    os.mkfifo(tmp_path / ".npmrc")
    assert _find(tmp_path).paths == ()


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/etc/hostname", path), os.mkdir])
def test_an_ignore_file_that_is_no_file_is_refused(tmp_path: Path, make: object) -> None:
    """What it would hide is not known, so nothing is shown."""
    make(tmp_path / ".clocheignore")  # type: ignore[operator]
    with pytest.raises(InvalidRequest, match="clocheignore: is not a file that can be read"):
        _find(tmp_path)


def test_an_ignore_file_is_bounded(tmp_path: Path) -> None:
    """One that is too large is refused, and not read in part."""
    (tmp_path / ".clocheignore").write_text("#" * (MOST_BYTES + 1))
    with pytest.raises(InvalidRequest, match="bytes"):
        _find(tmp_path)


def test_an_ignore_file_hides_more_and_never_less(tmp_path: Path) -> None:
    """Its lines hide what they name, its `!` shows its own again, and neither the defaults nor the policy's."""
    _put_all(tmp_path, {".clocheignore": "*.secret\n/data/\n!keep.secret\n!.env\n!policy\n"})
    _put_all(tmp_path, {"a.secret": "", "keep.secret": "", "data/x": "", "b/data/x": "", ".env": "", "policy": ""})
    assert dict(_find(tmp_path, "policy", "!a.secret").reasons) == {
        ".env": "environment variables", "a.secret": ".clocheignore", "data": ".clocheignore", "policy": "policy",
    }  # fmt: skip


def test_only_the_ignore_file_at_the_top_counts(tmp_path: Path) -> None:
    """One further down is a file like others."""
    _put_all(tmp_path, {"a/.clocheignore": "*", "a/b": ""})
    assert _find(tmp_path).paths == ()


def test_hooks_are_hidden_and_nothing_else_of_git(tmp_path: Path) -> None:
    """Those of the repository, of its submodules and of repositories further down; objects are not walked."""
    _git(tmp_path, "init", "-q")
    for place in (".git/modules/sub", ".git/modules/with/slash", ".git/modules/sub/modules/inner", "nested/.git"):
        _put_all(tmp_path, {f"{place}/{name}": HEAD for name in ("hooks/x", "HEAD", "objects/ab/.env", "refs/")})
    _put_all(tmp_path, {".git/hooks/x": "", ".git/id_rsa": "", ".git/refs/heads/.env": "", ".clocheignore": "with/"})
    _put_all(tmp_path, {".git/modules/.aws/id_rsa": "", ".git/modules/with/.env": ""})
    assert dict(_find(tmp_path).reasons) == {
        f"{place}/hooks": "git hooks"
        for place in (
            ".git", ".git/modules/sub", ".git/modules/sub/modules/inner", ".git/modules/with/slash", "nested/.git",
        )
    }  # fmt: skip


def test_a_bare_repository_is_looked_through_but_for_its_objects(tmp_path: Path) -> None:
    """Its hooks are hidden, and a file that somebody put there is found."""
    _git(tmp_path, "init", "-q", "--bare", "bare.git")
    _put_all(tmp_path, {"bare.git/.env": "", "bare.git/objects/.env": "", "bare.git/x/.env": ""})
    assert _find(tmp_path).paths == ("bare.git/.env", "bare.git/hooks", "bare.git/x/.env")


def test_a_pattern_may_hide_the_repository(tmp_path: Path) -> None:
    """By default it is shown; who does not want that can say so."""
    _put_all(tmp_path, {".git/hooks/x": "", "a": ""})
    assert dict(_find(tmp_path, ".git/").reasons) == {".git": "policy"}


@pytest.mark.parametrize(
    ("text", "is_told"),
    [
        ("url = https://user:token@host/a.git", True),
        ("url = https://ghp_0123456789@github.com/a.git", True),
        ("extraheader = AUTHORIZATION: basic abc", True),
        ("url = https://user@host/a.git", False),
        ("url = ssh://git@host/a.git", False),
        ("url = git@host:a.git", False),
    ],
)
def test_a_token_in_gits_configuration_is_told(tmp_path: Path, text: str, is_told: bool) -> None:
    """Git needs the file, so it is shown, and the user is told."""
    _put_all(tmp_path, {".git/config": f'[remote "origin"]\n\t{text}\n'})
    found = _find(tmp_path)
    assert found.paths == ()
    assert any(".git/config holds" in one for one in found.warnings) == is_told


def test_a_hidden_file_that_git_tracks_is_named(tmp_path: Path) -> None:
    """In the repository itself, below a hidden folder, and in a repository further down."""
    files = (".env", "sub dir/.envrc", ".aws/credentials", "-rf/.env")
    for place in (tmp_path, tmp_path / "nested"):
        place.mkdir(exist_ok=True)
        _git(place, "init", "-q")
        _put_all(place, dict.fromkeys(files, ""))
        _put_all(place, {"untracked/.env": ""})
        _git(place, "add", "-f", "--", *files)
    found = _find(tmp_path)
    own = ("-rf/.env", ".aws", ".env", "sub dir/.envrc")
    assert sorted(found.tracked) == sorted((*own, *(f"nested/{one}" for one in own)))
    assert any("racked by git" in one for one in found.warnings)


def test_a_worktree_is_a_repository(tmp_path: Path) -> None:
    """Its `.git` is a file that leads elsewhere: what is tracked is known there, too."""
    main, tree = tmp_path / "main", tmp_path / "tree"
    main.mkdir()
    _git(main, "init", "-q")
    _put_all(main, {".env": ""})
    _git(main, "add", "-f", ".env")
    _git(main, "commit", "-qm", "one")
    _git(main, "worktree", "add", "-q", os.fspath(tree))
    assert _find(tree).tracked == (".env",)


@pytest.mark.root
def test_a_repository_of_another_user_is_asked_by_root(tmp_path: Path) -> None:
    """Git distrusts such a one, and all that it could start is switched off."""
    _git(tmp_path, "init", "-q")
    _put_all(tmp_path, {".env": ""})
    _git(tmp_path, "add", "-f", ".env")
    subprocess.run(["chown", "-R", "1000:1000", os.fspath(tmp_path)], check=True)
    assert _find(tmp_path).tracked == (".env",)


def test_without_git_it_is_not_known_what_is_tracked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk does not fail, and says so."""
    _put_all(tmp_path, {".git/HEAD": "", ".env": ""})
    monkeypatch.setenv("PATH", str(tmp_path))
    assert any("not known" in one for one in _find(tmp_path).warnings)


def test_a_repositorys_configuration_starts_nothing(tmp_path: Path) -> None:
    """Asking git runs none of the programs that a checkout's configuration names; without care one would run."""
    _git(tmp_path, "init", "-q")
    _put_all(tmp_path, {".env": "", "program": f"#!/bin/sh\ntouch {tmp_path}/ran\nexit 1\n"})
    _git(tmp_path, "add", "-f", ".env")
    (tmp_path / "program").chmod(0o755)
    with (tmp_path / ".git/config").open("a") as file:
        file.write(f"[core]\nfsmonitor = {tmp_path}/program\npager = {tmp_path}/program\n")
    assert _find(tmp_path).tracked == (".env",)
    assert not (tmp_path / "ran").exists()
    _git(tmp_path, "ls-files", "-m")
    assert (tmp_path / "ran").exists()


@pytest.mark.user
def test_a_folder_that_cannot_be_read_is_hidden(tmp_path: Path) -> None:
    """What is in it is not known, and a program inside may know a name."""
    (tmp_path / "locked").mkdir(mode=0o111)
    assert dict(_find(tmp_path).reasons) == {"locked": "cannot be read, so not looked at"}
    (tmp_path / "locked").chmod(0o755)


@pytest.mark.parametrize("how", ["-t tmpfs none", '--bind "$1"/../outside', '--bind "$1/../outside/secret"'])
def test_what_is_mounted_below_is_hidden(tmp_path: Path, how: str) -> None:
    """It is not looked at, not shown, and told: another file system, a folder or a file of the same one."""
    tmp_path, outside = tmp_path / "host", tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").touch()
    (tmp_path / "mounted").mkdir(parents=True)
    if how.endswith('secret"'):
        (tmp_path / "mounted").rmdir()
        (tmp_path / "mounted").touch()
    program = (
        "import os, sys; from cloche.workspace.hidden import find_hidden\n"
        "found = find_hidden(os.open(sys.argv[1], os.O_RDONLY))\n"
        "print(found.mounts, found.paths, found.scanned)"
    )
    script = f'mount {how} "$1/mounted" && exec "$2" -c "$3" "$1"'
    words = ["unshare", "-Urm", "sh", "-c", script, "sh", os.fspath(tmp_path), sys.executable, program]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "('mounted',) ('mounted',) 1\n"


def test_what_is_too_deep_is_hidden(tmp_path: Path) -> None:
    """A chain of folders takes no more descriptors than a few hundred, and its end is not shown unseen."""
    deep = "/".join(["d"] * (module.MOST_DEPTH + 5))
    _put_all(tmp_path, {f"{deep}/.env": ""})
    assert _find(tmp_path).paths == ("/".join(["d"] * (module.MOST_DEPTH + 1)),)


def test_what_has_too_long_a_path_is_hidden(tmp_path: Path) -> None:
    """So a mask can be made, whose paths the kernel takes: what is above is shown."""
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(30):
        os.mkdir("d" * 200, dir_fd=here)
        above, here = here, os.open("d" * 200, os.O_RDONLY, dir_fd=here)
        os.close(above)
        os.close(os.open(".env", os.O_WRONLY | os.O_CREAT, dir_fd=here))
    os.close(here)
    paths = _find(tmp_path).paths
    shutil.rmtree(tmp_path / ("d" * 200))
    assert [path.count("/") for path in paths] == [*range(1, 18), 17]
    assert max(map(len, paths)) < 4000


def test_too_many_hidden_paths_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout cannot make a mask without end."""
    monkeypatch.setattr(module, "MOST_HIDDEN", 3)
    _put_all(tmp_path, {f".env.{number}": "" for number in range(4)})
    with pytest.raises(InvalidRequest, match="more than 3 paths"):
        _find(tmp_path)


def test_a_walk_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is bounded, so that opening a sandbox is."""
    monkeypatch.setattr(module, "MOST_TIME_S", -1.0)
    with pytest.raises(InvalidRequest, match="cannot be looked through"):
        _find(tmp_path)


def test_the_mask_copies_the_folders_above(tmp_path: Path) -> None:
    """Folders come before those in them, with the mode and time of the project's, and set-id bits never."""
    _put_all(tmp_path, {"a/b/.env": "", "a/id_rsa": "", "c/x": ""})
    (tmp_path / "a/b").chmod(0o2751)
    os.utime(tmp_path / "a/b", ns=(5, 123_456_789))
    mask = _mask(tmp_path, _find(tmp_path))
    assert mask.whiteouts == ("a/b/.env", "a/id_rsa")
    assert [one.path for one in mask.folders] == ["", "a", "a/b"]
    assert mask.folders[-1] == MaskFolder(path="a/b", mode=0o751, mtime_ns=123_456_789)
    assert mask.folders[0].mode == stat.S_IMODE(tmp_path.stat().st_mode)


def test_without_hidden_paths_there_is_no_mask(tmp_path: Path) -> None:
    """Nothing hidden needs no layer."""
    assert _mask(tmp_path, Hidden()) == Mask()


def test_the_mask_follows_no_link(tmp_path: Path) -> None:
    """A folder above a hidden path that became a link, or went, meanwhile has nothing to mask."""
    _put_all(tmp_path, {"in/a/.env": "", "in/b/.env": "", "out/.env": ""})
    found = _find(tmp_path / "in")
    (tmp_path / "in/a").rename(tmp_path / "moved")
    (tmp_path / "in/a").symlink_to(tmp_path / "out")
    mask = _mask(tmp_path / "in", found)
    assert mask.whiteouts == ("b/.env",)
    assert [one.path for one in mask.folders] == ["", "b"]
