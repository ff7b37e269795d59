"""Measure what this host can enforce, why not more, and how to improve it.

Theory of operation: every kernel feature is tried separately in a throwaway process (`jail.setup.probe`), every
language's toolchain is searched for and its version read, and one real program is run at each level. The reported level
is the strongest at which that program ran. Configuration does not influence the result.
"""

from __future__ import annotations

import functools
import marshal
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, runtime_checkable

from cloche.blocking import calls
from cloche.core.enforcement import Control, Level, Measure, State
from cloche.core.errors import BackendUnavailable, ClocheError
from cloche.core.languages import LANGUAGES, Engine, Language
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.processes import no_life_of
from cloche.core.protocols import Backend, Capabilities, SupportsLive
from cloche.core.record import asdict, dataclass, field
from cloche.core.request import Request
from cloche.jail.setup.launch import EMPTY_ENVIRONMENT, PACKAGE

from .registry import backend_named, group_remedy, gvisor_without_docker, is_gvisor

SURVEY_TIMEOUT_S = 20
TRIED_LEVELS = (Level.JAIL, Level.CONFINED, Level.PROCESS)
LEAST_LEVEL = Level.CONFINED
_BOOT_SURVEY = f"import sys; sys.path.insert(0, {PACKAGE!r}); from jail.setup import probe; probe.main_of_survey()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """Whether one kernel feature works here; `needed_for` names the level or purpose that it serves."""

    name: str
    works: bool
    needed_for: str
    detail: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundToolchain:
    """The engine that runs a language here, with version and path; without one, `note` says what is missing."""

    language: str
    engine: str = ""
    version: str = ""
    path: str = ""
    shown: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterpreterFacts:
    """The interpreter of this process, which also runs every Python guest."""

    path: str
    real_path: str
    version: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The outcome of `print(1)` at one level: a status, or why it did not run. `seconds` is the whole call.

    `not_live` says why a command could not run in a live sandbox at this level; it is empty if one did.
    """

    level: Level
    status: str
    seconds: float = 0.0
    detail: str = ""
    controls: Mapping[Control, Measure] = field(default_factory=dict)
    not_live: str = ""

    @property
    def is_ok(self) -> bool:
        return self.status == "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All measurements. `level` is the strongest level at which a program ran."""

    level: Level
    reason: str
    remedy: str
    kernel: str
    user: str
    controls: Mapping[Control, Measure]
    features: tuple[Feature, ...]
    interpreter: InterpreterFacts
    toolchains: tuple[FoundToolchain, ...]
    trials: tuple[Trial, ...]

    @property
    def is_usable(self) -> bool:
        """Tell whether untrusted code may run here at all."""
        return self.level >= LEAST_LEVEL

    @property
    def weak_points(self) -> tuple[str, ...]:
        """Return a sentence for each control that is not fully enforced at `level`, with the reason."""
        return tuple(
            f"{control} is {measure.state}: {measure.reason or 'no mechanism enforces it here'}"
            for control, measure in self.controls.items()
            if measure.state is not State.ENFORCED
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "level": str(self.level),
            "usable": self.is_usable,
            "reason": self.reason,
            "remedy": self.remedy,
            "kernel": self.kernel,
            "user": self.user,
            "weak_points": list(self.weak_points),
            "controls": _plain(self.controls),
            "features": [asdict(feature) for feature in self.features],
            "interpreter": asdict(self.interpreter),
            "toolchains": [asdict(toolchain) for toolchain in self.toolchains],
            "trials": [
                {
                    "level": str(trial.level),
                    "status": trial.status,
                    "seconds": trial.seconds,
                    "detail": trial.detail,
                    "controls": _plain(trial.controls),
                    "not_live": trial.not_live,
                }
                for trial in self.trials
            ],
        }


class LocalToolchain(Protocol):
    """A toolchain as the local backend finds it."""

    @property
    def engine(self) -> Engine: ...
    @property
    def programs(self) -> Mapping[str, str]: ...
    @property
    def binds(self) -> tuple[str, ...]: ...
    @property
    def version(self) -> str: ...


@runtime_checkable
class SupportsToolchains(Protocol):
    """Find the toolchain of a language on this host."""

    def toolchain(self, language: Language) -> LocalToolchain:
        """Return the toolchain. Raises BackendUnavailable naming the package to install."""
        ...


def diagnose() -> Diagnosis:
    """Measure this host; takes a second or two and leaves nothing behind."""
    backend = backend_named("local")
    capabilities = backend.capabilities()
    with ThreadPoolExecutor(1) as pool:
        gvisor = pool.submit(find_gvisor)  # the first call starts a container
        return _diagnose(backend, capabilities, gvisor)


def _diagnose(backend: Backend, capabilities: Capabilities, gvisor: Future[Feature]) -> Diagnosis:
    trials = tuple(try_level(backend, level) for level in TRIED_LEVELS)
    findings = survey()
    toolchains = find_toolchains()
    best = next((trial for trial in trials if trial.is_ok), None)
    level = best.level if best else Level.NONE
    return Diagnosis(
        level=level,
        reason=why_not_more(level, capabilities.reason, trials),
        remedy=capabilities.remedy if level < Level.JAIL else "",
        kernel=f"{platform.system()} {platform.release()} on {platform.machine()}",
        user=f"uid {os.geteuid()}",
        controls=best.controls if best else capabilities.controls,
        features=(
            *features_of(findings, namespace_remedy=capabilities.remedy, in_gvisor=is_gvisor()),
            gvisor.result(),
        ),
        interpreter=describe_interpreter(toolchains),
        toolchains=toolchains,
        trials=trials,
    )


def find_gvisor() -> Feature:
    """Tell whether gVisor works here without docker. The first call starts a container."""
    capabilities = gvisor_without_docker()
    detail = capabilities.reason if not capabilities.available else ""
    remedy = "" if capabilities.available else capabilities.remedy
    return Feature(name="runsc", works=capabilities.available, needed_for="gvisor", detail=detail, remedy=remedy)


def try_level(backend: Backend, level: Level) -> Trial:
    """Run `print(1)` at exactly this level."""

    async def run() -> Trial:
        async with backend.open(Policy(level=level), Limits()) as opened:
            result = await opened.run(Request(code="print(1)"))
        is_right = result.stdout == "1\n" and result.enforcement.level is level
        return Trial(
            level=level,
            status=str(result.status) if is_right else "wrong",
            seconds=time.perf_counter() - started,
            detail=(result.stderr or result.stdout).strip()[-200:] if not is_right else "",
            controls=result.enforcement.controls,
            not_live=await _why_not_live(backend, level),
        )

    started = time.perf_counter()
    try:
        return calls.call(run)
    except BackendUnavailable as error:
        return Trial(level=level, status="refused", detail=str(error).partition(". To fix it")[0])
    except ClocheError as error:
        return Trial(level=level, status="failed", detail=str(error))


async def _why_not_live(backend: Backend, level: Level) -> str:
    """Run a command in a live sandbox at this level; return why that fails, or an empty string."""
    if not isinstance(backend, SupportsLive):
        return no_life_of(backend.name)
    try:
        async with backend.open_live(Policy(level=level), Limits()) as opened:
            result = await opened.run(Request(argv=("true",)))
    except ClocheError as error:
        return str(error.reason if isinstance(error, BackendUnavailable) else error).rstrip(".")
    return "" if result.ok else f"a command ended with {result.status}: {result.stderr.strip()[-200:]}"


def survey() -> Mapping[str, tuple[bool, str]]:
    """Run the survey process and return its findings: whether each feature works, and the kernel's answer."""
    command = [sys.executable, "-I", "-S", "-c", _BOOT_SURVEY]
    try:
        completed = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=EMPTY_ENVIRONMENT,
            timeout=SURVEY_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"survey": (False, f"it took longer than {SURVEY_TIMEOUT_S:g} s")}
    if completed.returncode != 0 or not completed.stdout:
        return {"survey": (False, completed.stderr.decode("utf-8", "replace").strip()[-200:])}
    findings: Mapping[str, tuple[bool, str]] = marshal.loads(completed.stdout)  # noqa: S302  # written by our own process
    return findings


# The purpose of each feature, and the remedy if it is missing; an empty remedy means that of the namespaces.
_JAIL, _CONFINED, _LIMITS = "jail", "jail, confined", "limits"
_FEATURES: Mapping[str, tuple[str, str]] = {
    **{f"{name} namespace": (_JAIL, "") for name in ("user", "mount", "pid", "network", "ipc", "uts", "cgroup")},
    "own /proc": (_JAIL, ""),
    "detached mounts": (_JAIL, ""),
    "all namespaces together": (_JAIL, ""),
    "id-mapped mounts": ("root, with an interpreter below a private home", "use Linux 5.12 or later"),
    "outside id": ("identity", "needed by root alone"),
    "no new privileges": (_CONFINED, "allow prctl in the container's seccomp profile"),
    "seccomp filter": (_CONFINED, "use a kernel with CONFIG_SECCOMP_FILTER"),
    "seccomp listener": ("jail, confined: locks", "use Linux 5.5 or later"),
    "landlock": ("confined; a second wall at jail", "use Linux 5.13 or later, with landlock in the kernel's lsm= list"),
    "landlock scopes": ("a second wall", "use Linux 6.12 or later"),
    "control groups": (_LIMITS, ""),
    "memory controller": (_LIMITS, ""),
    "pids controller": (_LIMITS, ""),
    "cpu controller": (_LIMITS, ""),
    "birth in a group": ("speed of limits", "needs control groups of version 2"),
    "one process at an OOM": (
        "the caller's own life", "set it to 0 (Kubernetes: singleProcessOOMKill in the kubelet's configuration)"
    ),
    "close_range": (_CONFINED, "use Linux 5.9 or later"),
    "pidfd": ("every level", "use Linux 5.3 or later"),
    "children's memory": (
        "confined: network, and metadata for an ordinary user", "set kernel.yama.ptrace_scope to 0 or 1 with sysctl"
    ),
    "children in /proc": ("confined, process", "use a kernel with CONFIG_PROC_CHILDREN"),
    "child subreaper": ("every level", "use Linux 3.4 or later"),
}  # fmt: skip
_GROUP_FEATURES = ("control groups", "memory controller", "pids controller", "cpu controller")
_ROOT_ONLY = ("id-mapped mounts", "outside id")


def features_of(
    findings: Mapping[str, tuple[bool, str]],
    *,
    namespace_remedy: str,
    uid: int | None = None,
    is_unified: bool | None = None,
    in_gvisor: bool = False,
) -> tuple[Feature, ...]:
    """Turn findings into features with remedies; in gVisor all have the same remedy. Pure when all keywords are
    given.
    """
    uid = os.geteuid() if uid is None else uid
    features = []
    for name, (works, detail) in findings.items():
        needed_for, remedy = _FEATURES.get(name, ("", ""))
        if name in _GROUP_FEATURES:
            remedy = group_remedy(uid, is_unified=is_unified)
        elif name in _ROOT_ONLY and uid != 0:
            remedy = "nothing to do for an ordinary user"
        text = "" if works else namespace_remedy if in_gvisor else remedy or namespace_remedy
        features.append(Feature(name=name, works=works, needed_for=needed_for, detail=detail, remedy=text))
    return tuple(features)


def why_not_more(level: Level, reason: str, trials: tuple[Trial, ...]) -> str:
    """Return why the level is not higher: the given reason, or the first failed trial's. Pure."""
    if level >= Level.JAIL:
        return ""
    if reason:
        return reason
    return next((trial.detail for trial in trials if not trial.is_ok), "")


def find_toolchains() -> tuple[FoundToolchain, ...]:
    """Find the toolchains of all languages concurrently, since asking programs for versions takes most of the time."""
    backend = backend_named("local")
    with ThreadPoolExecutor() as pool:
        return tuple(pool.map(functools.partial(find_toolchain, backend), LANGUAGES.values()))


def find_toolchain(backend: Backend, language: Language) -> FoundToolchain:
    """Find the toolchain of a language, and its version."""
    if not isinstance(backend, SupportsToolchains):
        return FoundToolchain(language=language.name, note=f"backend {backend.name!r} does not report its toolchains")
    try:
        toolchain = backend.toolchain(language)
    except BackendUnavailable as error:
        return FoundToolchain(language=language.name, note=str(error))
    engine = toolchain.engine
    return FoundToolchain(
        language=language.name,
        engine=engine.name,
        version=toolchain.version,
        path=toolchain.programs[engine.programs[0]],
        shown=toolchain.binds,
        note=engine.stand_in,
    )


def describe_interpreter(toolchains: tuple[FoundToolchain, ...]) -> InterpreterFacts:
    """Describe where the interpreter is and how a jail shows it."""
    python = next(
        (toolchain for toolchain in toolchains if toolchain.language == "python"), FoundToolchain(language="python")
    )
    return InterpreterFacts(
        path=sys.executable,
        real_path=os.path.realpath(sys.executable),
        version=f"{platform.python_implementation()} {platform.python_version()}",
        notes=tuple(_interpreter_notes(python.shown)),
    )


def _interpreter_notes(shown: tuple[str, ...]) -> list[str]:
    notes = [f"shown besides the system: {path}" for path in shown] or ["part of the system's own trees"]
    private = [path for path in shown if not _is_open_to_all(path)]
    if private and os.geteuid() == 0:
        notes.append(f"others may not reach {', '.join(private)}: root shows it by other means (id-mapped mounts)")
    on_path = shutil.which("python3") or ""
    if "/shims/" in on_path:
        notes.append(f"python3 on PATH is a shim ({on_path}); Cloche uses the real program, which starts far faster")
    return notes


def _is_open_to_all(path: str) -> bool:
    """Tell whether every user may reach `path` and read it."""
    if os.stat(path).st_mode & 0o005 != 0o005:
        return False
    while path != "/":
        path = os.path.dirname(path)
        if not os.stat(path).st_mode & 0o001:
            return False
    return True


def _plain(controls: Mapping[Control, Measure]) -> dict[str, dict[str, str]]:
    return {str(control): measure.as_dict() for control, measure in controls.items()}
