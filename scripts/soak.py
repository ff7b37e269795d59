"""Run an area of `make soak`, or all but BY_NAME: repetitions, and what is long. `soak.py [AREA]`.

Each is one session of tests (scripts/gate.py says who runs them, and judges), three at once: they mostly wait.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gate import IS_ROOT, OTHER, ROOT, Job, Place, at_work, here, judge

# Also without the lock of the interpreter: in the soak, where they are here.
YOUNGER = ("3.14", "3.14t", "3.15", "3.15t")
AT_ONCE = 3
# What does not depend on the Python that runs it: the project's own scripts and text, and other languages' compilers.
FOR_ONE_PYTHON = ("test_adopt.py", "test_gate.py", "test_layering.py", "backends/test_toolchain.py")
LOCAL = "soak and not container and not machine"
SERVICE = tuple(sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_service*.py")))
SERVICE += ("tests/integration/test_docs.py",)
LONG = ("--timeout", "1800")
REMOTE = tuple(sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/integration").glob("test_remote*.py")))
REMOTE += tuple(f"tests/conformance/test_{name}.py" for name in ("cloche", "daytona", "e2b"))
WORKSPACE = tuple(sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("[is]*/test_workspace*.py")))
# The egress process, in and around the world of tests/harness/world.py, also what each `make test` runs.
NETWORK = tuple(
    sorted(
        str(path.relative_to(ROOT))
        for word in ("network", "egress", "secret")
        for path in (ROOT / "tests").glob(f"[eisu]*/**/test_*{word}*.py")
    )
)
NETWORK += ("tests/unit/egress",)
# Clients of services, with secrets.
TRUST = "tests/integration/test_secrets_trust.py"
CLIENTS = {"clients": (TRUST, "tests/frameworks/test_boto3.py", "tests/frameworks/test_twine.py")}
BATCHES = ("tests/soak/test_batches.py",)
# This machine as a fleet; then Ray, on nodes in namespaces.
NODES = ("tests/soak/test_fleet_batches.py",)
ON_RAY = ("tests/soak/test_fleet.py", "tests/soak/test_fleet_day.py", "tests/soak/test_fleet_work.py")
OUTSIDE = ("tests/soak/test_fleet_jobs.py",)
FLEET = {
    "ray": ("-m", "soak or not soak", "tests/integration/test_ray.py", *ON_RAY),
    "ray_jobs": ("-m", "soak", *OUTSIDE),
}
# Its programs are built for minutes, once: it runs when it is asked for by name.
KUBERNETES = ("tests/soak/test_kubernetes.py",)
# Real coding agents, of the versions in toolchains/*agents.
AGENTS = tuple(sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("[eis]*/**/test_agent*_*.py")))
# The service for E2B's own SDKs; all of its tests, since the SDKs of other versions have the short ones too.
E2B = tuple(sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_e2b_*.py")))
APART = (*E2B, *REMOTE, *WORKSPACE, *NETWORK, *AGENTS, *BATCHES, *NODES, *ON_RAY, *OUTSIDE, *KUBERNETES)
# Where it matters whether a signal's handler may raise in the main thread, as that of a test's time-out does.
SIGNALS = ("tests/unit/test_sync.py", "tests/integration/test_sessions.py", "tests/integration/test_crossings.py")
AREAS: dict[str, tuple[str, ...]] = {
    "machines": (*LONG, "-m", "soak and machine"),
    "containers": (*LONG, "-m", "soak and container and not machine"),
    "escape": (*LONG, "-m", LOCAL, "tests/escape"),
    "sessions": (
        *LONG,
        "-m",
        LOCAL,
        "-k",
        "session and not service",
        "--ignore=tests/escape",
        *(f"--ignore={path}" for path in APART),
    ),
    "local": (
        *LONG,
        "-m",
        LOCAL,
        "-k",
        "not session and not keeper and not service",
        "--ignore=tests/escape",
        *(f"--ignore={path}" for path in APART),
    ),
    "remote": (*LONG, "-m", LOCAL, *REMOTE),
    "service": (*LONG, "-m", LOCAL, *SERVICE),
    "keeper": (*LONG, "-m", LOCAL, "tests/integration/test_keeper.py"),
    "workspace": (*LONG, "-m", LOCAL, *WORKSPACE),
    "network": (*LONG, "-m", "not container and not machine", *(path for path in NETWORK if path != TRUST)),
    "agents": (*LONG, "-m", "not container and not machine", *AGENTS),
    "batches": (*LONG, "-m", LOCAL, *BATCHES),
    "fleet": (*LONG, "-m", LOCAL, *NODES),
    "e2b": (*LONG, "-m", "not container and not machine", *E2B),
    "kubernetes": (*LONG, "-m", LOCAL, *KUBERNETES),
    "signals": ("--timeout", "0", "-m", "not soak", *SIGNALS),
}
BY_NAME = {"kubernetes": ("scripts/kubernetes.sh",)}  # what is installed first
ALL_AREAS = (*AREAS, "other-python", "frameworks")
# The suites that frameworks publish, each in an environment of its own; what pytest is told beside, and the tests.
FRAMEWORKS: dict[str, tuple[str, ...]] = {
    "inspect_ai": ("tests/frameworks/test_inspect_ai.py",),
    "deepagents06": ("tests/frameworks/test_deepagents.py",),
    "deepagents07": ("tests/frameworks/test_deepagents.py",),
    "deepagents_code": ("tests/frameworks/test_deepagents_code.py",),
    "pydantic_ai": ("-o", "asyncio_mode=strict", "tests/frameworks/test_pydantic_ai.py"),
    "agents": ("tests/frameworks/test_agents.py",),
    "verifiers": ("tests/frameworks/test_verifiers.py",),
}
# What notebooks use: libraries that show things, and Jupyter.
NOTEBOOKS = {"notebooks": ("tests/frameworks/test_nbconvert.py",)}
# E2B's SDK for Python of half a year before, and agents that use it.
E2B_SDKS = {"e2b_older": tuple(path for path in E2B if "sdk" in path)}
E2B_SDKS |= {"e2b_agents": ("tests/frameworks/test_langchain_e2b.py", "tests/frameworks/test_smolagents.py")}
# The packages of E2B and Daytona at the lower bounds of their extras.
OLDER = {"remote_older": tuple(path for path in REMOTE if "e2b" in path or "daytona" in path)}


def session(
    name: str, command: Sequence[str], words: Sequence[str], temporary: Path, install: Sequence[str] = ()
) -> Job:
    """Return all tests that pytest's words name, in one session: those of the words that are paths, or all."""
    tests = [word for word in words if word.startswith("tests/")]
    words = [word for word in words if word not in tests]
    return Job(Place(name, command, tests, temporary, words, install, at_most=1), tests or ["tests"], engine="any")


def jobs_of(area: str, user: Path, temporary: Path) -> list[Job]:
    """Return an area, or all; the ordinary user repeats the escapes."""
    jobs = [
        session(name, here(), words, temporary, BY_NAME.get(name, ()))
        for name, words in AREAS.items()
        if area == name or (not area and name not in BY_NAME)
    ]
    if IS_ROOT and area in ("", "escape"):
        command = ["scripts/test_as_user.sh", str(user)]
        jobs.append(
            session(
                "user",
                command,
                [*LONG, "-m", "(soak and both_users) or user_soak"],
                user / "tmp",
                [*command, "--version"],
            )
        )
    if area in ("", "other-python"):
        younger = [version for version in YOUNGER if shutil.which(f"python{version}")]
        jobs += [other_python(version, temporary) for version in (OTHER, *younger)]
    of_areas = {
        "frameworks": FRAMEWORKS,
        "remote": OLDER,
        "sessions": NOTEBOOKS,
        "network": CLIENTS,
        "fleet": FLEET,
        "e2b": E2B_SDKS,
    }
    with_packages = {name: tests for key, rows in of_areas.items() if area in ("", key) for name, tests in rows.items()}
    return [*jobs, *of_frameworks(user, temporary, with_packages)]


def other_python(version: str, temporary: Path) -> Job:
    """Return all units, with another Python."""
    other = f"build/python{version}"
    ignored = [f"--ignore=tests/unit/{name}" for name in FOR_ONE_PYTHON]
    words = ["-m", "not soak", *ignored, "tests/unit", "tests/integration/test_public_api.py"]
    install = ["scripts/other_python.sh", version, other]
    return session(f"python{version}", here(f"{ROOT}/{other}/bin/python"), words, temporary, install)


def of_frameworks(user: Path, temporary: Path, suites: Mapping[str, Sequence[str]]) -> list[Job]:
    """Return suites in environments with packages of their own, of this user and of an ordinary one."""
    jobs = []
    for name, tests in suites.items():
        # Their own warnings are theirs to mend.
        words = [*LONG, "-o", "filterwarnings=default", *tests]
        target = f"build/frameworks/{name}"
        install = ["scripts/frameworks.sh", name, target]
        jobs.append(session(name, here(f"{ROOT}/{target}/bin/python"), words, temporary, install))
        if IS_ROOT and name in FRAMEWORKS:  # the servers of the others need root
            command = ["env", f"FRAMEWORK={name}", "scripts/test_as_user.sh", str(user / name)]
            (user / name).mkdir()
            words = ["-k", "not well_typed", *words]
            jobs.append(session(f"{name}-user", command, words, user / name / "tmp", [*command, "--version"]))
    return jobs


def main(area: str = "") -> int:
    """Run an area's sessions."""
    if area not in {"", *ALL_AREAS}:
        print(f"usage: soak.py [{' | '.join(ALL_AREAS)}]", file=sys.stderr)
        return 2
    with at_work() as (user, temporary):
        user.chmod(0o755)
        return judge(jobs_of(area, user, temporary), at_once=AT_ONCE)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
