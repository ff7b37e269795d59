"""What the doctor makes of its findings: pure decisions, told from invented measurements."""

from __future__ import annotations

import json

import pytest

from cloche.backends.remedies import group_remedy
from cloche.core.enforcement import Control, Level, Measure, State
from cloche.execution.doctor import (
    Diagnosis,
    FoundToolchain,
    InterpreterFacts,
    Trial,
    describe_interpreter,
    features_of,
    why_not_more,
)

REFUSED = {"user namespace": (False, "clone: EPERM"), "seccomp filter": (True, "")}


def diagnosis(level: Level, **controls: Measure) -> Diagnosis:
    """Return a diagnosis at `level` with these controls."""
    return Diagnosis(
        level=level,
        reason="",
        remedy="",
        kernel="Linux",
        user="uid 1",
        controls={Control(name): measure for name, measure in controls.items()},
        features=(),
        interpreter=InterpreterFacts(path="/p", real_path="/p", version="CPython 3"),
        toolchains=(FoundToolchain(language="ruby", note="missing"),),
        trials=(Trial(level=level, status="ok", seconds=0.03),),
    )


def test_a_missing_namespace_brings_the_hosts_own_remedy() -> None:
    """Only this host knows which of its switches refuses namespaces."""
    features = {f.name: f for f in features_of(REFUSED, namespace_remedy="turn the switch", uid=1, is_unified=True)}
    assert features["user namespace"].remedy == "turn the switch"
    assert (features["user namespace"].needed_for, features["user namespace"].detail) == ("jail", "clone: EPERM")


def test_what_works_needs_no_remedy() -> None:
    """A feature that works is not followed by advice."""
    features = features_of({"seccomp filter": (True, "")}, namespace_remedy="turn the switch", uid=1, is_unified=True)
    assert [f.remedy for f in features] == [""]


@pytest.mark.parametrize(
    ("uid", "is_unified", "word"),
    [(0, True, "writable"), (0, False, "writable"), (1, True, "systemd-run --user --scope"), (1, False, "version 1")],
)
def test_control_groups_are_had_differently_by_root_and_others(uid: int, is_unified: bool, word: str) -> None:
    """The remedy names what this user can do about it."""
    assert word in group_remedy(uid, is_unified=is_unified)
    features = features_of({"pids controller": (False, "no")}, namespace_remedy="", uid=uid, is_unified=is_unified)
    assert word in features[0].remedy


def test_an_ordinary_user_is_not_sent_after_what_only_root_needs() -> None:
    """Id-mapped mounts serve root alone; their lack is no fault of the host's."""
    features = features_of({"id-mapped mounts": (False, "needs root")}, namespace_remedy="", uid=1, is_unified=True)
    assert "nothing to do" in features[0].remedy


def test_a_level_that_should_work_and_did_not_says_why() -> None:
    """When the probe found nothing wrong, the failed run's own words are the reason."""
    trials = (Trial(level=Level.JAIL, status="failed", detail="cannot mount"), Trial(level=Level.CONFINED, status="ok"))
    assert why_not_more(Level.CONFINED, "", trials) == "cannot mount"
    assert why_not_more(Level.CONFINED, "namespaces are refused", trials) == "namespaces are refused"
    assert why_not_more(Level.JAIL, "", trials) == ""


@pytest.mark.parametrize(
    ("level", "is_usable"), [(Level.JAIL, True), (Level.CONFINED, True), (Level.PROCESS, False), (Level.NONE, False)]
)
def test_less_than_confined_is_not_usable(level: Level, is_usable: bool) -> None:
    """Code that nobody vetted needs at least level confined."""
    assert diagnosis(level).is_usable is is_usable


def test_weak_points_are_named_with_their_reason() -> None:
    """Everything short of enforced is one sentence; what is enforced is none."""
    found = diagnosis(
        Level.JAIL,
        memory=Measure(state=State.PARTIAL, reason="it can overshoot"),
        network=Measure(state=State.ENFORCED),
        disk=Measure(state=State.ABSENT),
    )
    assert found.weak_points == ("memory is partial: it can overshoot", "disk is absent: no mechanism enforces it here")


def test_a_diagnosis_is_plain_data() -> None:
    """What programs read holds the same facts as what people read."""
    data = json.loads(json.dumps(diagnosis(Level.JAIL, cpu=Measure(state=State.ENFORCED, mechanism="quota")).as_dict()))
    assert (data["level"], data["usable"]) == ("jail", True)
    assert data["controls"]["cpu"] == {"state": "enforced", "mechanism": "quota", "reason": ""}
    assert data["trials"][0]["status"] == "ok"
    assert data["toolchains"][0]["note"] == "missing"


def test_an_interpreter_of_the_system_needs_nothing_shown() -> None:
    """What is part of the system's trees is in every jail."""
    notes = describe_interpreter((FoundToolchain(language="python"),)).notes
    assert notes[0] == "part of the system's own trees"


def test_an_interpreter_elsewhere_names_what_the_jail_shows(tmp_path: object) -> None:
    """Every path that is bound besides the system is listed."""
    notes = describe_interpreter((FoundToolchain(language="python", shown=(str(tmp_path),)),)).notes
    assert notes[0] == f"shown besides the system: {tmp_path}"
