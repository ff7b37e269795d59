"""Files that are wrong: each is refused with its name, the line or the key, and nothing waits or grows."""

import json
import os
import time
from pathlib import Path

import pytest

from cloche.config import sources
from cloche.config.keys import Settings
from cloche.config.settings import load_settings
from cloche.config.sources import MAX_FILE_BYTES
from cloche.core.errors import InvalidRequest
from cloche.core.limits import MIB


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with empty folders for configuration."""
    (tmp_path / "home" / ".config" / "cloche").mkdir(parents=True)
    (tmp_path / "home" / ".cloche").mkdir()
    (tmp_path / "work").mkdir()
    return tmp_path / "home"


def load(home: Path) -> Settings:
    """Load settings from this home alone."""
    return load_settings(environ={}, cwd=home.parent / "work", home=home)


def refusal(home: Path) -> str:
    """Load settings and return the message of the refusal."""
    with pytest.raises(InvalidRequest) as caught:
        load(home)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("tier: 3\nsandbox: [\n", ", line 3: "),
        ("memory: 1g\nmemory: 2g\n", ", line 2: the key 'memory' is given twice"),
        ("sandbox: {memory: 1g, memory: 2g}", ", line 1: the key 'memory' is given twice"),
        ("sandbox: !!python/object/apply:os.system [true]", ", line 1: could not determine a constructor"),
        ("a: {b: 2001-99-99}", "the value cannot be read"),
        ("- tier", "the whole file must be a mapping"),
        ("sandbox: 3", "sandbox must be a mapping"),
        ("sandbox: {memroy: 1g}", "unknown key 'sandbox.memroy'; did you mean 'memory'?"),
        ("sandbox: {3: 4}", "unknown key 'sandbox.3'"),
        ("sandbox: {memory: [1]}", "sandbox.memory: [1]"),
        ("sandbox: {memory: 12}", "sandbox.memory: 12 is below the smallest workable amount, 16m"),
        ("sandbox: {backend: 7}", "sandbox.backend: unknown backend 7"),
        ("sandbox: {languages: [cobol]}", "sandbox.languages: unknown language 'cobol'"),
        ("sandbox: {languages: []}", "no language is named"),
        ("sandbox: {network: 5}", "sandbox.network: 5 is not a network setting"),
        ("sandbox: {screen: on}", "sandbox.screen: True is unknown"),
        ("images: [a]", "images: a list is not a mapping"),
        ("images: {cobol: a}", "images: unknown language 'cobol'"),
        ("ceilings: {speed: 3}", "ceilings: unknown limit 'speed'"),
        ("ceilings: {users: 3}", "ceilings.users: 3 is neither true nor false"),
        ("ceilings: {memory: fast}", "ceilings.memory: 'fast' is not a size"),
        ("preset: huge", "preset: unknown preset 'huge'"),
        ("tier: three", "tier: unknown tier 'three'"),
    ],
)
def test_wrong_yaml_is_named(home: Path, text: str, named: str) -> None:
    """A mistake in a YAML file is reported with the file and what in it is wrong."""
    path = home / ".config" / "cloche" / "config.yaml"
    path.write_text(text)
    message = refusal(home)
    assert message.startswith(str(path))
    assert named in message


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"sandbox": {"timeout": 30000,}}', ", line 1, column "),
        ('{"sandbox": {"memory": "1g", "memory": "2g"}}', "the key 'memory' is given twice"),
        ('{"sandbox": {"kernel": 1}}', "unknown key 'sandbox.kernel'"),
        ("[" * 100_000, "not usable JSON"),
        ('{"sandbox": {"timeout": NaN}}', "sandbox.timeout: nan"),
        ('{"sandbox": {"pids": 1e3}}', "sandbox.pids: 1000.0 is not a whole number"),
    ],
)
def test_wrong_json_is_named(home: Path, text: str, named: str) -> None:
    """A mistake in a JSON file is reported with the file and what in it is wrong."""
    path = home / ".cloche" / "config.json"
    path.write_text(text)
    message = refusal(home)
    assert message.startswith(str(path))
    assert named in message


def test_unknown_keys_by_file(home: Path) -> None:
    """Outside `sandbox` an unknown key is an error in cloche.yaml and ignored elsewhere."""
    (home / ".cloche" / "config.json").write_text('{"editor": "vi"}')
    (home / ".config" / "cloche" / "config.yaml").write_text("editor: vi\n")
    load(home)
    (home / ".config" / "cloche" / "cloche.yaml").write_text("editor: vi\n")
    assert "cloche.yaml: unknown key 'editor'; known keys:" in refusal(home)


def test_keys_outside_the_section_count_too(home: Path) -> None:
    """In Cloche's own files a known key means the same beside `sandbox` as in it."""
    (home / ".config" / "cloche" / "cloche.yaml").write_text("memory: 64m\nsandbox: {pids: 5}\n")
    limits = load(home).limits
    assert (limits.memory_bytes, limits.pids) == (64 * MIB, 5)


@pytest.mark.parametrize("text", ["", "# nothing\n", "sandbox:\n", "sandbox: {memory: }\n", "\ufefftier:\n"])
def test_empty_files_say_nothing(home: Path, text: str) -> None:
    """An empty file, section or value is the same as none."""
    (home / ".config" / "cloche" / "config.yaml").write_text(text, encoding="utf-8")
    assert set(load(home).origins.values()) == {"default"}


def test_files_are_bounded(home: Path) -> None:
    """A file over the bound is refused before it is parsed."""
    path = home / ".config" / "cloche" / "config.yaml"
    path.write_text("#" * (MAX_FILE_BYTES + 1))
    assert f"larger than {MAX_FILE_BYTES} bytes" in refusal(home)


def test_documents_that_grow_are_refused(home: Path) -> None:
    """Merge keys that double a mapping at every level end early."""
    lines = ["a0: &a0 {x: 1, y: 2}"] + [f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 60)]
    (home / ".config" / "cloche" / "config.yaml").write_text("\n".join(lines))
    assert "too many entries" in refusal(home)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("a: " + ":".join(["59"] * 120_000), "the number is too long"),
        ("a: [" + "0," * 500_000 + "0]", "more than 40000 values"),
    ],
    ids=["sexagesimal", "values"],
)
def test_what_a_checkout_holds_is_read_soon(home: Path, text: str, named: str) -> None:
    """A number that takes the square of its parts, and values by the hundred thousand, are refused at once."""
    (home.parent / "work" / "cloche.yaml").write_text(text)
    begun = time.process_time()
    assert named in refusal(home)
    assert time.process_time() - begun < 3


def test_merge_keys_still_work(home: Path) -> None:
    """A merged mapping that is merged again is not taken for a key given twice."""
    text = "a: &a {x: 1}\nb: &b {<<: *a, x: 2}\nc: {<<: *b, x: 3}\nsandbox: {pids: 9}\n"
    (home / ".config" / "cloche" / "config.yaml").write_text(text)
    assert load(home).limits.pids == 9


def test_endless_values_are_not_printed(home: Path) -> None:
    """A value that refers to itself, or a very long one, does not fill the message."""
    path = home / ".config" / "cloche" / "config.yaml"
    path.write_text("sandbox: {backend: &a [*a, *a]}")
    assert len(refusal(home)) < 500
    path.write_text(json.dumps({"sandbox": {"backend": "x" * 10_000}}))
    assert "the text has 10000 characters" in refusal(home)


def test_not_a_regular_file(home: Path) -> None:
    """A fifo or a folder in a file's place is refused at once, without waiting for a writer."""
    os.mkfifo(home / ".cloche" / "config.json")
    assert "is not a regular file" in refusal(home)
    (home / ".cloche" / "config.json").unlink()
    (home / ".config" / "cloche" / "config.yaml").mkdir()
    assert "is not a regular file" in refusal(home)


def test_not_utf_8(home: Path) -> None:
    """A file in another encoding is refused with the position."""
    (home / ".config" / "cloche" / "config.yaml").write_bytes(b"tier: 3 # caf\xe9")
    assert "is not UTF-8 (byte 13)" in refusal(home)


def test_a_changed_file_is_read_again(home: Path) -> None:
    """A file is kept once read, and read again as soon as it changes, even within a tick of the clock."""
    path = home / ".config" / "cloche" / "config.yaml"
    for pids in range(10, 60):
        fresh = path.with_suffix(".new")
        fresh.write_text(f"pids: {pids}\n")
        fresh.rename(path)
        assert load(home).limits.pids == pids


def test_a_server_may_look_at_files_less_often(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed file counts after the time that the process set, and not before."""
    now = 100.0
    monkeypatch.setattr(sources.time, "monotonic", lambda: now)
    monkeypatch.setattr(sources, "_looks", {})
    monkeypatch.setattr(sources, "_look_s", 1.0)
    path = home / ".config" / "cloche" / "config.yaml"
    path.write_text("pids: 10\n")
    assert load(home).limits.pids == 10
    path.write_text("pids: 110\n")
    now += 0.9
    assert load(home).limits.pids == 10
    now += 0.2
    assert load(home).limits.pids == 110


def test_the_folder_of_the_platform(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a given home, files are looked for where platformdirs says."""
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "xdg"))
    (home / "xdg" / "cloche").mkdir(parents=True)
    (home / "xdg" / "cloche" / "config.json").write_text('{"sandbox": {"pids": 11}}')
    (home / ".cloche" / "config.json").write_text('{"sandbox": {"cpus": 0.25}}')
    limits = load_settings(environ={}, cwd=home).limits
    assert (limits.pids, limits.cpus) == (11, 0.25)


def test_a_removed_working_directory(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A working directory that is gone holds no files, and is no error."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert load_settings(environ={}, home=home).backend == "local"
