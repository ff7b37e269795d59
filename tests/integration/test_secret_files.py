"""Files of a sandbox with the placeholders of secrets, which programs read in place of variables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import cloche

VALUE, OTHER = "npm_0123456789abcdefgh", "gho_0123456789abcdefgh"
HOSTS = ("registry.example.com",)
PATH, DEEP = "~/.npmrc", "~/.config/gh/hosts.yml"
SECRETS = {
    "NPM": cloche.Secret(
        value=VALUE, hosts=HOSTS, files_inside={PATH: "//registry.example.com/:_authToken={}\n# {GH}"}
    ),
    "GH": cloche.Secret(value=OTHER, hosts=HOSTS, files_inside={DEEP: "oauth_token: {}"}),
}
CODE = f"""
import os
paths = [os.path.expanduser(path) for path in ({PATH!r}, {DEEP!r})]
found = [(oct(os.stat(path).st_mode & 0o7777), os.stat(path).st_uid == os.getuid()) for path in paths]
npm, gh = (open(path).read() for path in paths)
expected = "//registry.example.com/:_authToken=%s\\n# %s" % (os.environ["NPM"], os.environ["GH"])
print(found, npm == expected, gh == "oauth_token: " + os.environ["GH"], {VALUE[4:]!r} in npm + gh)
"""
SAID = "[('0o600', True), ('0o600', True)] True True False\n"
APPENDS = f"import os; open(os.path.expanduser({PATH!r}), 'a').write('more')"
ENDS = f"import os; print(open(os.path.expanduser({PATH!r})).read()[-4:])"


def test_a_run_has_the_files() -> None:
    """For its user alone; they are inputs, and no files that it made."""
    result = cloche.run(CODE, secrets=SECRETS)
    assert (result.stdout, result.files) == (SAID, ()), result.stderr


@pytest.mark.parametrize("live", [True, False])
def test_a_sandbox_has_the_files_from_its_beginning(live: bool) -> None:
    """And its sessions, and their forks; what a program changes in them stays."""
    with cloche.Sandbox(secrets=SECRETS, live=live) as sandbox:
        assert sandbox.run(CODE).stdout == SAID
        sandbox.run(APPENDS)
        assert sandbox.run(ENDS).stdout == "more\n"
        with sandbox.session(checkpoints=not live) as session:
            if not live:  # it has placeholders of its own
                assert session.run(CODE).stdout == SAID
                assert [fork.run(CODE).stdout for fork in session.fork(1)] == [SAID]


def test_a_folder_of_the_host_gets_none_of_them(tmp_path: Path) -> None:
    """The home folder of such a sandbox is another one."""
    with cloche.Sandbox(workspace=tmp_path, secrets=SECRETS) as sandbox:
        assert sandbox.run(CODE).stdout == SAID
        assert not sandbox.diff().changes


def test_a_backend_that_cannot_write_them_refuses_them() -> None:
    """Else a program would find no credentials, and nobody would know why."""

    class Other:
        name, takes_secrets = "other", True

        def open(self, policy: object, limits: object) -> Any:
            raise AssertionError("it was opened")

    with pytest.raises(cloche.BackendUnavailable, match="files_inside"):
        cloche.run("1", backend=Other(), secrets=SECRETS)  # type: ignore[arg-type]
