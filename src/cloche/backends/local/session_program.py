"""Which interpreter serves a session of each language, and how it is started."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources

from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.frames import BashCodec
from cloche.core.languages import Language, language_named
from cloche.jail.caps import drop_all
from cloche.jail.guest import LINK
from cloche.jail.spec import Run

from ..layout import has_customization, user_site
from ..toolchain import Toolchain, find_toolchain
from .dialogue import Codec, JsonCodec
from .plan import Places, guest_environment
from .program import python_toolchain, sets_interpreter_variables

Word = tuple[str, Mapping[str, int]]  # for the helper: a tag, and what it carries besides the node


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupt:
    """Say what interrupts a cell: what the helper is told first, and what again and again until the cell has ended."""

    first: tuple[Word, ...]
    again: tuple[Word, ...] = ()


def _signal(number: int, *, to_group: bool) -> Word:
    return "signal", {"id": 0, "number": int(number), "to_group": to_group}


_CTRL_C: Word = ("interrupt", {})
# Told once: code may take its time to clean up after a KeyboardInterrupt.
ONCE = Interrupt(first=(_CTRL_C,))
# A driver that has not read its cell yet ignores an interrupt.
UNTIL_HEARD = Interrupt(first=(_CTRL_C,), again=(_CTRL_C,))
# Why not by Ctrl-C alone, says interpreter/session.sh.
_BASH_FIRST = (_signal(signal.SIGURG, to_group=False), _signal(signal.SIGQUIT, to_group=True))
AS_BASH_NEEDS = Interrupt(first=_BASH_FIRST, again=(*_BASH_FIRST, _CTRL_C))


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionProgram:
    """Hold the run that a session is, and how to talk to it."""

    run: Run
    language: Language
    toolchain: Toolchain
    new_codec: Callable[[], Codec]
    interrupt: Interrupt = ONCE
    is_forkable: bool = False

    def paths(self) -> tuple[str, ...]:
        """Return what must be shown besides the system's own trees."""
        return tuple(dict.fromkeys((*python_toolchain().binds, *self.toolchain.binds)))


def build_session_program(name: str, env: Mapping[str, str], places: Places, timeout_s: float) -> SessionProgram:
    """Return what serves a session. Raises BackendUnavailable for a language without sessions."""
    language = language_named(name)
    if language.name not in _PROGRAMS:
        have = ", ".join(_PROGRAMS)
        raise BackendUnavailable(f"there are no sessions of {language.name} (there are of {have}); use run instead")
    return _PROGRAMS[language.name](language, env, places, timeout_s)


_ONE_THREAD: Mapping[str, str] = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def _python(language: Language, env: Mapping[str, str], places: Places, timeout_s: float) -> SessionProgram:
    if sets_interpreter_variables(env):
        raise InvalidRequest("env: PYTHON* variables take effect before a session begins; drop them")
    # A library's threads could not be cloned, so those that would start some are asked not to.
    run = Run(env=guest_environment(places, env, _ONE_THREAD), timeout_s=timeout_s, is_session=True)
    run.python = {
        "path": f"{places.workspace}/cell",
        "home": places.workspace,
        "argv": [],
        "extra_paths": list(user_site()),
        "customizes": has_customization(),
        "powers": drop_all(),  # for a clone, which is born with those of its own namespaces
    }
    return SessionProgram(
        run=run, language=language, toolchain=python_toolchain(), new_codec=JsonCodec, is_forkable=True
    )


def _driven(
    language: Language, env: Mapping[str, str], places: Places, timeout_s: float, driver: Driver
) -> SessionProgram:
    """Return a session in an interpreter of its own, which runs a driver that is written into its /tmp."""
    toolchain = find_toolchain(language)
    if driver.program not in toolchain.programs:
        raise BackendUnavailable(f"a {language.name} session needs {driver.program}; {toolchain.engine.name} cannot")
    folder = f"{places.tmp}/.cloche"
    path = f"{folder}/{driver.file_name}"
    text = resources.files("cloche.interpreter").joinpath(driver.file_name).read_text("utf-8")
    run = Run(env=guest_environment(places, env, toolchain.env), timeout_s=timeout_s, is_session=True)
    run.commands = [[toolchain.programs[driver.program], *driver.options, path, str(LINK)]]
    run.build, run.generated = folder, {path: text}
    return SessionProgram(
        run=run, language=language, toolchain=toolchain, new_codec=driver.new_codec, interrupt=driver.interrupt
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """Name a driver's file in `cloche.interpreter`, the program that runs it, and how it is talked to and stopped."""

    file_name: str
    program: str
    options: tuple[str, ...]
    new_codec: Callable[[], Codec]
    interrupt: Interrupt


JAVASCRIPT = Driver(
    file_name="session.js",
    program="node",
    options=("--expose-internals", "--no-force-async-hooks-checks"),
    new_codec=JsonCodec,
    interrupt=UNTIL_HEARD,
)
BASH = Driver(
    file_name="session.sh",
    program="bash",
    options=("--noprofile", "--norc"),
    new_codec=BashCodec,
    interrupt=AS_BASH_NEEDS,
)

_PROGRAMS: Mapping[str, Callable[[Language, Mapping[str, str], Places, float], SessionProgram]] = {
    "python": _python,
    "javascript": functools.partial(_driven, driver=JAVASCRIPT),
    "bash": functools.partial(_driven, driver=BASH),
}
