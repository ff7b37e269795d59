"""A pinned list: what uv writes is read as a stranger's file; rules and lock files."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cloche.core.enforcement import Control, Level
from cloche.core.errors import InvalidRequest, PolicyDenied, StartFailed
from cloche.core.layers import Target
from cloche.core.policy import Policy
from cloche.packages.build import build_step
from cloche.packages.index import Index
from cloche.packages.lock import format_lock, read_lock
from cloche.packages.requirements import parse_requirements
from cloche.packages.resolve import Facts, Pin, check_pins, read_pins, resolve_step
from cloche.packages.rules import Rules
from cloche.packages.steps import step_policy
from cloche.packages.store import layer_key, set_key
from cloche.packages.target import own_target

HASH = "0" * 64
INDEX = Index(url="https://a.example/simple")
URL = "https://a.example/f/six-1.0-py3-none-any.whl"


def _lock(url: str = URL, name: str = "six", sha256: str = HASH, more: str = "") -> str:
    wheel = f'{{ url = "{url}", hashes = {{ sha256 = "{sha256}" }}, size = 5 }}'
    return f'lock-version = "1.0"\n[[packages]]\nname = "{name}"\nversion = "1.0"\nwheels = [{wheel}]\n{more}'


def test_a_pinned_list_is_read() -> None:
    """Without the credentials that an address may have."""
    expected = (Pin(name="six", version="1.0", url=URL, sha256=HASH, size=5),)
    assert read_pins(_lock(), INDEX, own_target()) == expected
    assert read_pins(_lock(URL.replace("//", "//me:word@")), INDEX, own_target()) == expected
    assert read_pins('lock-version = "1.0"', INDEX, own_target()) == ()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (_lock("https://evil.example/six-1.0-py3-none-any.whl"), "not a host of the index"),
        (_lock("https://a.example:444/six-1.0-py3-none-any.whl"), "not a host of the index"),
        (_lock("http://a.example/six-1.0-py3-none-any.whl"), "not a host of the index"),
        (_lock("file:///etc/six-1.0-py3-none-any.whl"), "no address|has no https address|cannot be used"),
        (_lock("https://a.example/six-1.0.tar.gz"), "no wheel.*packages_build"),
        (_lock("https://a.example/evil-1.0-py3-none-any.whl"), "another package"),
        (_lock("https://a.example/..%2F..%2Fsix-1.0-py3-none-any.whl"), "no wheel|another"),
        (_lock(sha256="0" * 40), "no hash"),
        (_lock(sha256="Z" * 64), "no hash"),
        (_lock(more=_lock().partition("\n")[2]), "twice"),
        ('[[packages]]\nname = "six"\nversion = "1.0"\n', "no wheel"),
        ('[[packages]]\nversion = "1.0"\n', "name"),
        ("[[packages", "cannot be used"),
        ("packages = 1", "cannot be used"),
        ('packages = ["six"]', "cannot be used"),
    ],
)
def test_a_list_that_is_not_as_it_should_be_is_refused(text: str, why: str) -> None:
    """Nothing of it is downloaded."""
    with pytest.raises(StartFailed, match=why):
        read_pins(text, INDEX, own_target())


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"version": "1.0\n--index-url https://evil.example"}, "another version"),
        ({"version": "2.0"}, "another version"),
        ({"url": "https://a.example:port/six-1.0-py3-none-any.whl"}, "has no https address"),
        ({"url": "https://[a.example/six-1.0-py3-none-any.whl"}, "has no https address"),
        ({"url": "https:///six-1.0-py3-none-any.whl"}, "has no https address"),
        ({"name": "six\x1b[2j", "url": "https://a.example/six%1b[2j-1.0-py3-none-any.whl"}, "not a name"),
        ({"url": "https://a.example/six-1.0-py3-none-any%0a.whl"}, "no wheel"),
        ({"size": 10**3000}, "more than"),
        ({"size": -(10**9)}, "an invalid size"),
    ],
)
def test_a_lock_file_of_a_stranger_is_refused_in_words(changed: dict[str, Any], why: str) -> None:
    """What it says stands in later requirements and in errors."""
    pin = replace(Pin(name="six", version="1.0", url=URL, sha256=HASH), **changed)
    with pytest.raises(StartFailed, match=why):
        check_pins((pin,), INDEX)


def test_a_lock_file_pins_what_it_says_that_it_is_for(tmp_path: Path) -> None:
    """Else one that asks for a listed package could bring any other one in its place."""
    asked, target = parse_requirements(["six>=1", "x; python_version<'3'"]), own_target()
    file = tmp_path / "cloche.lock"
    six = Pin(name="six", version="1.0", url=URL, sha256=HASH)
    for pins in ((), (replace(six, name="evil"),), (replace(six, version="0.9"),)):
        file.write_text(format_lock(asked, pins, target))
        with pytest.raises(InvalidRequest, match="has no pins for six>=1;"):
            read_lock(str(file)).check(asked, target)
    file.write_text(format_lock(asked, (six,), target))
    read_lock(str(file)).check(asked, target)
    file.write_text("a = " + "[" * 100_000)
    with pytest.raises(InvalidRequest, match="not a lock file"):
        read_lock(str(file))


SOURCE = f'[[packages]]\nname = "six"\nversion = "1.0"\nsdist = {{ url = "%s", hashes = {{ sha256 = "{HASH}" }} }}\n'


@pytest.mark.parametrize(
    ("file", "why"),
    [
        ("https://a.example/f/evil-1.0.tar.gz", "another package"),
        ("https://a.example/f/six-1.0.tar.xz", "an unsupported kind"),
        ("https://a.example/..%2Fsix-1.0.tar.gz", "no wheel"),
        ("https://evil.example/six-1.0.tar.gz", "not a host of the index"),
    ],
)
def test_a_source_is_read_where_it_is_wanted_and_has_its_name(file: str, why: str) -> None:
    """Else nothing of it is downloaded; what it was built with tells it from any other build of it."""
    url = "https://a.example/f/six-1.0.tar.gz"
    (pin,) = read_pins(SOURCE % url, INDEX, own_target(), ["six"])
    assert (pin.is_source, pin.url, pin.sha256) == (True, url, HASH)
    with pytest.raises(StartFailed, match="no wheel"):
        read_pins(SOURCE % url, INDEX, own_target())
    with pytest.raises(StartFailed, match=why):
        read_pins(SOURCE % file, INDEX, own_target(), ["six"])
    wheels = [Pin(name="six", version="1.0", url=URL, sha256=sha256) for sha256 in (HASH, "1" * 64)]
    built = [replace(pin, build=(wheel,)) for wheel in wheels]
    assert len({layer_key([one], own_target()) for one in (pin, *built, wheels[0])}) == 4
    for one in (pin, replace(wheels[0], url=URL.replace("six", "evil"))):
        with pytest.raises(StartFailed, match=r"no wheel|another package"):
            check_pins([replace(pin, build=(one,))], INDEX, ["six"])


def test_uv_is_told_what_sources_need_and_looks_into_none() -> None:
    """Of each that may be taken there is a table for all versions, so it has nothing to build for."""
    known = Facts(requires=('a>1; extra == "x"',), python=">=3.9", extras=("x",))
    step = resolve_step(parse_requirements(["six"]), own_target(), INDEX, Rules(), (), {"six": {"1.0": known}})
    assert step.argv[step.argv.index("--only-binary") + 1] == ":all:"
    assert step.argv[step.argv.index("--no-binary") + 1] == "six"
    told = step.argv[step.argv.index("--config-file") + 1]
    (data,) = [file.data for file in step.files if file.path == told]
    assert tomllib.loads(data.decode()) == {
        "dependency-metadata": [
            {"name": "six", "requires-dist": [], "provides-extra": []},
            {
                "name": "six", "version": "1.0", "requires-dist": ['a>1; extra == "x"'], "requires-python": ">=3.9",
                "provides-extra": ["x"],
            },
        ]
    }  # fmt: skip
    assert "--no-binary" not in resolve_step(parse_requirements(["six"]), own_target(), INDEX, Rules()).argv


def test_a_step_that_runs_code_is_in_a_jail_without_a_network() -> None:
    """Whatever the run itself would be content with."""
    step = build_step("/s/a.tar.gz", (), "/l")
    asked = Policy(level=Level.PROCESS, best_effort=(Control.NETWORK, Control.MEMORY), seccomp=False, network="open")
    policy = step_policy(asked, replace(step, network_allow=("a.example",)))
    assert (policy.level, policy.network, policy.network_allow) == (Level.JAIL, "off", ())
    assert (policy.seccomp, policy.drop_capabilities, policy.best_effort) == (True, True, (Control.MEMORY,))
    assert not step.env


def test_of_several_wheels_the_best_for_this_interpreter_is_taken() -> None:
    """And none for another one."""
    tag = f"cp{own_target().tag.rpartition('-')[2]}"
    other = "https://a.example/six-1.0-cp37-cp37m-win_amd64.whl"
    wheels = ", ".join(
        f'{{ url = "{url}", hashes = {{ sha256 = "{HASH}" }} }}' for url in (other, URL, URL.replace("py3", tag))
    )
    text = f'[[packages]]\nname = "six"\nversion = "1.0"\nwheels = [{wheels}]\n'
    (pin,) = read_pins(text, INDEX, own_target())
    assert tag in pin.url
    with pytest.raises(StartFailed, match="no wheel for this interpreter"):
        read_pins(text.replace("py3-none", "cp37-none").replace(f"{tag}-none", "cp37-none"), INDEX, own_target())


def test_credentials_are_in_the_environment_of_the_step_alone() -> None:
    """Not in its command, nor in what it shows of itself."""
    index = Index(url="https://a.example/simple", credentials=Index().credentials)
    with_secret = Index(url=index.url, credentials=type(index.credentials)({"a.example:443": ("me", "word")}))
    step = resolve_step(parse_requirements(["six"]), own_target(), with_secret, Rules(min_age_s=86400.0))
    assert "word" in step.env["UV_DEFAULT_INDEX"]
    assert "word" not in f"{step!r}{step.argv}"
    assert "--exclude-newer" in step.argv
    assert step.argv[step.argv.index("--only-binary") + 1] == ":all:"


def test_rules_name_what_is_denied_and_what_is_not_listed() -> None:
    """Denied wins, spelled in any way; without a list all is listed."""
    rules = Rules(allow=("rich", "My_Company*"), deny=("evil*", "my-company-old"))
    rules.check_denied(["rich", "my-company-new"])
    for name in ("evil", "evil-twin", "my-company-old"):
        with pytest.raises(PolicyDenied, match=name):
            rules.check_denied(["rich", name])
    asked = parse_requirements(["Rich>1", "my.company.x", "six", "httpx"])
    assert rules.unlisted(asked) == ("httpx", "six")
    assert Rules().unlisted(asked) == ()


def test_the_age_of_a_release_is_a_time() -> None:
    """None without a bound."""
    now = datetime(2026, 5, 8, 12, tzinfo=UTC)
    assert Rules(min_age_s=7 * 86400.0).newest(now) == "2026-05-01T12:00:00Z"
    assert Rules().newest(now) == ""


def test_a_lock_file_says_what_it_was_told(tmp_path: Path) -> None:
    """And is for these requirements and this interpreter alone."""
    asked, target = parse_requirements(["six>=1"]), own_target()
    wheel = Pin(name="six", version="1.0", url=URL, sha256=HASH, size=5)
    source = Pin(name="zzz", version="1", url="https://a.example/zzz-1.tar.gz", sha256=HASH, build=(wheel,))
    pins = (wheel, source)
    file = tmp_path / "cloche.lock"
    file.write_text(format_lock(asked, pins, target))
    locked = read_lock(str(file))
    assert locked.asked == asked
    assert [pin.identity for pin in locked.pins] == [pin.identity for pin in pins]
    assert [pin.url for pin in locked.pins] == [pin.file_name for pin in pins]  # where they lie, the index says
    locked.check(asked, target)
    locked.check_resolved(pins)
    with pytest.raises(InvalidRequest, match=r"does not pin rich==1, but a requested package needs that"):
        locked.check_resolved((*pins, replace(wheel, name="rich", version="1")))
    with pytest.raises(InvalidRequest, match=r"pins six==1\.0, which no requested package needs"):
        locked.check_resolved((source,))
    with pytest.raises(InvalidRequest, match=r"does not pin zzz==1"):
        locked.check_resolved((wheel, replace(source, build=())))
    for changed in ({"version": '1"\n0'}, {"version": "1\n-r /etc/passwd"}, {"name": "a b"}):
        odd = replace(wheel, **changed)
        file.write_text(format_lock(asked, (odd,), target))
        with pytest.raises(InvalidRequest, match="not a package with its version"):
            read_lock(str(file))
    with pytest.raises(InvalidRequest, match="not in it: rich; only in it: six>=1"):
        locked.check(parse_requirements(["rich"]), target)
    other = Target(python="/x", version="3.9.1", tag="cpython-39", platform="linux-aarch64", libc="musl")
    with pytest.raises(InvalidRequest, match="cpython-39 on linux-aarch64"):
        locked.check(asked, other)
    for text in ("version = 1", "x", "version = 2\nrequirements = 1", "version = 2\nrequirements = []\npackages = [1]"):
        file.write_text(text)
        with pytest.raises(InvalidRequest, match="not a lock file"):
            read_lock(str(file))


def test_keys_tell_sets_interpreters_and_terms_apart() -> None:
    """And nothing else: the order of requirements and of pins is none."""
    target = own_target()
    other = Target(**{**target.as_dict(), "libc": "musl"})
    one, two = (Pin(name=name, version="1", url=URL, sha256=HASH) for name in ("a", "b"))
    keys = [
        layer_key([one], target), layer_key([one, two], target), layer_key([one], other),
        set_key(parse_requirements(["a"]), target, ()), set_key(parse_requirements(["a"]), target, (1,)),
        set_key(parse_requirements(["a>1"]), target, ()),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)
    assert layer_key([two, one], target) == keys[1]


def test_a_lock_file_that_is_no_file_is_not_read() -> None:
    """What never ends, or waits for somebody to write, is refused: a folder that came from elsewhere may hold it."""
    with pytest.raises(InvalidRequest, match="not a regular file"):
        read_lock("/dev/zero")
