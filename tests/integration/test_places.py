"""Where agents run: containers as root, as users, without homes, read-only, restricted; gVisor; docs/deploy.md.

Each place is tried with the same program: a run of the library, the command line, `--require jail`, `backends` and
`doctor`, and attempts of a guest at what its level keeps from it.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from cloche.backends.container_profile import FILE
from cloche.backends.remedies import AS_ORDINARY_USER
from tests.harness.containers import ROOT, Daemon, lay_out, run_inside
from tests.harness.texts import blocks

pytestmark = [pytest.mark.root]
DOCUMENT = ROOT / "docs" / "deploy.md"
# Whom nobody else on the machine is.
ORDINARY = f"--user={61_300 + os.getpid() % 3_000}"
TRY = r"""
import json, os, socket, subprocess, sys, tempfile
import cloche
from cloche.hostfs import temporary_folder

def command(*words):
    done = subprocess.run([sys.executable, "-m", "cloche", *words], capture_output=True, text=True)
    return {"code": done.returncode, "out": done.stdout, "err": done.stderr}

report = {}
server = socket.create_server(("127.0.0.1", 0))
PORT = server.getsockname()[1]
with tempfile.NamedTemporaryFile(dir=temporary_folder()) as secret:
    secret.write(b"secret"); secret.flush()
    CODE = f'''
import os, socket
got = []
def attempt(name, act):
    try: act()
    except (OSError, ValueError): return
    got.append(name)
attempt("file", lambda: open({secret.name!r}).read())
attempt("socket", lambda: socket.create_connection(("127.0.0.1", {PORT}), 1))
attempt("signal", lambda: os.kill({os.getpid()}, 0))
print(got)
'''
    try:
        result = cloche.run(CODE, screen="off")
        rows = result.enforcement.controls
        report["level"] = str(result.enforcement.level)
        report["guest"] = result.stdout or result.stderr
        report["enforced"] = [str(name) for name, measure in rows.items() if measure.state == "enforced"]
    except cloche.ClocheError as error:
        report["level"], report["guest"] = "none", ""
        report["error"] = f"{type(error).__name__}: {error}"
report["run"] = command("run", "-c", "print(6 * 7)")
report["shown"] = command("audit", "show", "--json")
report["required"] = command("run", "--require", "jail", "-c", "print(6 * 7)")
report["backends"] = command("backends", "--json")
report["doctor"] = command("doctor", "--json")
print(json.dumps(report))
"""
NO_SECCOMP, NO_MASKS = "--security-opt=seccomp=unconfined", "--security-opt=systempaths=unconfined"
RESTRICTED = ("--cap-drop=ALL", "--security-opt=no-new-privileges")
PROFILE = f"--security-opt=seccomp={FILE}"
OPTIONS = "--security-opt seccomp=FILE --security-opt systempaths=unconfined"
AUDIT = "the audit log is in /tmp/cloche-"
GVISOR = "run Cloche outside of gVisor"
# Place: docker's options, the level, words of what is to be done for a jail, and of what the command line says.
PLACES: dict[str, tuple[tuple[str, ...], str, str, str]] = {
    "root": (("--env=HOME=/root",), "confined", f"--user 1000:1000 {OPTIONS}", ""),
    "user": ((ORDINARY,), "confined", OPTIONS, ""),
    "user, no HOME": ((ORDINARY, "--env=HOME="), "confined", OPTIONS, AUDIT),
    "HOME is /": ((ORDINARY, "--env=HOME=/"), "confined", OPTIONS, AUDIT),
    "random uid, gid 0": (("--user=1000650000:0", "--env=HOME=/"), "confined", OPTIONS, AUDIT),
    "pod, restricted": ((ORDINARY, *RESTRICTED, "--env=HOME=/"), "confined", OPTIONS, AUDIT),
    "read-only, tmpfs": (("--read-only", "--tmpfs=/tmp", "--env=HOME=/root"), "confined", OPTIONS, AUDIT),
    "read-only": (
        ("--read-only", "--env=HOME=/root"), "confined", OPTIONS, "the audit log is in /dev/shm/cloche-0"
    ),
    "read-only, user": (
        ("--read-only", ORDINARY, "--env=HOME=/"), "confined", OPTIONS, "the audit log is in /dev/shm/cloche-"
    ),
    "no capabilities, root": (("--cap-drop=ALL", "--env=HOME=/root"), "none", AS_ORDINARY_USER, ""),
    "seccomp unconfined": ((NO_SECCOMP,), "confined", "container with --user 1000:1000 --security-opt systempaths", ""),
    "both unconfined": ((NO_SECCOMP, NO_MASKS), "jail", "", ""),
    "both unconfined, user": ((ORDINARY, NO_SECCOMP, NO_MASKS), "jail", "", ""),
    "our profile alone": ((ORDINARY, PROFILE), "confined", "container with --security-opt systempaths=unconfined", ""),
    "our profile": ((ORDINARY, PROFILE, NO_MASKS), "jail", "", ""),
    "our profile, root": ((PROFILE, NO_MASKS), "jail", "", ""),
    "our profile, restricted": ((ORDINARY, *RESTRICTED, PROFILE, NO_MASKS), "jail", "", ""),
    "gVisor": (("--runtime=runsc",), "none", GVISOR, ""),
    "gVisor, user": (("--runtime=runsc", ORDINARY), "none", GVISOR, ""),
}  # fmt: skip
SETTING = "sudo sysctl -w user.max_user_namespaces=10000"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give what is shown to a container."""
    return lay_out(tmp_path_factory.mktemp("project"))


def tried(daemon: Daemon, project: Path, options: tuple[str, ...]) -> dict[str, Any]:
    """Return what came of the program in a container of these options."""
    image = daemon.image("cloche-test:host")
    words = ["--network=none", *options]
    done = run_inside(daemon, project, ["python3", "-c", TRY], image=image, options=words, timeout_s=280)
    found: dict[str, Any] = json.loads(done.stdout or "null") or {"failed": done.stderr}
    return found


def faults(found: dict[str, Any], level: str, remedy: str, told: str) -> list[str]:
    """Say what is not as it should be in a place."""
    if "failed" in found:
        return [found["failed"]]
    doctor, required = json.loads(found["doctor"]["out"] or "{}"), found["required"]
    local = next(row for row in json.loads(found["backends"]["out"]) if row["backend"] == "local")
    works, is_jail = level != "none", level == "jail"
    checks = {
        "level": found["level"] == level,
        "the guest got nothing": found["guest"] == ("[]\n" if works else ""),
        "run": (found["run"]["out"], found["run"]["code"]) == (("42\n", 0) if works else ("", 125)),
        "told once": found["run"]["err"].count("the audit log is in") == bool(told) and told in found["run"]["err"],
        "the log is found again": not works or '"execution"' in found["shown"]["out"],
        "--require": (required["out"], required["code"]) == (("42\n", 0) if is_jail else ("", 125)),
        "its remedy": remedy in required["err"] and (is_jail or "To fix it: " in required["err"]),
        "doctor": doctor.get("usable") == works and (doctor.get("level") == level or not works),
        "its exit code": found["doctor"]["code"] == (0 if works else 1),
        "one remedy": doctor.get("remedy") == local["remedy"] and local["remedy"] in required["err"],
        "no defect": "defect of Cloche" not in json.dumps(found),
    }
    return [name for name, holds in checks.items() if not holds]


def lines_of(found: dict[str, Any], name: str, wrong: list[str]) -> str:
    """Return a place's line of the table."""
    said = found.get("required", {}).get("err", "").strip().splitlines()
    works = "yes" if found.get("run", {}).get("code") == 0 else "refused"
    honest = "yes" if not wrong else f"NO: {', '.join(wrong)}"
    return f"| {name} | {found.get('level')} | {honest} | {works} | {said[-1] if said else ''} |"


@pytest.mark.parametrize("place", ["pod, restricted"])
def test_a_place_has_its_level_and_its_sentence(docker: Daemon, project: Path, place: str) -> None:
    """What runs, what is refused and what all commands say to do are what the table says."""
    options, level, remedy, told = PLACES[place]
    found = tried(docker, project, options)
    assert not faults(found, level, remedy, told), found


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_every_place_has_its_level_and_its_sentence(gvisor_daemon: Daemon, project: Path) -> None:
    """All of the table, which is printed; and a host whose setting refuses user namespaces."""
    table, wrong = ["| place | level | honest | works | message |", "|---|---|---|---|---|"], {}
    for name, (options, level, remedy, told) in PLACES.items():
        found = tried(gvisor_daemon, project, options)
        wrong[name] = faults(found, level, remedy, told)
        table.append(lines_of(found, name, wrong[name]))
        print(table[-1], flush=True)
    refusing = ROOT / "tests" / "harness" / "programs" / "refusing.py"
    done = subprocess.run(
        [sys.executable, str(refusing), "sysctl", sys.executable, "-c", TRY],
        capture_output=True,
        text=True,
        check=False,
    )
    found = json.loads(done.stdout or "null") or {"failed": done.stderr}
    wrong["max_user_namespaces=0"] = faults(found, "confined", SETTING, "")
    table.append(lines_of(found, "max_user_namespaces=0", wrong["max_user_namespaces=0"]))
    print("\n".join(table))
    assert not any(wrong.values()), "\n".join(table)


@pytest.mark.soak
def test_a_demanded_log_stops_runs_in_a_container_without_a_home(docker: Daemon, project: Path) -> None:
    """Nor does anything run without a folder for temporary files; the error says what to mount."""
    image = docker.image("cloche-test:host")
    words = ["python3", "-m", "cloche", "run", "-c", "print(1)"]
    options = [ORDINARY, "--env=HOME=/", "--env=CLOCHE_AUDIT=on"]
    done = run_inside(docker, project, words, image=image, options=options)
    assert (done.returncode, done.stdout) == (125, ""), done
    assert "the audit log /.local/state/cloche/audit.jsonl cannot be written" in done.stderr
    options = ["--read-only", "--volume=/usr:/dev/shm:ro", "--env=HOME=/root", "--env=CLOCHE_AUDIT=off"]
    done = run_inside(docker, project, words, image=image, options=options)
    assert (done.returncode, done.stdout) == (125, ""), done
    assert "Mount one: docker run --tmpfs=/tmp" in done.stderr


def commands() -> list[list[str]]:
    """Return the commands of the document's section about containers, as words."""
    return [shlex.split(line) for text in blocks(DOCUMENT, "sh") for line in text.splitlines()]


def test_the_commands_of_the_document_give_a_jail(docker: Daemon, project: Path, tmp_path: Path) -> None:
    """The profile is written, and each container that it names holds jails."""
    write, *starts = commands()
    done = subprocess.run([sys.executable, "-m", *write], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, (tmp_path / write[-1]).read_text()) == (0, FILE.read_text(encoding="utf-8")), done
    assert [words[:3] for words in starts] == [["docker", "run", "--rm"]] * 2
    image = docker.image("cloche-test:host")
    for words in starts:
        options, called = words[3 : words.index("IMAGE")], words[words.index("IMAGE") + 1 :]
        options = [word.replace("=cloche-seccomp.json", f"={tmp_path}/cloche-seccomp.json") for word in options]
        inside = ["python3", "-m", *called]
        done = run_inside(docker, project, inside, image=image, options=["--network=none", *options])
        assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr


def test_the_files_of_the_document_say_the_same_as_its_commands(tmp_path: Path) -> None:
    """Compose and the pod give what the second container has, and are refused nothing else; the unit is valid."""
    compose, pod, workflow = (yaml.safe_load(text) for text in blocks(DOCUMENT, "yaml"))
    options = commands()[2]
    service = compose["services"]["agent"]
    given = {after for before, after in pairwise(options) if before == "--security-opt"}
    assert {word.replace("=./", "=") for word in service["security_opt"]} == given
    assert (service["read_only"], service["tmpfs"], service["cap_drop"]) == (True, ["/tmp"], ["ALL"])
    assert service["user"] in options
    (container,) = pod["spec"]["containers"]
    assert pod["spec"]["hostUsers"] is False
    assert pod["spec"]["securityContext"]["seccompProfile"] == {
        "type": "Localhost", "localhostProfile": "cloche-seccomp.json"
    }  # fmt: skip
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "procMount": "Unmasked", "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert container["volumeMounts"] == [{"name": "tmp", "mountPath": "/tmp"}]
    steps = [step.get("run", "") for step in workflow["jobs"]["test"]["steps"]]
    assert "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0" in steps
    assert "cloche doctor" in steps
    if shutil.which("systemd-analyze") is None:
        pytest.skip("missing: systemd-analyze (Debian's package systemd)")
    (text,) = blocks(DOCUMENT, "ini")
    unit = tmp_path / "agent.service"
    unit.write_text(text.replace("/opt/agent/bin/python3", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
