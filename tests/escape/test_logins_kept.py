"""A login that is kept: it works in every sandbox of its user, its tokens are in none, and no refresh loses it.

The internet of a world has a token server that rotates, and ends a login when a refresh token comes twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.internet.build import HOME
from tests.harness.internet.logins import ACCESS, REFRESH
from tests.harness.world import NAMES, PUBLIC, World, open_world

PROGRAM = (Path(__file__).parent / "logins_program.py").read_text()
HOSTS = ("api.anthropic.com", "platform.claude.com", "api.openai.com", "auth.openai.com", "chatgpt.com")
TABLE = {**NAMES, **{host: [[PUBLIC]] for host in HOSTS}}
# Runs programs in sandboxes of their own, and prints what they print; FOLDER has the files of the login.
HEAD = """
import cloche, os, signal, subprocess, sys, time, urllib.request
from cloche.core.kept_logins import KeptLogin
from cloche.core.secrets import Capture

FOLDER = os.path.expanduser("~/logins")
PATH = FOLDER + "/claude"

def secrets(takes_login=False, provider="anthropic"):
    kept = KeptLogin(path=PATH, key=b"k" * 32, takes_login=takes_login)
    return {"CLAUDE": Capture(provider=provider, kept=kept)}

def inside(code, timeout=60, **more):
    result = cloche.run(ARGUMENT["program"] + code, secrets=secrets(**more), level="jail", timeout=timeout)
    assert result.stdout or timeout < 60, (result.stderr, result.meta.get("network"))
    notes.extend(row["why"] for row in result.meta.get("network", ()))
    return json.loads(result.stdout) if result.stdout else None

notes = []

def beside(sandbox, code):
    return json.loads(sandbox.run(ARGUMENT["program"] + "tokens = %r; print(json.dumps(%s))" % (tokens, code)).stdout)

def pids_below(pid, words):
    def told(path):
        with open(path, "rb") as file:
            return file.read()
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    children = [each for each in pids if int(told(f"/proc/{each}/stat").rpartition(b")")[2].split()[1]) == pid]
    return [each for each in children if words in told(f"/proc/{each}/cmdline")]

def state(**changes):
    data = json.dumps(changes).encode() if changes else None
    return json.load(urllib.request.urlopen("https://platform.claude.com/state", data))

def until(holds):
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)

"""
REPLACING = (
    'refresh(tokens, code="theirs")',
    'refresh(tokens, grant_type="authorization_code")',
    'ask(TOKEN + "?grant_type=authorization_code&code=theirs", {"refresh_token": tokens["refresh_token"]})',
    'ask(TOKEN, {"grant_type": "refresh_token", "refresh_token": "sk-ant-ort01-AnAttackersOwn0123456789abc"})',
    'ask(API + "/v1/oauth/token", {"grant_type": "authorization_code", "refresh_token": tokens["refresh_token"]})',
)
LOGS_IN = 'tokens = inside("print(json.dumps(log_in()))", takes_login=True)\n'


RUNTIME = f"{HOME}/run"


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Open a world with a token server."""
    with open_world(TABLE) as world:
        yield world


@pytest.fixture(autouse=True)
def no_login(world: World) -> None:
    """Begin without a login, at a server that knows of none."""
    run(world, 'state(wait_s=0.0, is_revoked=False, number=0, refreshes=0); subprocess.run(["rm", "-rf", FOLDER])')


def run(world: World, code: str) -> Any:
    """Run a program on the host, and return its `told`."""
    program = f"import os\nos.makedirs({RUNTIME!r}, 0o700, exist_ok=True)\n{HEAD}\ntold = None\n{code}\n"
    own = {"XDG_RUNTIME_DIR": RUNTIME}  # what a killed keeper leaves is in no other test's way
    return world.run(f"{program}print(json.dumps(told))", {"program": PROGRAM}, env=own)


def test_a_login_is_made_once_and_its_tokens_are_nowhere(world: World) -> None:
    """A second sandbox uses the placeholders of the first, after a refresh as well; outside, the tokens are found."""
    outside = world.run(f"{PROGRAM}\ntokens = log_in()\nprint(json.dumps(looked_through()))")
    assert outside == ["memory"]
    code = """
uses = "tokens = %r; first = is_good(tokens), refresh(tokens)[1], is_good(tokens); " % tokens
told = inside(uses + "print(json.dumps([first, looked_through()]))")
told = [tokens, *told, open(PATH).read(), oct(os.stat(PATH).st_mode), oct(os.stat(FOLDER).st_mode), state()]
"""
    tokens, (before, answer, after), places, file, *modes, now = run(world, LOGS_IN + code)
    assert (before, after) == (True, True)
    assert answer["access_token"] == tokens["access_token"]
    assert answer["refresh_token"] == tokens["refresh_token"]
    assert places == []
    assert not any(token in text for token in (ACCESS, REFRESH) for text in (file, json.dumps(tokens)))
    assert modes == ["0o100600", "0o40700"]
    assert (now["refreshes"], now["is_revoked"]) == (1, False)


def test_open_sandboxes_use_what_any_of_them_refreshes(world: World) -> None:
    """And nothing once the login is forgotten, on the host or by a request of a program."""
    code = """
with cloche.Sandbox(secrets=secrets(), level="jail") as one, cloche.Sandbox(secrets=secrets(), level="jail") as two:
    good = [beside(one, "is_good(tokens)"), beside(two, "refresh(tokens)[0]"), beside(one, "is_good(tokens)")]
    os.unlink(PATH)
    told = [good, beside(one, "is_good(tokens)"), beside(two, "refresh(tokens)[0]"), state()["is_revoked"]]
"""
    assert run(world, LOGS_IN + code) == [[True, 200, True], False, 403, False]


@pytest.mark.soak
def test_a_program_that_revokes_the_login_ends_it(world: World) -> None:
    """The provider gets the token, which a web token's placeholder stands for, and the file is gone."""
    code = """
OPENAI = "LOGIN, API = 'https://auth.openai.com', 'https://chatgpt.com'; TOKEN = LOGIN + '/oauth/token'; "
tokens = inside(OPENAI + "print(json.dumps(log_in()))", takes_login=True, provider="openai")
revoke = "ask(LOGIN + '/oauth/revoke', {'token': tokens['refresh_token'], 'client_id': 'c'})"
ends = "print(json.dumps([refresh(tokens)[0], %s[0], refresh(tokens)[0]]))" % revoke
told = inside(OPENAI + "tokens = %r; " % tokens + ends, provider="openai"), os.path.exists(PATH)
told = [*told, json.load(urllib.request.urlopen("https://auth.openai.com/state"))["is_revoked"]]
"""
    assert run(world, code) == [[200, 200, 403], False, True]


@pytest.mark.soak
def test_a_login_that_cannot_be_read_is_replaced(world: World) -> None:
    """One of a key that is gone is no login, and the next one that is made takes its place."""
    code = """
row = json.load(open(PATH))
row["key"] = "another"
with open(PATH, "w") as file:
    json.dump(row, file)
told = [inside("tokens = %r; print(json.dumps([is_good(tokens), refresh(tokens)[0]]))" % tokens)]
tokens = inside("print(json.dumps(log_in()))", takes_login=True)
told.append(inside("print(json.dumps(is_good(%r)))" % tokens))
"""
    assert run(world, LOGS_IN + code) == [[False, 403], True]


def test_refreshes_at_once_are_one(world: World) -> None:
    """Several programs in two sandboxes get the first one's answer, and the token is sent once."""
    code = """
from concurrent.futures import ThreadPoolExecutor
state(wait_s=0.7)
three = "tokens = %r; print(json.dumps([at_once(3, lambda: refresh(tokens)[0]), is_good(tokens)]))" % tokens
with ThreadPoolExecutor() as pool:
    told = [*pool.map(inside, [three, three]), state()]
"""
    first, second, now = run(world, LOGS_IN + code)
    assert first == second == [[200, 200, 200], True]
    assert not now["is_revoked"]
    assert now["refreshes"] <= 2  # one sandbox may begin when the other has ended


def test_a_program_that_is_killed_during_a_refresh_loses_nothing(world: World) -> None:
    """Its sandbox ends with it; the answer is kept, and the next sandbox goes on with it."""
    code = """
state(wait_s=1.5)
inside("refresh(%r)" % tokens, timeout=1)
assert state()["refreshes"] == 1
told = inside("tokens = %r; print(json.dumps([refresh(tokens)[0], is_good(tokens)]))" % tokens), state()
"""
    (status, is_good), now = run(world, LOGS_IN + code)
    assert (status, is_good, now["is_revoked"]) == (200, True, False)


def test_a_caller_that_is_killed_during_a_refresh_loses_nothing(world: World) -> None:
    """The processes that have begun the exchange end it without the caller."""
    head = f"import json\nARGUMENT = {json.dumps({'program': PROGRAM})}\n{HEAD}"
    code = f"""
head = {head!r}
version = open(PATH).read()
state(wait_s=1.0)
caller = subprocess.Popen([sys.executable, "-c", head + "inside(%r)" % ("refresh(%r)" % tokens)])
until(lambda: state()["refreshes"] == 1)
caller.kill(); caller.wait()
until(lambda: open(PATH).read() != version)
told = inside("tokens = %r; print(json.dumps([is_good(tokens), refresh(tokens)[0]]))" % tokens), state()
"""
    (is_good, status), now = run(world, LOGS_IN + code)
    assert (is_good, status, now["is_revoked"]) == (True, 200, False)


@pytest.mark.soak
def test_a_keeper_that_is_killed_during_a_refresh_loses_nothing(world: World) -> None:
    """The egress process of a sandbox with a name ends the exchange, and then itself."""
    code = """
from cloche.keeper import registry
name = "kept-login"
with cloche.Sandbox(secrets=secrets(), level="jail", name=name, keep=60, lifetime=60) as sandbox:
    version = open(PATH).read()
    state(wait_s=1.5)
    sandbox.start([sys.executable, "-c", ARGUMENT["program"] + "refresh(%r)" % tokens])
    until(lambda: state()["refreshes"] == 1)
    [os.kill(pid, signal.SIGKILL) for pid in registry.holders(name)]
    until(lambda: open(PATH).read() != version)
told = inside("tokens = %r; print(json.dumps([is_good(tokens), refresh(tokens)[0]]))" % tokens), state()
"""
    (is_good, status), now = run(world, LOGS_IN + code)
    assert (is_good, status, now["is_revoked"]) == (True, 200, False)


@pytest.mark.soak
def test_an_interrupted_refresh_is_told(world: World) -> None:
    """When the egress process itself is killed, the new tokens are lost; a new login is all that helps."""
    head = f"import json\nARGUMENT = {json.dumps({'program': PROGRAM})}\n{HEAD}"
    code = f"""
head = {head!r}
state(wait_s=2.0)
caller = subprocess.Popen([sys.executable, "-c", head + "inside(%r)" % ("print(json.dumps(refresh(%r)))" % tokens)])
until(lambda: state()["refreshes"] == 1)
[pid] = pids_below(caller.pid, b"cloche.egress.process")
os.kill(pid, signal.SIGKILL)
caller.kill(); caller.wait()
state(wait_s=0.0)
told = [inside("print(json.dumps(refresh(%r)[0]))" % tokens), notes]
notes = []
tokens = inside("print(json.dumps(log_in()))", takes_login=True)
told += [inside("print(json.dumps(is_good(%r)))" % tokens), notes]
"""
    status, said, is_good, said_after = run(world, LOGS_IN + code)
    assert status == 400
    assert any("was interrupted, so that its tokens may be spent; log in again" in why for why in said), said
    assert is_good
    assert not any("interrupted" in why for why in said_after)


def test_a_program_cannot_replace_the_login(world: World) -> None:
    """A request whose answer could be somebody else's tokens does not leave; a login of its own stays inside."""
    code = f"""
before = open(PATH).read(), state()["number"]
told = inside("tokens = %r; print(json.dumps([" % tokens + {", ".join(REPLACING)!r} + "]))")
told = [told, before == (open(PATH).read(), state()["number"])]
told += inside("new = log_in(); print(json.dumps([new == %r, is_good(new)]))" % tokens)
told.append(before[0] == open(PATH).read())
"""
    answers, *rest = run(world, LOGS_IN + code)
    assert [status for status, _ in answers] == [403] * len(REPLACING)
    assert rest == [True, False, True, True]
