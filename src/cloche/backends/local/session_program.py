"""Which interpreter serves a session of each language, and how it is started."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.languages import Language
from cloche.jail.caps import drop_all
from cloche.jail.guest import ANSWERS, LINK
from cloche.jail.spec import Run

from ..drivers import ONCE, Codec, Driver, Interrupt, JsonCodec, session_language
from ..layout import has_customization, user_site
from ..toolchain import Toolchain, find_toolchain
from .plan import Places, guest_environment
from .program import python_toolchain, sets_interpreter_variables

FOR_EVER_S = 1e9


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


def build_session_program(name: str, env: Mapping[str, str], places: Places) -> SessionProgram:
    """Return what serves a session. Raises BackendUnavailable for a language without sessions."""
    language, driver = session_language(name)
    if driver is None:
        return _python(language, env, places)
    return _driven(language, env, places, driver)


_ONE_THREAD: Mapping[str, str] = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def _python(language: Language, env: Mapping[str, str], places: Places) -> SessionProgram:
    if sets_interpreter_variables(env):
        raise InvalidRequest("env: PYTHON* variables take effect before a session begins; drop them")
    # A library's threads could not be cloned, so those that would start some are asked not to.
    run = Run(env=guest_environment(places, env, _ONE_THREAD), timeout_s=FOR_EVER_S, is_session=True)
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


def _driven(language: Language, env: Mapping[str, str], places: Places, driver: Driver) -> SessionProgram:
    """Return a session in an interpreter of its own, which runs a driver that is written into its /tmp."""
    toolchain = find_toolchain(language)
    if driver.program not in toolchain.programs:
        raise BackendUnavailable(f"a {language.name} session needs {driver.program}; {toolchain.engine.name} cannot")
    folder = f"{places.tmp}/.cloche"
    path = f"{folder}/{driver.file_name}"
    run = Run(env=guest_environment(places, env, toolchain.env), timeout_s=FOR_EVER_S, is_session=True)
    run.commands = [driver.command(toolchain.programs[driver.program], path, LINK, ANSWERS)]
    run.folders, run.generated = [folder], {path: driver.text()}
    return SessionProgram(
        run=run, language=language, toolchain=toolchain, new_codec=driver.new_codec, interrupt=driver.interrupt
    )
