"""Secrets are taken out of text: those that are known, and those that look like one."""

from __future__ import annotations

import base64
import html
import json
import random
import re
import time
from collections.abc import Callable
from urllib.parse import quote, quote_plus

import pytest

from cloche.audit.redaction import REDACTED, Redactor, is_secret

# Made up, and put together here so that nobody's scanner takes them for real ones.
SHAPES = {
    "openai": "sk-" + "proj-" + "Ab1" * 12,
    "anthropic": "sk-" + "ant-api03-" + "Zx9_" * 10,
    "stripe": "sk_" + "live_" + "4eC39HqLyjWD" * 2,
    "github": "gh" + "p_" + "a1B2c3D4e5F6g7H8i9J0" * 2,
    "github app": "gh" + "s_" + "a1B2c3D4e5F6g7H8i9J0",
    "github fine": "github" + "_pat_" + "11AAAAAAA0" * 4,
    "gitlab": "gl" + "pat-" + "x1Y2z3" * 4,
    "sendgrid": "SG" + ".aBcDeFgHiJkLmNoPqRsTuV." + "aBcDeFgHiJkLmNoPqRsTuVwXyZ0123456789",
    "aws": "AKIA" + "IOSFODNN7EXAMPLE",
    "google": "AIza" + "SyA1b2C3d4" * 4,
    "slack": "xox" + "b-" + "123456789012-abcdef",
    "hugging face": "hf" + "_" + "AbCdEfGhIj" * 3,
    "jwt": "eyJ" + "hbGciOiJIUzI1NiJ9." + "eyJzdWIiOiIxMjM0In0." + "c2lnbmF0dXJl",
    "key": "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nabc\n-----END RSA PRIVATE KEY-----",
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_is_known_by_its_look(shape: str) -> None:
    """Wherever it stands in a text; what is around it stays."""
    for text in (
        SHAPES[shape],
        f"x = '{SHAPES[shape]}' # note",
        f"({SHAPES[shape]})",
        f"a\\n{SHAPES[shape]}",
        f"x_{SHAPES[shape]}",
        f"\x1b[31m{SHAPES[shape]}\x1b[0m",
        f"\x1b[1;32m{SHAPES[shape]}",
    ):
        clean = Redactor({}, environ={}).text(text)
        assert SHAPES[shape] not in clean
        assert clean == text.replace(SHAPES[shape], REDACTED)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Authorization: Bearer abc.def-123", "Authorization: Bearer [redacted]"),
        ("authorization: basic dXNlcjpwYXNz", "authorization: basic [redacted]"),
        ("psql postgres://app:s3cr3t@db/x", "psql postgres://app:[redacted]@db/x"),
        ("https://user:p%40ss@example.org/a", "https://user:[redacted]@example.org/a"),
        ("PASSWORD=hunter22 ./run", "PASSWORD=[redacted] ./run"),
        ('{"api_key": "abcd1234"}', '{"api_key": "[redacted]"}'),
        ("client_secret: abcd1234, next", "client_secret: [redacted], next"),
        ('PASSWORD="my long pass phrase" x', 'PASSWORD="[redacted]" x'),
        ("token = 'a,b;c d'; y", "token = '[redacted]'; y"),
        (r"{\"password\": \"hunter22\"}", r"{\"password\": \"[redacted]\"}"),
        ("SECRET_KEY = 'django-insecure'", "SECRET_KEY = '[redacted]'"),
        ("DB_PASS=abcd1234", "DB_PASS=[redacted]"),
        ("Authorization: token abcdef1234", "Authorization: token [redacted]"),
        ("authorization=abcdef123456", "authorization=[redacted]"),
        ("git clone https://abcdef1234567890abcd@example.org/a", "git clone https://[redacted]@example.org/a"),
        ("mysql --password hunter22 -h db", "mysql --password [redacted] -h db"),
        ("mysql -p hunter22 -h db", "mysql -p [redacted] -h db"),
        ("mysql -phunter22 -h db", "mysql -p[redacted] -h db"),
        ("tool --token=abcd1234 x", "tool --token=[redacted] x"),
        ("tool --db-password 'hunter22' x", "tool --db-password '[redacted]' x"),
        ('["tool", "--api-key", "abcd1234", "x"]', '["tool", "--api-key", "[redacted]", "x"]'),
        ("curl -u me:hunter22 https://db", "curl -u me:[redacted] https://db"),
        ("Cookie: sid=abcdef123; theme=dark\nHost: x", "Cookie: [redacted]\nHost: x"),
        ("set-cookie: sid=abcdef123; Path=/", "set-cookie: [redacted]"),
        ("{'Cookie': 'sid=abcdef123'}", "{'Cookie': '[redacted]'}"),
        ('Authorization: Digest username="x", response="ab"\nHost: x', "Authorization: Digest [redacted]\nHost: x"),
        ("Proxy-Authorization: Basic dXNlcjpwYXNz", "Proxy-Authorization: Basic [redacted]"),
        ("X-Api-Key: abcd1234efgh", "X-Api-Key: [redacted]"),
        ('{"password": "ab"}', '{"password": "[redacted]"}'),
        ('{"pass":"hunter22", "pwd": "x"}', '{"pass":"[redacted]", "pwd": "[redacted]"}'),
        ("&quot;password&quot;:&quot;hunter22&quot;", "&quot;password&quot;:&quot;[redacted]&quot;"),
        ("q=1&amp;password%3Dhunter22", "q=1&amp;password%3D[redacted]"),
        ("redis://:s3cr3t@db", "redis://:[redacted]@db"),
        ("postgres://app:p@ss@db/x", "postgres://app:[redacted]@db/x"),
        ("amqp://app:p/ss@db/x", "amqp://app:[redacted]@db/x"),
        ("Server=db;User Id=me;Pwd=hunter22;", "Server=db;User Id=me;Pwd=[redacted];"),
        ("AccountKey=abcd1234==;EndpointSuffix=x", "AccountKey=[redacted];EndpointSuffix=x"),
        ("https://x.example/a?sig=abcd1234&page=2", "https://x.example/a?sig=[redacted]&page=2"),
        ("<password>hunter22</password>", "<password>[redacted]</password>"),
    ],
)
def test_what_stands_before_a_secret_tells_of_it(text: str, expected: str) -> None:
    """In headers, in URLs, in assignments."""
    assert Redactor({}, environ={}).text(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "print('hello')", "https://example.org:8080/path", "git@example.org:a/b", "sk-learn", "tokens: 4000 of 8000",
        "the ask-me-anything-about-it page", "a" * 64,
        "Authorization: none", 'print("token: " + x + "...")', "bypass=abcdef",
        "KeyError: 'password'", "x = {'author': 'me'}", "mkdir -p build/out", "docker run -p 8080:80 -u 1000:1000 x",
        "ssh -p 2222 db", "cp -p notes.txt there", "http://db:8080/a/@me", "password required", "--token-file x",
        "cookie: what a browser keeps", "100% of it &amp; more", "else:\n    pass\n",
    ],
)  # fmt: skip
def test_other_text_stays(text: str) -> None:
    """What is no secret is as it was."""
    assert Redactor({}, environ={}).text(text) == text


def test_values_of_secret_variables_are_found_in_any_shape() -> None:
    """As they are, in a URL, in JSON, in base64; of the process and of the program."""
    value = 'pä ss"word'
    redactor = Redactor({"DB_PASSWORD": value}, environ={"MY_TOKEN": "correct-horse", "HOME": "/home/me"})
    encoded = base64.b64encode(value.encode()).decode()
    for text in (
        value, "p%C3%A4%20ss%22word", "p%C3%A4+ss%22word", r"pä ss\"word", r"p\u00e4 ss\"word", encoded,
        value.encode().hex(), "correct-horse",
    ):  # fmt: skip
        assert redactor.text(f"<{text}>").startswith(f"<{REDACTED}")
    assert redactor.text("in /home/me") == "in /home/me"
    assert redactor.data(b"\xff" + value.encode() + b"\xfe") == b"\xff[redacted]\xfe"


def test_a_secret_is_found_behind_others_in_base64() -> None:
    """As a header of basic authentication has it, however long the user's name is."""
    secret = "correct-horse-battery"
    redactor = Redactor({"DB_PASSWORD": secret}, environ={})
    for user in ("me:", "you:", "them:"):
        left = redactor.text(base64.b64encode(f"{user}{secret}".encode()).decode()).replace(REDACTED, "")
        assert len(left) <= 12
        assert b"horse" not in base64.b64decode(left + "=" * (-len(left) % 4))


def test_a_secret_of_several_lines_is_found_by_its_lines() -> None:
    """Where only some of it is printed, or as Python prints it."""
    key = "line one of the key\nline two of the\tkey"
    redactor = Redactor({"SIGNING_KEY": key}, environ={})
    for text in (repr(key), json.dumps(key), "line one of the key", "line two of the\tkey"):
        assert redactor.text(text).strip("'\"") == REDACTED


def test_names_with_secrets_in_them_are_written_without() -> None:
    """What stands under them stays, if it is none."""
    assert Redactor({"A_TOKEN": "correct-horse"}, environ={}).clean({"correct-horse": "x"}) == {REDACTED: "x"}


def test_short_and_plain_values_are_no_secrets() -> None:
    """A variable AUTH=1 takes no digit out of the log, and DEBUG_TOKEN=true no word."""
    redactor = Redactor({"AUTH": "1", "DEBUG_TOKEN": "true", "EMPTY_SECRET": ""}, environ={})
    assert redactor.text("1 is true") == "1 is true"


def test_names_of_secrets() -> None:
    """As environments call them; what only says where one is, is none."""
    for name in ("OPENAI_API_KEY", "github_token", "PGPASSWORD", "AWS_SECRET_ACCESS_KEY", "DATABASE_DSN", "NPM_AUTH"):
        assert is_secret(name), name
    for name in (
        "PATH",
        "HOME",
        "SSH_AUTH_SOCK",
        "AUTHOR",
        "KEYBOARD",
        "MONKEY",
        "GIT_AUTHOR_NAME",
        "TOKEN_FILE",
        "PWD",
    ):
        assert not is_secret(name), name


def test_members_with_secret_names_are_taken_out_whole() -> None:
    """In nested data, too; numbers stay."""
    told = {"list": [{"password": "x"}], "tokens": 12, "deep": {"api_key": "y", "name": "z"}}
    expected = {"list": [{"password": REDACTED}], "tokens": 12, "deep": {"api_key": REDACTED, "name": "z"}}
    assert Redactor({}, environ={}).clean(told) == expected


SECRET = 'Corr3ct&Horse <"9/ä'
_RAW = SECRET.encode()
_ENCODED = base64.b64encode(b"me:" + _RAW + b":and more of it").decode()


@pytest.mark.parametrize(
    "written",
    [
        SECRET.upper().replace("Ä", "ä"),
        SECRET.lower(),
        html.escape(SECRET),
        "".join(f"&#{ord(one)};" for one in SECRET),
        "".join(f"&#x{ord(one):X};" for one in SECRET),
        quote(SECRET, safe="").lower(),
        quote(quote(SECRET, safe=""), safe=""),
        quote_plus(SECRET.lower()),
        "".join(f"%{byte:02x}" for byte in _RAW),
        "".join(f"\\x{byte:02x}" for byte in _RAW),
        "".join(f"\\u{ord(one):04x}" for one in SECRET),
        json.dumps(json.dumps(SECRET))[3:-3],
        quote(json.dumps(SECRET)[1:-1]),
        _RAW.hex(" "),
        _RAW.hex().upper(),
        quote(base64.b64encode(_RAW).decode(), safe=""),
        base64.b64encode(SECRET.encode("utf-16-le")).decode(),
        "\0".join(SECRET.replace("ä", "")),
    ],
    ids=range(18),
)
def test_a_known_secret_is_found_however_it_is_written(written: str) -> None:
    """In any case, escaped once and more often, in hex and base64; what stands around it stays."""
    secret = SECRET.replace("ä", "") if "\0" in written else SECRET
    clean = Redactor({"DB_PASSWORD": secret}, environ={}).text(f"it is <{written}>\n and so on")
    assert re.fullmatch(r"it is <\[redacted\]=*(%3D)*>\n and so on", clean), clean


def test_each_character_may_be_written_in_its_own_way() -> None:
    """And what stands around the secret, escaped itself, is as it was."""
    dice, around = random.Random(7), ["a", "%41", "&amp;", "é", "\\u00e9", " ", "\n"]
    ways: list[Callable[[str], str]] = [
        str,
        str.swapcase,
        lambda one: "".join(f"%{byte:02x}" for byte in one.encode()),
        lambda one: "".join(f"\\x{byte:02x}" for byte in one.encode()),
        lambda one: f"&#{ord(one)};",
        lambda one: f"\\u{ord(one):04x}",
    ]
    redactor = Redactor({"DB_PASSWORD": SECRET}, environ={})
    for _ in range(1000):
        written = "".join(dice.choice(ways[:1] + ways[2:] if one == "ä" else ways)(one) for one in SECRET)
        before, after = ("".join(dice.choices(around, k=3)) for _ in range(2))
        assert redactor.text(f"{before}|{written}|{after}") == f"{before}|{REDACTED}|{after}"


@pytest.mark.parametrize("width", [4, 17, 60])
def test_a_known_secret_is_found_in_base64_that_is_wrapped(width: int) -> None:
    """Its lines may end anywhere, with a newline or with the escape of one."""
    lines = [_ENCODED[start : start + width] for start in range(0, len(_ENCODED), width)]
    for ending in ("\n", "\r\n  ", "\\n"):
        clean = Redactor({"DB_PASSWORD": SECRET}, environ={}).text(ending.join(lines))
        left = re.sub(r"\s|\\n", "", clean).split(REDACTED)
        assert len(left) == 2
        assert b"Horse" not in b"".join(base64.b64decode(part + "=" * (-len(part) % 4)) for part in (left[0], ""))
        assert _ENCODED.startswith(left[0])
        assert _ENCODED.endswith(left[1])
        assert len(left[0]) + len(left[1]) < len(_ENCODED) - len(_RAW)


def test_a_short_secret_is_found_as_it_is_alone() -> None:
    """Else a word of four letters would take away others."""
    assert Redactor({"A_TOKEN": "test"}, environ={}).text("a test, a Test") == "a [redacted], a Test"


def test_an_argument_behind_its_option_is_found_in_a_list() -> None:
    """As arguments of a command are given."""
    told = {"argv": ["tool", "--password", "hunter22", "-v", "--name", "x"], "other": ("--api-key", 7)}
    expected = {"argv": ["tool", "--password", REDACTED, "-v", "--name", "x"], "other": ["--api-key", 7]}
    assert Redactor({}, environ={}).clean(told) == expected


PIECES = (
    "sk-", "a://", "://:", "a://b:c", "password", "-----BEGIN PRIVATE KEY-----", "eyJ", "-eyJ", "_eyJaaaaaaaa",
    "a:" * 50, "token = ", "Bearer ", "password='", "--password ", "-p ", "-pa1", "-u a:", "authorization: a ",
    "cookie: a=",
    "SG.", "authorization: digest ", "password>", "?sig=", "%25", "%2541", "&#65;", "\\x41", "\\", "\n", "\0",
    "correct-hors", "A",
)  # fmt: skip


def took_s(piece: str, size: int) -> float:
    """Return how many seconds of processor time so much text takes."""
    text = piece * (size // len(piece))
    redactor = Redactor({"A_SECRET": "correct-horse", "B_SECRET": "a" * 200 + "b", "C_SECRET": "\n"}, environ={})
    redactor.text("warm up: --password x1 -p x1 =")
    begun = time.process_time()
    redactor.text(text)
    return time.process_time() - begun


@pytest.mark.parametrize("piece", PIECES)
def test_no_text_takes_long(piece: str) -> None:
    """Time grows with the length of a text and not faster, whatever a guest prints."""
    assert took_s(piece, 100_000) < 10


@pytest.mark.soak
@pytest.mark.parametrize(
    "piece", ["\\", "%2541", "://:", "password='", "token = ", "-u a:", "_eyJaaaaaaaa", "correct-hors"]
)
def test_no_long_text_takes_long(piece: str) -> None:
    """The same of ten million characters."""
    assert took_s(piece, 10_000_000) < 300


@pytest.mark.parametrize(
    ("before", "written"),
    [
        (r'"{\"key\": \"a\", \"p\": \"', r"pass\\\"word&more<x"),  # JSON in JSON
        ("{&quot;key&quot;: &quot;", r"pass\&quot;word&amp;more&lt;x"),
        ("%41%42%43 %41", "%2570" + "".join(f"%{byte:02x}" for byte in b'ass"word&more<x')),
        (r"%5cx41&amp;\x41%25%32%35%41", "%25%37%30%61ss&quot;word&amp;more%3C%78"),
    ],
)
def test_escapes_within_escapes_shift_nothing(before: str, written: str) -> None:
    """What is taken out is the secret, all of it and nothing beside it, whatever else is escaped before and in it."""
    redactor = Redactor({"A_SECRET": 'pass"word&more<x'}, environ={})
    assert redactor.text(f'{before}{written}\\"}}"') == f'{before}{REDACTED}\\"}}"'
