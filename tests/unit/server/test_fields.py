"""Which field an error is about, and by which names a setting can be said."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cloche.config.keys import Settings
from cloche.config.settings import load_settings
from cloche.config.spellings import SPELLINGS, read_names
from cloche.core.ceilings import NetworkCeiling
from cloche.core.errors import BackendUnavailable, Conflict, InvalidRequest, PolicyDenied
from cloche.core.record import replace
from cloche.records.devenv import parse_manifest
from cloche.server.problems import response_to
from cloche.server.routes import approvals, devenv
from cloche.wire.at_path import AtPath
from cloche.wire.bodies import validated
from cloche.wire.callers import Caller
from cloche.wire.exec_options import ExecRequest, backend_for_image, check_fields, check_not_looser, needs_presence
from cloche.wire.work import WireExec

RUNNER = Caller(project="default", scopes=("run",))
ALIASES: dict[str, tuple[Any, Any]] = {
    "Timeout": (3, 3), "memory_limit": ("64m", "64m"), "MemoryLimitBytes": (1 << 26, 1 << 26), "cpu_limit": (0.5, 0.5),
    "CpuLimitPercent": (50, 0.5), "NetworkEnabled": (False, False), "NetworkAllowList": (["a.example"], ["a.example"]),
    "outputLimit": (1_000, 1_000), "PythonPackages": (["x"], ["x"]), "runtime": ("gvisor", "gvisor"),
}  # fmt: skip


def _told(work: Any, *arguments: Any) -> tuple[int, str | None, str]:
    """Return status, field and detail of what goes wrong."""
    with pytest.raises(Exception) as refused:
        work(*arguments)
    answer = json.loads(bytes(response_to(refused.value).body))  # type: ignore[arg-type]
    return answer["status"], answer["field"], answer["detail"]


@pytest.mark.parametrize("name", ALIASES)
@pytest.mark.parametrize("model", [ExecRequest, WireExec])
def test_a_run_and_the_settings_take_the_same_names(name: str, model: type[ExecRequest]) -> None:
    """What files know of a setting's names is known on each route, and comes to the same value."""
    given, value = ALIASES[name]
    assert read_names({name: given}) == {SPELLINGS[name]: value}
    assert validated(model, {"code": "1", name: given}).options() == {SPELLINGS[name]: value}


@pytest.mark.parametrize(
    ("one", "other", "value"),
    [
        ("memoryLimit", "MemoryLimitBytes", 1 << 26), ("memory_limit", "memoryLimit", "64m"), ("timeout", "Timeout", 1),
        ("cpuLimit", "CpuLimitPercent", 1), ("network", "NetworkEnabled", False), ("backend", "runtime", "local"),
    ],
)  # fmt: skip
def test_two_names_of_the_same_are_an_error(one: str, other: str, value: object) -> None:
    """Whichever came first, the second one is told, in a run and in the settings; so it is with any field's."""
    given, why = {one: value, other: value}, f"{other}: {one} sets the same value; give one of them"
    assert _told(validated, ExecRequest, {"code": "1", **given}) == (422, other, why)
    assert _told(read_names, given)[2] == why
    files = {"code": "1", "returnFiles": True, "return_files": True}
    assert _told(validated, ExecRequest, files)[:2] == (422, "return_files")


def test_a_run_by_dockers_own_runtime_is_no_backend() -> None:
    """`runtime` is another word for `backend` where it names one."""
    both = {"code": "1", "backend": "docker", "runtime": "runc"}
    assert validated(ExecRequest, both).options() == {"backend": "docker", "runtime": "runc"}


@pytest.mark.parametrize(
    ("error", "field", "detail"),
    [
        (InvalidRequest("memory: 1 is little"), "memoryLimit", "memoryLimit: 1 is little"),
        (PolicyDenied("cpus: 9 is above"), "cpuLimit", "cpuLimit: 9 is above"),
        (InvalidRequest("network_allow: x"), "networkAllow", "networkAllow: x"),
        (InvalidRequest("workspacePath: no"), "workspacePath", "workspacePath: no"),
        (InvalidRequest("arguments, rules: no JSON"), "arguments", "arguments, rules: no JSON"),
        (InvalidRequest("backend 'x': no"), None, "backend 'x': no"),
        (InvalidRequest("there is: nothing"), None, "there is: nothing"),
        (BackendUnavailable("memory: none is left"), None, "memory: none is left"),
    ],
)  # fmt: skip
def test_an_error_of_the_library_names_the_field_of_the_wire(error: Exception, field: str | None, detail: str) -> None:
    """By the name that its message begins with; a message about none has none."""
    answer = json.loads(bytes(response_to(error).body))
    assert (answer["field"], answer["detail"]) == (field, detail)


def test_errors_of_settings_manifests_and_refusals_name_their_field() -> None:
    """As it was said, with no value that is none, and each message once."""
    assert _told(read_names, {"MemoryLimitBytes": -1})[1] == "MemoryLimitBytes"
    assert _told(read_names, {"runtime": "nix"})[:2] == (422, "runtime")
    assert devenv.router
    assert approvals.router
    setup = {"version": 1, "name": "x", "setup": [{"run": "pip"}]}
    assert _told(parse_manifest, setup)[:2] == (422, "setup[0].run")
    assert _told(parse_manifest, {"nope": 1})[:2] == (422, "manifest")
    assert _told(check_fields, {"network_ports": [1]}, RUNNER)[:2] == (403, "networkPorts")
    base, own = load_settings({}), load_settings({"memory": "4g", "runtime": "runc"})
    status, field, detail = _told(check_not_looser, own, base)
    assert (status, field is not None, "None" in detail) == (403, True, False)
    assert _told(check_not_looser, load_settings({"memory": "4g"}), base)[:2] == (403, "memoryLimit")
    assert _told(validated, ExecRequest, {})[2] == "body: give code, or argv as a command"
    assert _told(validated, AtPath, {"path": 3})[1] == "path"
    assert _told(validated, ExecRequest, {"code": "1", "files": [{"path": ""}]})[1] == "files.0.path"


@pytest.mark.parametrize(
    ("requested", "above"),
    [
        ({"network_allow": []}, "every request to a.example"),
        ({"network_allow": ["a.example/GET:/x", "b.example@10.0.0.0/8/GET:/x"]}, "b.example@10.0.0.0/8/GET:/x"),
        ({"network": "allowlist", "network_allow": ["a.example"]}, "a.example"),
        ({"network_allow": ["a.example/GET:/x/y", "b.example/GET:/z"]}, ""),
        ({"network": "allowlist", "network_allow": ["c.example"]}, ""),
    ],
)
def test_mode_open_gives_a_request_no_more_than_the_services_rules(requested: dict[str, Any], above: str) -> None:
    """Neither without its rules about methods and paths, nor addresses that are not public, unless a ceiling does."""
    options = {"network": "open", "network_allow": ["a.example/GET:/x", "a.example/GET:/x/*"]}
    base, own = load_settings(options), load_settings({**options, **requested})
    if not above:
        check_not_looser(own, base)
        return
    assert _told(check_not_looser, own, base)[2].startswith(f"networkAllow: {above} is above the service's limit")
    if requested == {"network_allow": []}:
        check_not_looser(own, replace(base, ceilings={"network": NetworkCeiling(mode="open")}))


@pytest.mark.parametrize("model", [ExecRequest, WireExec])
def test_a_nul_in_a_label_is_refused_before_a_database_sees_it(model: type[ExecRequest]) -> None:
    """Some databases take none."""
    assert _told(validated, model, {"code": "1", "sessionId": "a\0b"}) == (
        422, "sessionId", "sessionId: this has a NUL character",
    )  # fmt: skip


def test_what_runs_or_exists_is_a_conflict() -> None:
    """It is 409, and no fault of the request's own."""
    assert response_to(Conflict("repro_1 is running")).status_code == 409


def test_images_below_admin_are_those_that_the_operator_allows() -> None:
    """By digest alone: one of the list, or with `present` one that the daemon has; without a list none."""
    listed, other = (f"python@sha256:{digit * 64}" for digit in "12")
    assert needs_presence(listed, Settings(images_allow=(listed,))) is False
    assert needs_presence(other, Settings(images_allow=(listed, "present"))) is True
    for image, allowed, error in (
        (listed, (), PolicyDenied), (other, (listed,), PolicyDenied), ("python:3.12", ("present",), InvalidRequest),
        ("present", ("present",), InvalidRequest),
    ):  # fmt: skip
        with pytest.raises(error):
            needs_presence(image, Settings(images_allow=allowed))
    assert [backend_for_image(Settings(backend=name)) for name in ("local", "gvisor")] == ["docker", "gvisor"]
