"""Secrets as values: what `secrets=` and `--secret` mean, what is refused, and placeholders."""

from __future__ import annotations

import copy
import pickle
import random
import re
from typing import Any

import pytest

from cloche.core.errors import InvalidRequest
from cloche.core.policy import Policy
from cloche.core.record import asdict
from cloche.core.secrets import (
    PROVIDERS,
    Secret,
    capture_as_wire,
    capture_from_wire,
    check_value,
    make_placeholder,
    read_secrets,
    texts_inside,
)

VALUE = "sk-ant-api03-AbCdEfGhIjKl0123456789-_zZ"
HOSTS = ["api.example.com"]


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("OPENAI_API_KEY", "OPENAI_API_KEY", {"env": "OPENAI_API_KEY", "hosts": ("api.openai.com",)}),
        ("KEY@a.example,B.example", "KEY", {"env": "KEY", "hosts": ("a.example", "b.example")}),
        ("KEY=env:OTHER@a.example", "KEY", {"env": "OTHER", "hosts": ("a.example",)}),
        ("KEY=file:/run/k=1@a.example", "KEY", {"file": "/run/k=1", "hosts": ("a.example",)}),
        ("KEY=env:A@a.example+query:k+body", "KEY", {"places": ("query:k", "body"), "hosts": ("a.example",)}),
        ("GH_TOKEN@+headers+body", "GH_TOKEN", {"places": ("headers", "body"), "env": "GH_TOKEN"}),
        ("KEY=cmd:pass show me@home@a.example", "KEY", {"command": "pass show me@home", "hosts": ("a.example",)}),
        (
            "GH_TOKEN=cmd:gh auth token",
            "GH_TOKEN",
            {"command": "gh auth token", "hosts": ("api.github.com", "github.com")},
        ),
    ],
)
def test_a_text_names_source_and_hosts(text: str, name: str, expected: dict[str, Any]) -> None:
    """`--secret` has one grammar; a known name needs no more than itself."""
    ((found, secret),) = read_secrets([text]).rows
    assert found == name
    assert {field: getattr(secret, field) for field in expected} == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("KEY", "must be a mapping"),
        (["KEY"], "; name them, as in KEY@HOST"),
        ([VALUE], f"'{VALUE[:4]}...' cannot be the name"),
        (["api-key"], "'api-key' cannot be the name"),
        ([Secret(hosts=tuple(HOSTS))], "must be a mapping"),
        (["A=login:openai@a.example"], "a login has the hosts of its provider"),
        ([f"KEY={VALUE}@a.example"], "cannot be given"),
        (["KEY=env:X@10.0.0.1"], "not the name of a host"),
        (["KEY=env:X@*.example.com"], "not the name of a host"),
        (["PATH=env:X@a.example"], "cannot be the name"),
        (["A@a.example", "A@b.example"], "given twice"),
        (["A@a.example", "A=login:openai"], "given twice"),
        (["A@a.example+path"], "no place of a request"),
        (["A=login:example"], "no provider whose logins are known"),
        ({"KEY": VALUE}, "must be a cloche.Secret"),
    ],
)
def test_another_form_is_refused_without_a_value_in_the_error(given: Any, words: str) -> None:
    """Each error says what is wrong, and none repeats what may be a value."""
    with pytest.raises(InvalidRequest, match=re.escape(words)) as caught:
        read_secrets(given)
    assert VALUE not in str(caught.value)


def test_a_login_has_the_captures_of_its_provider() -> None:
    """By name in a text, or in the place of a secret; their hosts are allowed."""
    named = read_secrets(["CLAUDE=login:Anthropic"])
    assert named.captures == read_secrets({"CLAUDE": Secret.login("anthropic")}).captures
    assert named.rules == ("platform.claude.com:443", "api.anthropic.com:443", "console.anthropic.com:443")
    ((_, own),) = read_secrets({"OWN": Secret.capture("https://A.example/t/%7Eu", hosts=HOSTS, answer=["a"])}).captures
    assert (own.host, own.path, own.answer, own.hosts) == ("a.example", "/t/%7Eu", ("a",), tuple(HOSTS))
    assert capture_from_wire(capture_as_wire("OWN", own)) == own


@pytest.mark.parametrize(
    "url",
    [
        "http://a.example/t",
        "https://a.example",
        "https://a.example:1/",
        "https://a.example/?a",
        "https://10.0.0.1/t",
        "https://u@a.example/t",
        "https://a.example/t#x",
    ],
)
def test_an_address_of_a_capture_is_exact(url: str) -> None:
    """Another form could be that of another path, or of another host."""
    with pytest.raises(InvalidRequest):
        Secret.capture(url, hosts=HOSTS)


@pytest.mark.parametrize(
    "options",
    [
        {"files_inside": {"/etc/passwd": "{}"}}, {"files_inside": {"~/../a": "{}"}}, {"files_inside": {"~/a//b": "{}"}},
        {"files_inside": {"~/": "{}"}}, {"files_inside": {"~/.npmrc": "no place"}}, {"places": []},
        {"places": ["path"]}, {"places": ["headers:x"]},
    ],
)  # fmt: skip
def test_a_place_or_a_file_of_another_form_is_refused(options: dict[str, Any]) -> None:
    """A path stays in the home folder; a text has a place for the placeholder."""
    with pytest.raises(InvalidRequest):
        Secret(value=VALUE, hosts=HOSTS, **options)  # type: ignore[arg-type]


def test_a_file_inside_has_placeholders_of_several_secrets() -> None:
    """Other braces stay: many such files are JSON."""
    text = '{"tokens": {"access": "{}", "refresh": "{B}"}, "{C}": {}}'
    secrets = {
        "A": Secret(value=VALUE, hosts=tuple(HOSTS), files_inside={"~/.x/auth.json": text}),
        "B": Secret(value=VALUE, hosts=tuple(HOSTS)),
    }
    made = texts_inside(read_secrets(secrets), {"A": "mark-a", "B": "mark-b"})
    assert made == {".x/auth.json": '{"tokens": {"access": "mark-a", "refresh": "mark-b"}, "{C}": mark-a}'}
    with pytest.raises(InvalidRequest, match="given twice"):
        read_secrets({name: Secret(value=VALUE, hosts=tuple(HOSTS), files_inside={"~/a": "{}"}) for name in "AB"})


def test_two_sources_are_refused() -> None:
    """A value has one source."""
    with pytest.raises(InvalidRequest, match="one source"):
        Secret(env="A", value=VALUE, hosts=HOSTS)  # type: ignore[arg-type]


def test_no_text_and_no_copy_has_the_value() -> None:
    """A policy with secrets is printed, logged and copied by others: none of that has the value."""
    secret = Secret(value=VALUE, hosts=HOSTS)  # type: ignore[arg-type]
    policy = Policy(secrets=read_secrets({"KEY": secret}))
    texts = [repr(secret), repr(policy), str(asdict(policy)), repr(copy.deepcopy(policy.secrets))]
    assert not [text for text in texts if VALUE in text]
    for kept in (secret, policy.secrets):
        with pytest.raises(InvalidRequest):
            pickle.dumps(kept)


@pytest.mark.parametrize(
    "data", [b"short", b" 12345678901 ", b"with white space", "päss-wörd-länger".encode(), b"x" * 20_000]
)
def test_a_value_that_cannot_be_used_is_refused(data: bytes) -> None:
    """It is too short to be found in an answer, or no header can have it."""
    with pytest.raises(InvalidRequest) as caught:
        check_value("KEY", data)
    assert data.decode("latin-1").strip()[:12] not in str(caught.value).replace("KEY", "")


def test_a_token_of_a_registry_needs_its_host() -> None:
    """Which registry a user has is not known; with its host the token is taken."""
    with pytest.raises(InvalidRequest, match="NPM_TOKEN needs hosts: its service is not known; name them"):
        read_secrets({"NPM_TOKEN": Secret(value="npm_0123456789")})
    assert read_secrets({"NPM_TOKEN": Secret(value="npm_0123456789", hosts=("npm.example",))}).rules


@pytest.mark.parametrize("prefix", [prefix for row in PROVIDERS.values() for prefix in row.prefixes])
def test_a_placeholder_looks_like_its_value(prefix: str) -> None:
    """Same length, prefix and punctuation, other letters."""
    value = prefix + "aB3-" * 8
    made = make_placeholder("KEY", value, random.Random(1).choice)
    assert made != value
    assert made.startswith(prefix)
    assert len(made) == len(value)
    assert [at for at, one in enumerate(made) if not one.isalnum()] == [
        at for at, one in enumerate(value) if not one.isalnum()
    ]


def test_a_placeholder_has_the_alphabet_of_its_value() -> None:
    """A value in hex has one in small letters and digits: clients check that."""
    assert re.fullmatch(
        "[a-z0-9]{40}", make_placeholder("KEY", "0123456789abcdef" * 2 + "01234567", random.Random(1).choice)
    )


def test_of_a_web_token_the_claims_stay() -> None:
    """Clients read the header and the claims of a JSON web token; the signature is another one."""
    token = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJtZSJ9.AbCdEfGhIjKlMnOpQr-_"
    made = make_placeholder("KEY", token, random.Random(1).choice)
    assert made.rpartition(".")[0] == token.rpartition(".")[0]
    assert made != token


def test_a_value_with_little_of_its_own_is_refused() -> None:
    """A placeholder of a few letters would stand elsewhere by chance."""
    with pytest.raises(InvalidRequest, match="letters and digits"):
        make_placeholder("KEY", "sk-ant-api03-abc", random.Random(1).choice)


@pytest.mark.parametrize(
    "given",
    [
        {"AWS_ACCESS_KEY_ID": HOSTS},
        {"AWS_SECRET_ACCESS_KEY": HOSTS},
        {"AWS_ACCESS_KEY_ID": HOSTS, "AWS_SECRET_ACCESS_KEY": ("sts.amazonaws.com",)},
        {"AWS_ACCESS_KEY_ID": HOSTS, "AWS_SECRET_ACCESS_KEY": HOSTS, "AWS_SESSION_TOKEN": ("sts.amazonaws.com",)},
    ],
)
def test_keys_of_aws_that_cannot_sign_are_an_error(given: dict[str, tuple[str, ...]]) -> None:
    """The id and the key are needed, for the same hosts."""
    with pytest.raises(InvalidRequest, match="cannot sign; give AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        read_secrets({name: Secret(value=VALUE, hosts=hosts) for name, hosts in given.items()})


@pytest.mark.parametrize("more", [{"format": "Key {}"}, {"places": ["query"]}])
def test_keys_of_aws_have_no_place_in_a_request(more: dict[str, Any]) -> None:
    """They sign."""
    secrets = {name: Secret(value=VALUE, hosts=HOSTS) for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="AWS_SECRET_ACCESS_KEY signs requests, and is put into none"):
        read_secrets({**secrets, "AWS_SECRET_ACCESS_KEY": Secret(value=VALUE, hosts=HOSTS, **more)})  # type: ignore[arg-type]
