"""A backend that names languages with sessions has sandboxes that open them, and no other one has."""

from __future__ import annotations

import pytest

from cloche.backends.docker.backend import DockerBackend
from cloche.backends.docker.sandbox import DockerOpenSandbox
from cloche.backends.gvisor.backend import RunscBackend, RunscOpenSandbox
from cloche.backends.local.backend import LocalBackend
from cloche.backends.local.sandbox import LocalOpenSandbox
from cloche.backends.microsandbox.backend import MicrosandboxBackend
from cloche.backends.microsandbox.sandbox import MicrosandboxOpenSandbox
from cloche.backends.microvm.backend import FirecrackerBackend, MicroVMBackend
from cloche.backends.microvm.sandbox import MicroVMOpenSandbox
from cloche.backends.session_languages import DRIVERS
from cloche.backends.toolchain import find_toolchain
from cloche.core.errors import LanguageUnavailable
from cloche.core.languages import SESSION_LANGUAGES
from cloche.core.protocols import SupportsSessionNames


@pytest.mark.parametrize(
    ("backend", "sandbox"),
    [
        (LocalBackend, LocalOpenSandbox),
        (DockerBackend, DockerOpenSandbox),
        (RunscBackend, RunscOpenSandbox),
        (MicroVMBackend, MicroVMOpenSandbox),
        (FirecrackerBackend, MicroVMOpenSandbox),
        (MicrosandboxBackend, MicrosandboxOpenSandbox),
    ],
)
def test_who_names_sessions_has_them(backend: type, sandbox: type) -> None:
    """In the languages that have drivers."""
    made = backend()
    assert isinstance(made, SupportsSessionNames) is hasattr(sandbox, "open_session")
    assert not isinstance(made, SupportsSessionNames) or made.session_languages() == tuple(DRIVERS)


@pytest.mark.parametrize(("name", "program", "package"), [("r", "Rscript", "r-base-core"), ("java", "java", "jdk")])
def test_a_language_of_sessions_alone_says_what_it_lacks(name: str, program: str, package: str) -> None:
    """Where its interpreter is missing, the error names the program and the package."""
    with pytest.raises(LanguageUnavailable, match=f"{program}.*{package}"):
        find_toolchain(SESSION_LANGUAGES[name], search_path=())
