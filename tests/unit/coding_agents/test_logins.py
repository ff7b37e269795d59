"""Logins of coding agents: what a sandbox gets, whose links are opened, and who may read what is kept."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
import stat
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from cloche.coding_agents.login_key import key_path, user_key
from cloche.coding_agents.login_links import (
    FOLDER,
    MOST_CHARS,
    MOST_ENTRIES,
    MOST_LINKS,
    LinkFolder,
    callback_port,
    check_link,
)
from cloche.coding_agents.logins import forget_login, login_env, login_of, login_path, login_state
from cloche.coding_agents.row import CodingAgent, Login
from cloche.coding_agents.table import TABLE
from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.secrets import Capture
from cloche.egress import kept_logins
from cloche.egress.http_request import RequestHead
from cloche.egress.login_file import Login as Kept
from cloche.egress.login_file import LoginFile
from cloche.egress.login_server import LoginServer
from cloche.egress.placeholders import FAR_AHEAD, lasting_placeholder
from cloche.egress.stream import Stream
from tests.harness.internet.logins import ACCESS, CLAIMS, REFRESH, web_token

LOGIN = Login(
    provider="anthropic", file=".a", template='"{access_token}"', callback_ports=(1455,),
    browser=("https://claude.ai", "https://login.example.com/oauth"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a user with folders of their own, and no keyring."""
    for name in ("STATE", "CONFIG"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DBUS_SESSION_BUS_ADDRESS", raising=False)


def keep(name: str, values: dict[str, str], answer: str = "{}") -> dict[str, str]:
    """Keep a login; return its placeholders."""
    key = user_key(makes=True)
    assert key is not None
    fields = {field: (lasting_placeholder(field, value), value) for field, value in values.items()}
    LoginFile(login_path(name), key.key).write(Kept(fields=fields, answer=answer))
    return {field: mark for field, (mark, _) in fields.items()}


def test_a_sandbox_gets_the_placeholders_of_a_login() -> None:
    """In the agent's own file, as in every other sandbox; the file says when the token ends."""
    values = {"access_token": ACCESS, "refresh_token": REFRESH}
    marks = keep("claude", values, json.dumps({"expires_in": 3600}))
    login = login_of(TABLE["claude"])
    [(path, text)] = login.files.items()
    told = json.loads(text)["claudeAiOauth"]
    assert path == ".claude/.credentials.json"
    assert (told["accessToken"], told["refreshToken"]) == (marks["access_token"], marks["refresh_token"])
    assert abs(told["expiresAt"] / 1000 - os.stat(login_path("claude")).st_mtime - 3600) < 60
    assert login_of(TABLE["claude"]).files == login.files
    [capture] = login.secrets.values()
    assert capture.kept is not None
    assert not capture.kept.takes_login
    assert not any(value in repr(login) + text for value in (*values.values(), repr(capture.kept.key)))


def test_the_account_of_a_web_token_is_in_the_file_of_codex() -> None:
    """Its claims stay, but for their end, which is far ahead: the same placeholder outlives many tokens."""
    token = web_token({**CLAIMS, "exp": 1})
    marks = keep("codex", {"access_token": token, "refresh_token": REFRESH, "id_token": token})
    told = json.loads(login_of(TABLE["codex"]).files[".codex/auth.json"])["tokens"]
    assert told["account_id"] == "account-1"
    assert told["id_token"] == marks["id_token"]
    assert token.rpartition(".")[2] not in json.dumps(told)
    claims = told["id_token"].split(".")[1]
    assert json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4))) == {**CLAIMS, "exp": FAR_AHEAD}


def test_gemini_uses_its_login_by_a_variable() -> None:
    """And has none without a login."""
    assert login_env(TABLE["gemini"]) == {}
    keep("gemini", {"access_token": "ya29.AccessOfTheLogin0123", "refresh_token": REFRESH, "id_token": web_token({})})
    assert login_env(TABLE["gemini"]) == {"GOOGLE_GENAI_USE_GCA": "true"}
    told = json.loads(login_of(TABLE["gemini"]).files[".gemini/oauth_creds.json"])
    assert told["access_token"].startswith("ya29.")


def test_without_a_login_what_is_made_inside_stays_there() -> None:
    """A placeholder all the same; and no key is made for it."""
    login = login_of(TABLE["claude"])
    [capture] = login.secrets.values()
    assert (capture.provider, capture.kept, login.files) == ("anthropic", None, {})
    assert not os.path.exists(key_path())
    assert login_of(CodingAgent(name="mine", title="Mine", program="mine")).secrets == {}


def test_a_login_that_cannot_be_opened_is_told() -> None:
    """Its key is gone, or somebody else may read it, or it lacks a field: no new key takes its place in silence."""
    keep("claude", {"access_token": ACCESS})
    with pytest.raises(InvalidRequest, match="refresh_token"):
        login_of(TABLE["claude"])
    os.chmod(login_path("claude"), 0o640)
    with pytest.raises(InvalidRequest, match="readable by nobody else"):
        login_of(TABLE["claude"])
    os.chmod(login_path("claude"), 0o600)
    os.unlink(key_path())
    with pytest.raises(BackendUnavailable, match="keyring that does not answer"):
        login_of(TABLE["claude"])
    assert not os.path.exists(key_path())
    assert login_state("claude") is not None
    assert forget_login("claude")
    assert login_state("claude") is None


def test_the_key_is_for_its_owner_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In another folder than the logins; the same at each call, also where a keyring does not answer."""
    monkeypatch.setenv("DBUS_SESSION_BUS_ADDRESS", "unix:path=/nowhere")
    first, again = user_key(makes=True), user_key(makes=True)
    assert first == again
    assert first is not None
    assert first.place == "file"
    assert stat.S_IMODE(os.stat(key_path()).st_mode) == 0o600
    assert os.path.dirname(key_path()) not in login_path("claude")
    os.chmod(key_path(), 0o604)
    with pytest.raises(InvalidRequest, match="others may read"):
        user_key()


@pytest.mark.parametrize(
    "link",
    [
        "http://claude.ai/", "javascript:alert(1)", "file:///etc/passwd", "https://claude.ai.evil.example/",
        "https://claude.ai@evil.example/", "https://evil.example/https://claude.ai", "https://claude.ai:444/",
        "https://claude.ai/\n--version", "https://claude.ai/ x", "-https://claude.ai/", "https://claude.ai\\@evil.example/",
        "https://login.example.com/", "https://login.example.com/oauth2/x", "https://claude.ai/" + "x" * MOST_CHARS,
        "https://CLAUDE.ai/", "https://login.example.com/oauth/../x", "https://login.example.com/oauth/%2E./x",
        "https://claude.ai/\u00e9", "",
    ],
)  # fmt: skip
def test_a_link_to_another_place_is_not_opened(link: str) -> None:
    """Only what begins with an origin of the row is."""
    with pytest.raises(InvalidRequest):
        check_link(link, LOGIN)


def test_links_and_ports_of_a_login() -> None:
    """The answer comes to a port of the row, or one that systems give away; never to a server's."""
    for link in ("https://claude.ai/oauth?x=1", "https://login.example.com/oauth/authorize"):
        assert check_link(link, LOGIN) == link
    ports = {
        "http://localhost:1455/callback": 1455, "http://127.0.0.1:45000/": 45_000, "http://localhost:5432/": None,
        "http://evil.example:1455/": None, "https://localhost:1455/": None, "http://localhost:x/": None, "": None,
        "http://[": None,
    }  # fmt: skip
    for target, port in ports.items():
        assert callback_port(f"https://claude.ai/?redirect_uri={target}", LOGIN) == port, target
    assert callback_port("https://claude.ai/?redirect_uri=http://localhost:1455/&redirect_uri=x", LOGIN) is None


@pytest.mark.parametrize(
    "plant",
    [
        lambda folder: (folder / "1").symlink_to("/etc/hostname"),
        lambda folder: os.mkfifo(folder / "1"),
        lambda folder: (folder / "1").mkdir(),
        lambda folder: (folder / "1").write_bytes(b"https://claude.ai/" + b"x" * (1 << 20)),
        lambda folder: (folder / "1").write_bytes(b"https://claude.ai/\xff\x1b]0;x\x07"),
    ],
)
def test_what_is_no_link_is_left(plant: Callable[[Path], None], tmp_path: Path) -> None:
    """The folder is the guest's: no link of it is followed, and nothing of it is waited for."""
    folder = tmp_path.joinpath(*FOLDER)
    folder.mkdir(parents=True)
    plant(folder)
    told: list[str] = []
    assert list(LinkFolder(str(tmp_path), LOGIN, told.append).take()) == []
    assert not any(character < " " for text in told for character in text)


def test_few_links_are_opened(tmp_path: Path) -> None:
    """Of many at once the first one; the folder itself may be a link to another one, which is not read."""
    folder = tmp_path.joinpath(*FOLDER)
    folder.mkdir(parents=True)
    for number in range(MOST_ENTRIES + 10):
        (folder / f"{number:03}").write_text("https://claude.ai/")
    told: list[str] = []
    links = LinkFolder(str(tmp_path), LOGIN, told.append)
    assert len(list(links.take())) == 1
    assert len(told) == MOST_ENTRIES - 1
    assert MOST_LINKS < MOST_ENTRIES
    elsewhere = tmp_path / "elsewhere"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    assert list(LinkFolder(str(tmp_path), LOGIN, told.append).take()) == []
    assert len(list(elsewhere.iterdir())) == 10


async def refresh_once(file: LoginFile, mark: str, *, held: bool) -> int:
    """Refresh by a host that no connection can be made to, with the lock `held`; return the status, 0 for a fault."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = LoginServer(theirs.detach(), {"CLAUDE": file})
    threading.Thread(target=server.serve).start()
    capture = Capture(url="https://login.example.com/token", hosts=("api.example.com",))
    logins = kept_logins.KeptLogins(ours.detach(), [("CLAUDE", capture)], frozenset(), [], lambda _: None)

    async def connect() -> Stream:
        raise ZeroDivisionError

    try:
        await logins.look()
        head = RequestHead(method=b"POST", target=capture.path, headers=[])
        body = json.dumps({"grant_type": "refresh_token", "refresh_token": mark}).encode()
        edit = logins.body_edit(capture.host, head, None, connect, lambda _: None)
        assert isinstance(edit, kept_logins.ExchangeBody)
        with file.locked() if held else nullcontext(), suppress(ZeroDivisionError):
            answer = await edit.answer(body)
            while any(end.empty() for end in list(server._ends.values())):  # noqa: ASYNC110 - a thread fills it
                await asyncio.sleep(0.01)
        waiting = [thread for thread in threading.enumerate() if thread.name == "cloche-login"]
        for thread in waiting:
            await asyncio.to_thread(thread.join, 10)
        assert not any(thread.is_alive() for thread in waiting)
        return answer.status if held and answer is not None else 0
    finally:
        logins.close()


@pytest.mark.parametrize("held", [True, False])
def test_no_refresh_holds_the_lock_beyond_its_end(monkeypatch: pytest.MonkeyPatch, *, held: bool) -> None:
    """It has waited too long when its turn comes, or it fails: the lock is free, and what it notes stays."""
    marks = keep("claude", {"access_token": ACCESS, "refresh_token": REFRESH})
    key = user_key()
    assert key is not None
    file = LoginFile(login_path("claude"), key.key)
    lock = Path(f"{file.path}.lock")
    lock.touch(0o600)
    lock.write_text("then")
    monkeypatch.setattr(kept_logins, "LOCK_S", 0.05 if held else 60)
    assert asyncio.run(refresh_once(file, marks["refresh_token"], held=held)) == (503 if held else 0)
    assert (lock.read_text() == "then") == held
    assert lock.read_text()
