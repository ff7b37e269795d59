"""Secrets are taken out of text: those that are known, and those that look like one."""

from __future__ import annotations

import base64
import json
import time

import pytest

from cloche.runtime.redaction import REDACTED, Redactor, is_secret

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
        "KeyError: 'password'", "x = {'author': 'me'}",
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
    assert Redactor({"A_TOKEN": "correct-horse"}, environ={}).plain({"correct-horse": "x"}) == {REDACTED: "x"}


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
    assert Redactor({}, environ={}).plain(told) == expected


@pytest.mark.parametrize(
    "piece",
    [
        "sk-",
        "a://",
        "password",
        "-----BEGIN PRIVATE KEY-----",
        "eyJ",
        "-eyJ",
        "_eyJaaaaaaaa",
        "a:" * 50,
        "token = ",
        "Bearer ",
    ],
)
def test_no_text_takes_long(piece: str) -> None:
    """Time grows with the length of a text and not faster, whatever a guest prints."""
    text = piece * (200_000 // len(piece))
    begun = time.perf_counter()
    Redactor({"A_SECRET": "correct-horse"}, environ={}).text(text)
    assert time.perf_counter() - begun < 5
