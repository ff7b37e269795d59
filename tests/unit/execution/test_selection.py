"""What `auto` chooses, decided without a host: by what was measured, what is asked for, and what is preferred."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from cloche.config.options import Prefer
from cloche.core.enforcement import Control, Level, Measure, State
from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.policy import BACKEND_ROWS, Policy
from cloche.core.protocols import Capabilities
from cloche.execution.registry import OPTIONS, Option
from cloche.execution.selection import BackendChoice, BackendCriteria, choose, find, unmet_policy

ALL = dict.fromkeys(Control, Measure(state=State.ENFORCED))
PARTIAL = {**ALL, Control.MEMORY: Measure(state=State.PARTIAL, reason="swap")}
NOTHING = {control: Measure(state=State.ABSENT) for control in (Control.FILESYSTEM, Control.NETWORK)}


def found(backend: str, level: Level, controls: Mapping[Control, Measure] = ALL, **facts: object) -> Capabilities:
    """Return what was measured of a backend."""
    return Capabilities(backend=backend, available=True, level=level, controls=controls, **facts)  # type: ignore[arg-type]


NO_QEMU = Capabilities(backend="microvm", available=False, reason="QEMU is not here", remedy="install it")
NO_FIRECRACKER = Capabilities(backend="firecracker", available=False, reason="it is not on PATH", remedy="install it")
HERE: Mapping[str, Capabilities | str] = {
    "local": found("local", Level.JAIL),
    "docker": found("docker", Level.JAIL, networks=("off", "bridge")),
    "gvisor": found("gvisor", Level.GVISOR, PARTIAL),
    "firecracker": NO_FIRECRACKER,
    "microvm": NO_QEMU,
}
WITH_KVM = {**HERE, "microvm": found("microvm", Level.VM)}
WITH_BOTH = {**WITH_KVM, "firecracker": found("firecracker", Level.VM)}
EMULATED = {**HERE, "microvm": "there is no KVM that can be used"}
CONFINED = {**HERE, "local": found("local", Level.CONFINED, PARTIAL, reason="namespaces are refused")}
NO_DAEMON = Capabilities(backend="docker", available=False, reason="nobody answers", remedy="start it")
ALONE = {**HERE, "docker": NO_DAEMON, "gvisor": NO_DAEMON}


def decide(
    host: Mapping[str, Capabilities | str],
    *,
    prefer: Prefer = "strongest",
    wants_image: bool = False,
    looked: list[str] | None = None,
    **policy: object,
) -> BackendChoice:
    """Choose among all options of a host; `looked` gets the names of those that were measured."""

    def look(option: Option) -> Capabilities | str:
        if looked is not None:
            looked.append(option.backend)
        return host[option.backend]

    return choose(OPTIONS, BackendCriteria(policy=Policy(**policy), prefer=prefer, wants_image=wants_image), look)  # type: ignore[arg-type]


def name_of(choice: BackendChoice) -> str:
    """Return what was chosen."""
    return choice.option.backend if choice.option else "nothing"


@pytest.mark.parametrize(
    ("host", "prefer", "policy", "expected"),
    [
        (HERE, "strongest", {}, "gvisor"),
        (HERE, "fastest", {}, "local"),
        (ALONE, "strongest", {}, "local"),
        (ALONE, "fastest", {}, "local"),
        (CONFINED, "fastest", {}, "local"),
        (CONFINED, "fastest", {"require_level": Level.JAIL}, "docker"),
        ({**CONFINED, "gvisor": NO_DAEMON}, "strongest", {}, "docker"),
        (HERE, "fastest", {"require_level": Level.GVISOR}, "gvisor"),
        (HERE, "strongest", {"require_controls": (Control.MEMORY,)}, "local"),
        (HERE, "fastest", {"network": "bridge"}, "docker"),
        (HERE, "strongest", {"network": "bridge"}, "docker"),
        (HERE, "strongest", {"network": "open"}, "nothing"),
        (HERE, "strongest", {"level": Level.JAIL}, "local"),
        (ALONE, "strongest", {"require_level": Level.GVISOR}, "nothing"),
        (HERE, "strongest", {"network": "allowlist"}, "nothing"),
        (HERE, "strongest", {"require_level": Level.VM}, "nothing"),
        (WITH_KVM, "strongest", {}, "microvm"),
        (WITH_KVM, "fastest", {}, "local"),
        (WITH_BOTH, "strongest", {}, "firecracker"),
        (WITH_BOTH, "fastest", {}, "local"),
        (WITH_KVM, "fastest", {"require_level": Level.VM}, "microvm"),
        (WITH_KVM, "strongest", {"network": "bridge"}, "docker"),
        (EMULATED, "strongest", {}, "gvisor"),
        (EMULATED, "strongest", {"require_level": Level.VM}, "nothing"),
    ],
)  # fmt: skip
def test_the_choice(host: Mapping[str, Capabilities], prefer: Prefer, policy: dict[str, object], expected: str) -> None:
    """The strongest that meets the policy, or the fastest that does; nothing less, ever."""
    assert name_of(decide(host, prefer=prefer, **policy)) == expected


def test_a_level_is_pinned_where_a_backend_has_several() -> None:
    """Who prefers the fastest gets docker's own runtime, though docker alone would prefer gVisor."""
    choice = decide(CONFINED, prefer="fastest", require_level=Level.JAIL)
    assert choice.option is not None
    assert (choice.option.backend, choice.option.level) == ("docker", Level.JAIL)


@pytest.mark.parametrize(
    ("prefer", "policy", "expected"),
    [
        ("fastest", {}, ["local"]),
        ("strongest", {}, ["firecracker", "microvm", "gvisor"]),
        ("strongest", {"level": Level.CONFINED}, ["local"]),
        ("strongest", {"require_level": Level.VM}, ["firecracker", "microvm"]),
        ("fastest", {"require_level": Level.GVISOR}, ["gvisor"]),
    ],
)
def test_nothing_is_measured_that_cannot_be_chosen(
    prefer: Prefer, policy: dict[str, object], expected: list[str]
) -> None:
    """No daemon is looked for where the answer is known without it."""
    looked: list[str] = []
    decide({**HERE, "local": found("local", Level.JAIL)}, prefer=prefer, looked=looked, **policy)
    assert looked == expected


def test_every_other_one_has_its_reason() -> None:
    """What was passed over is said with why, and with what to do about it."""
    choice = decide(ALONE, require_level=Level.GVISOR)
    assert choice.passed_over == {
        "firecracker": "it is not on PATH; install it",
        "microvm": "QEMU is not here; install it",
        "gvisor": "nobody answers; start it",
        "local": "level gvisor is required, and it gives jail at most",
        "docker": "level gvisor is required, and it gives jail at most",
    }


def test_what_would_have_to_be_fetched_is_passed_over() -> None:
    """A choice downloads nothing."""
    choice = decide({**HERE, "gvisor": "image 'x' is not here"})
    assert (name_of(choice), choice.passed_over["gvisor"]) == ("local", "image 'x' is not here")


def test_a_named_image_leaves_those_that_take_one() -> None:
    """An image for this very run is more than a wish."""
    choice = decide({**HERE, "gvisor": NO_DAEMON}, wants_image=True)
    assert name_of(choice) == "docker"
    assert choice.passed_over["local"] == "an image is requested, and it takes none"


def test_nothing_below_confined_is_chosen() -> None:
    """A host without isolation offers nothing, unless what it lacks was said to be dispensable."""
    bare = {**ALONE, "local": found("local", Level.PROCESS, {**ALL, **NOTHING}, reason="no Landlock")}
    choice = decide(bare)
    assert name_of(choice) == "nothing"
    assert "filesystem would not be enforced" in choice.passed_over["local"]
    assert "no Landlock" in choice.passed_over["local"]
    assert name_of(decide(bare, best_effort=tuple(NOTHING))) == "local"


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (Policy(), ""),
        (Policy(require_level=Level.GVISOR), "level gvisor is required but only jail can be reached"),
        (Policy(require_controls=(Control.MEMORY,)), "memory is required but would be partial: swap"),
        (Policy(network="open"), "network 'open' is requested, and it has off only"),
    ],
)
def test_a_misfit_is_told_in_a_sentence(policy: Policy, said: str) -> None:
    """By the rules that backends themselves refuse by."""
    assert unmet_policy(found("local", Level.JAIL, PARTIAL), policy) == said


def test_services_are_no_option() -> None:
    """Code leaves this machine only when its backend is named."""
    assert {option.backend for option in OPTIONS} <= {"local", "docker", "gvisor", "microvm", "firecracker"}
    assert all(BACKEND_ROWS[option.backend].provider for option in OPTIONS)


def test_an_image_for_a_backend_without_images_is_refused() -> None:
    """It would be ignored."""
    with pytest.raises(InvalidRequest, match="takes no image"):
        find("local", BackendCriteria(policy=Policy(), wants_image=True))


def test_a_missing_choice_names_all_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what was asked, why each backend does not give it, and what to do."""
    monkeypatch.setenv("CLOCHE_MICROVM_IMAGE", str(tmp_path))
    with pytest.raises(BackendUnavailable, match=r"gives what is requested.*gvisor: level vm.*cloche backends"):
        find("auto", BackendCriteria(policy=Policy(require_level=Level.VM)))
