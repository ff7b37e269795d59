"""Where packages come from: the operator's own configuration, credentials apart."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest

from cloche.core.errors import InvalidRequest
from cloche.core.network import parse_rule
from cloche.packages.index import Index, find_index
from cloche.packages.registry import find_registry
from cloche.packages.resolve import resolve_step
from cloche.packages.rules import Rules
from cloche.packages.target import own_target


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """Return a folder with a home and a system."""
    (tmp_path / "home").mkdir()
    (tmp_path / "etc").mkdir()
    return tmp_path


def _find(host: Path, **environ: str) -> Index:
    return find_index(environ, home=str(host / "home"), system=str(host / "etc"))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_configuration_it_is_the_default(host: Path) -> None:
    """Which the client knows; a netrc may have credentials for it."""
    found = _find(host)
    assert (found.url, found.hosts, found.origin, dict(found.credentials)) == ("", (), "default", {})
    _write(host / "home/.netrc", "machine d.example login me password word\n")
    found = find_index({}, home=str(host / "home"), system=str(host / "etc"), default="https://d.example/simple")
    assert (found.url, found.hosts, found.origin) == ("https://d.example/simple", ("d.example:443",), "default")
    assert dict(found.credentials) == {"d.example:443": ("me", "word")}


def test_hosts_that_the_index_listed_are_public_ones() -> None:
    """Those that the operator named may have any address."""
    index = Index(
        url="https://a.example/simple", file_hosts=("b.example:443",), listed_hosts=("b.example:443", "c.example:443")
    )
    assert index.hosts == ("a.example:443", "b.example:443", "c.example:443")
    assert [rule.partition("@")[1] for rule in index.network_allow] == ["@", "@", ""]


@pytest.mark.parametrize(
    ("environ", "url"),
    [
        ({"UV_DEFAULT_INDEX": "https://a.example/simple/"}, "https://a.example/simple"),
        ({"UV_INDEX_URL": "https://a.example/simple"}, "https://a.example/simple"),
        ({"UV_DEFAULT_INDEX": "corp=https://a.example/simple"}, "https://a.example/simple"),
        ({"PIP_INDEX_URL": "https://a.example/simple"}, "https://a.example/simple"),
        ({"UV_INDEX_URL": "https://a.example", "PIP_INDEX_URL": "https://b.example"}, "https://a.example"),
    ],
)
def test_the_environment_names_it(host: Path, environ: dict[str, str], url: str) -> None:
    """Uv's variables before pip's."""
    assert _find(host, **environ).url == url


def test_files_of_the_user_come_before_those_of_the_system(host: Path) -> None:
    """Uv's before pip's, and the environment before both."""
    _write(host / "etc/pip.conf", "[global]\nindex-url = https://system.example/simple\n")
    assert _find(host).url == "https://system.example/simple"
    _write(host / "home/.config/pip/pip.conf", "[global]\nindex-url = https://user.example/simple\n")
    assert _find(host).url == "https://user.example/simple"
    _write(host / "home/.config/uv/uv.toml", '[[index]]\nurl = "https://uv.example/simple"\ndefault = true\n')
    assert _find(host).url == "https://uv.example/simple"
    assert _find(host, PIP_INDEX_URL="https://e.example").url == "https://uv.example/simple"
    assert _find(host, UV_INDEX_URL="https://e.example").url == "https://e.example"


def test_the_working_directory_says_nothing(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a checkout brings."""
    work = host / "work"
    for name in ("uv.toml", "pip.conf", "pip/pip.conf", ".pip/pip.conf", ".config/uv/uv.toml"):
        _write(work / name, 'index-url = "https://evil.example"\n[global]\nindex-url = https://evil.example\n')
    _write(work / "pyproject.toml", '[[tool.uv.index]]\nurl = "https://evil.example"\ndefault = true\n')
    _write(work / ".netrc", "default login a password b\n")
    monkeypatch.chdir(work)
    found = _find(host, PIP_CONFIG_FILE="pip.conf", UV_CONFIG_FILE="uv.toml", NETRC=".netrc", XDG_CONFIG_HOME=".config")
    assert (found.url, dict(found.credentials)) == ("", {})


def test_credentials_are_kept_apart_and_never_shown(host: Path) -> None:
    """Those of an address, of uv's variables, of a netrc."""
    found = _find(host, UV_INDEX_URL="https://me:s%40cret@a.example/simple")
    assert found.url == "https://a.example/simple"
    assert dict(found.credentials) == {"a.example:443": ("me", "s@cret")}
    assert found.with_credentials(found.url) == "https://me:s%40cret@a.example/simple"
    assert "cret" not in f"{found!r} {found} {found.credentials!r} {found.credentials} {found.credentials:}"

    told = found.credentials.hide("GET https://me:s%40cret@a.example: s@cret is wrong")
    assert told == "GET https://me:****@a.example: **** is wrong"

    _write(host / "home/.config/uv/uv.toml", '[[index]]\nname = "corp-x"\nurl = "https://b.example"\ndefault = true\n')
    named = _find(host, UV_INDEX_CORP_X_USERNAME="me", UV_INDEX_CORP_X_PASSWORD="word")
    assert dict(named.credentials) == {"b.example:443": ("me", "word")}

    netrc = host / "home/.netrc"
    _write(netrc, "machine b.example login me password n1\nmachine other.example login x password y\n")
    netrc.chmod(0o600)
    assert dict(_find(host).credentials) == {"b.example:443": ("me", "n1")}


def test_further_indexes_and_the_rules_of_the_network(host: Path) -> None:
    """Each host may be reached, whatever address it has by the operator's own resolver; files on disk are none."""
    found = _find(
        host,
        PIP_INDEX_URL="https://a.example:8443/simple",
        PIP_EXTRA_INDEX_URL="https://b.example/simple file:///opt/wheels http://10.0.0.5:3141/simple",
    )
    assert found.extra == ("https://b.example/simple", "http://10.0.0.5:3141/simple")
    assert found.hosts == ("a.example:8443", "b.example:443", "10.0.0.5:3141")
    rules = [parse_rule(rule) for rule in found.network_allow]
    assert [(rule.host, rule.ports) for rule in rules] == [
        ("a.example", (8443,)),
        ("b.example", (443,)),
        ("10.0.0.5", (3141,)),
    ]


PRIVATE, MIRROR, DEFAULT = (
    "https://own.example/simple",
    "https://mirror.example/simple",
    "https://default.example/simple",
)


@pytest.mark.parametrize(
    ("environ", "order"),
    [
        ({"PIP_INDEX_URL": PRIVATE, "PIP_EXTRA_INDEX_URL": DEFAULT}, [PRIVATE, DEFAULT]),
        ({"PIP_EXTRA_INDEX_URL": PRIVATE}, [PRIVATE, DEFAULT]),
        ({"UV_DEFAULT_INDEX": PRIVATE, "UV_INDEX": f"{DEFAULT} {MIRROR}"}, [MIRROR, PRIVATE, DEFAULT]),
        (
            {"UV_DEFAULT_INDEX": PRIVATE.replace("//", "//me:word@"), "UV_INDEX": f"{DEFAULT} {MIRROR}"},
            [PRIVATE, MIRROR, DEFAULT],
        ),
        (
            {"UV_DEFAULT_INDEX": PRIVATE, "UV_INDEX": DEFAULT, "UV_INDEX_STRATEGY": "unsafe-first-match"},
            [DEFAULT, PRIVATE],
        ),
        (
            {"UV_DEFAULT_INDEX": PRIVATE, "UV_INDEX": DEFAULT, "UV_INDEX_STRATEGY": "first-index"},
            [PRIVATE, DEFAULT],
        ),
        ({"UV_DEFAULT_INDEX": PRIVATE, "PIP_EXTRA_INDEX_URL": MIRROR}, [PRIVATE]),
    ],
)
def test_no_public_index_is_asked_before_a_private_one(host: Path, environ: dict[str, str], order: list[str]) -> None:
    """Credentials first, the client's default last, else as uv has it, unless the operator says that it is unsafe."""
    found = find_index(environ, home=str(host / "home"), system=str(host / "etc"), default=DEFAULT).in_order(DEFAULT)
    assert [*found.extra, found.url] == order
    step = resolve_step((), own_target(), found, Rules())
    assert ("unsafe-first-match" in step.argv) == ("unsafe-first-match" in environ.values())
    assert step.env["UV_DEFAULT_INDEX"].replace("me:word@", "") == order[-1]


def test_what_cannot_be_read_is_an_error_without_its_value(host: Path) -> None:
    """A value may hold a password."""
    with pytest.raises(InvalidRequest, match="not an address") as refused:
        _find(host, UV_INDEX_URL="me:secret@a.example")
    assert "secret" not in str(refused.value)
    _write(host / "home/.config/uv/uv.toml", "index-url = [")
    with pytest.raises(InvalidRequest, match="not TOML"):
        _find(host)


@pytest.mark.parametrize("word", ["sec/ret", "sec#ret", "sec[ret", "sec\u2100ret"])
def test_a_password_that_breaks_its_address_is_shown_in_no_error(host: Path, word: str) -> None:
    """Nor a part of it; the standard library's own words have some."""
    url = f"https://me:{word}@a.example/simple"
    for environ in ({"UV_DEFAULT_INDEX": url}, {"UV_INDEX": f"corp={url}"}, {"PIP_INDEX_URL": url}):
        try:
            shown = repr(_find(host, **environ).credentials)
        except InvalidRequest as error:
            shown = "".join(traceback.format_exception(error))
        assert "ret@" not in shown
        assert "sec" not in shown
    try:
        shown = repr(find_registry({"npm_config_registry": url}, home=str(host), systems=()).credentials)
    except InvalidRequest as error:
        shown = "".join(traceback.format_exception(error))
    assert "sec" not in shown


def test_the_operators_certificates_are_taken(host: Path) -> None:
    """From the environment, else from pip's own file."""
    bundle = host / "ca.pem"
    bundle.write_text("certificates")
    assert _find(host, PIP_CERT=str(bundle)).ca_bundle() == b"certificates"
    _write(host / "home/.pip/pip.conf", f"[global]\ncert = {bundle}\n")
    assert _find(host).ca_bundle() == b"certificates"
    with pytest.raises(InvalidRequest, match="cannot read"):
        _find(host, SSL_CERT_FILE=str(host / "none.pem")).ca_bundle()
