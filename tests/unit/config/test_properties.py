"""What holds for every configuration: the order of the sources, and that a checkout only tightens."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from cloche.config.keys import Settings
from cloche.config.settings import check_runnable, load_settings
from cloche.core.enforcement import Level
from cloche.core.errors import InvalidRequest, PolicyDenied
from cloche.core.policy import BACKENDS, PRESETS

MEBIBYTES = st.integers(16, 600).map(lambda count: f"{count}m")
HOSTS = st.lists(st.sampled_from(["a.example", "b.example", "c.example"]), unique=True, max_size=3)
CONTROLS = ["memory", "cpu", "pids", "network"]
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "memory": MEBIBYTES,
    "disk": MEBIBYTES,
    "timeout": st.integers(1, 400),
    "cpus": st.sampled_from([0.1, 0.25, 0.5, 1.0, 2.0]),
    "pids": st.integers(1, 300),
    "output_limit": st.integers(1, 200_000),
    "network": st.one_of(st.sampled_from(["off", "allowlist", "open", True, False]), HOSTS.filter(bool)),
    "preset": st.sampled_from(list(PRESETS)),
    "tier": st.integers(1, 4),
    "backend": st.sampled_from(BACKENDS),
    "require": st.lists(st.sampled_from(["process", "jail", "vm", *CONTROLS]), min_size=1, max_size=2),
    "best_effort": st.lists(st.sampled_from(CONTROLS), min_size=1, max_size=2, unique=True),
    "packages": st.one_of(st.just("auto"), st.lists(st.sampled_from(["numpy", "pandas"]), unique=True, min_size=1)),
    "screen": st.sampled_from(["off", "warn", "block"]),
    "prefer": st.sampled_from(["strongest", "fastest"]),
    "fallback": st.sampled_from(["none", "process"]),
}
FILE_VALUES = VALUES | {
    "network_allow": HOSTS,
    "network_deny": HOSTS,
    "network_ports": st.lists(st.sampled_from([22, 8443]), unique=True),
    "on_network": st.sampled_from(["refuse", "ask"]),
    "languages": st.lists(st.sampled_from(["python", "go", "bash", "csharp"]), unique=True, min_size=1),
    "image": st.sampled_from(["a:1", "b:2"]),
}
VARIABLES = ("memory", "cpus", "pids", "disk", "preset", "tier", "screen", "output_limit")
PLAIN = ("memory", "disk", "timeout", "cpus", "pids", "output_limit", "screen")


def some(values: Mapping[str, st.SearchStrategy[Any]], *, at_most: int = 5) -> st.SearchStrategy[dict[str, Any]]:
    """Give a few keys with values."""
    keys = st.lists(st.sampled_from(sorted(values)), unique=True, max_size=at_most)
    return keys.flatmap(lambda chosen: st.fixed_dictionaries({key: values[key] for key in chosen}))


ENVIRONMENTS = st.builds(
    lambda words, kind, timeout: {
        **{f"CLOCHE_{word.upper()}": str(value) for word, value in words.items()},
        **({"SANDBOX_TYPE": kind} if kind else {}),
        **({"SANDBOX_TIMEOUT_SEC": str(timeout)} if timeout else {}),
    },
    some({word: VALUES[word] for word in VARIABLES}, at_most=3),
    st.one_of(st.none(), VALUES["backend"]),
    st.one_of(st.none(), st.integers(1, 400)),
)


def load(
    arguments: Mapping[str, Any],
    owner: Mapping[str, Any],
    environ: Mapping[str, str],
    strangers: Mapping[str, str],
) -> Settings:
    """Load settings from a throwaway home and working directory."""
    with tempfile.TemporaryDirectory() as folder:
        home, cwd = Path(folder, "home"), Path(folder, "work")
        (home / ".config" / "cloche").mkdir(parents=True)
        cwd.mkdir()
        (home / ".config" / "cloche" / "config.yaml").write_text(yaml.safe_dump(dict(owner)))
        for name, text in strangers.items():
            (cwd / name).write_text(text)
        return load_settings(arguments, environ=environ, cwd=cwd, home=home)


def value_of(held: Settings, word: str) -> object:
    """Return a word's value as it is shown."""
    rows = {key: value for key, value, _ in held.as_rows()}
    return rows[word]


@settings(max_examples=80)
@given(
    word=st.sampled_from(PLAIN),
    data=st.data(),
)
def test_the_highest_source_that_speaks_wins(word: str, data: st.DataObject) -> None:
    """For a plain word, the value that holds is that of the highest source which names it."""
    file_value, variable, argument = (
        data.draw(st.one_of(st.none(), VALUES[word])) for _ in ("file", "environment", "argument")
    )
    preset_at = data.draw(st.sampled_from([None, "file", "environment", "argument"]))
    sources: dict[str, dict[str, Any]] = {
        "file": {word: file_value} if file_value is not None else {},
        "environment": {word: variable} if variable is not None and word != "timeout" else {},
        "argument": {word: argument} if argument is not None else {},
    }
    preset = {"preset": "minimal"} if preset_at else {}
    given_by = {rank: {**words, **(preset if rank == preset_at else {})} for rank, words in sources.items()}
    environ = {f"CLOCHE_{key.upper()}": str(value) for key, value in given_by["environment"].items()}
    held = load(given_by["argument"], given_by["file"], environ, {})
    in_preset = word in ("memory", "cpus", "pids", "timeout")
    expected: dict[str, Any] = {}
    for rank in ("file", "environment", "argument"):
        if rank == preset_at and in_preset:
            expected = {"preset": "minimal"}
        expected = sources[rank] or expected
    assert value_of(held, word) == value_of(load(expected, {}, {}, {}), word)


@settings(max_examples=60)
@given(arguments=some(VALUES), owner=some(FILE_VALUES), environ=ENVIRONMENTS, timeout=st.integers(1, 400))
def test_the_global_override_wins(
    arguments: dict[str, Any], owner: dict[str, Any], environ: dict[str, str], timeout: int
) -> None:
    """SANDBOX_TIMEOUT_SEC holds whatever the other sources say."""
    try:
        held = load(arguments, owner, environ | {"SANDBOX_TIMEOUT_SEC": str(timeout)}, {})
    except InvalidRequest:
        return
    assert held.limits.timeout_s == timeout


STRENGTH = {
    "subprocess": 1,
    "local": 2,
    "docker": 3,
    "gvisor": 4,
    "microsandbox": 5,
    "microvm": 5,
    "firecracker": 5,
}


def can_run(held: Settings) -> bool:
    """Tell whether these settings let code run."""
    try:
        check_runnable(held)
    except (InvalidRequest, PolicyDenied):
        return False
    return True


def reach(held: Settings) -> tuple[int, frozenset[str]]:
    """Return the network as something that can be compared."""
    return (["off", "allowlist", "open"].index(held.policy.network), frozenset(held.policy.network_allow))


def assert_not_looser(held: Settings, before: Settings) -> None:
    """Compare word by word, written down here a second time on purpose."""
    now, then = held.limits.as_dict(), before.limits.as_dict()
    assert all(now[field] <= then[field] for field in now)
    policy, old = held.policy, before.policy
    (mode, hosts), (old_mode, old_hosts) = reach(held), reach(before)
    assert mode < old_mode or mode in (0, 2) or hosts <= old_hosts
    assert mode <= old_mode
    assert set(policy.network_deny) >= set(old.network_deny)
    assert set(policy.network_ports) <= set(old.network_ports)
    assert policy.on_network in ("refuse", old.on_network)
    assert set(policy.best_effort) <= set(old.best_effort)
    assert set(policy.languages) <= set(old.languages)
    assert policy.packages == old.packages or (old.packages != "auto" and set(policy.packages) <= set(old.packages))
    assert set(policy.require_controls) >= set(old.require_controls)
    assert held.tier in (1, 2) or (policy.require_level or 0) >= (old.require_level or 0)
    if held.backend == before.backend:  # the screen that a child process has by itself goes with it
        assert ["off", "warn", "block"].index(policy.screen) >= ["off", "warn", "block"].index(old.screen)
    assert old.user is None or policy.user == old.user
    assert held.images == before.images
    assert held.ceilings == before.ceilings
    assert policy.fallback in ("none", old.fallback)
    assert held.prefer in ("strongest", before.prefer)
    assert not policy.trusted
    if (policy.require_level or 0) > Level.JAIL:
        return  # nothing less runs, whichever backend it is
    if can_run(held) and held.backend != before.backend:
        assert before.backend != "none" or before.tier == 4  # else nothing ran before
        stood = {"none": 0, "auto": 4}.get(before.backend, STRENGTH.get(before.backend, 9))
        assert STRENGTH.get(held.backend, -1) > stood


@settings(max_examples=100)
@given(
    arguments=some(VALUES, at_most=3),
    owner=some(FILE_VALUES),
    environ=ENVIRONMENTS,
    cloche=some(FILE_VALUES, at_most=3),
    shared=some(FILE_VALUES, at_most=2),
    dotenv=ENVIRONMENTS,
)
def test_a_checkout_only_tightens(
    arguments: dict[str, Any],
    owner: dict[str, Any],
    environ: dict[str, str],
    cloche: dict[str, Any],
    shared: dict[str, Any],
    dotenv: dict[str, str],
) -> None:
    """Whatever the files of the working directory say, they are refused, or what holds is no looser than
    without.
    """
    strangers = {
        "cloche.yaml": yaml.safe_dump(cloche),
        "config.yaml": yaml.safe_dump({"sandbox": shared}),
        ".env": "\n".join(f"{name}={value}" for name, value in dotenv.items()),
    }
    try:
        before = load(arguments, owner, environ, {})
        held = load(arguments, owner, environ, strangers)
    except InvalidRequest:
        return
    assert_not_looser(held, before)
