"""From a source distribution to a wheel: the one step that runs code of a package.

Theory of operation. The source is downloaded and compared with its hash, as wheels are. The build requirements are
wheels of the same index, which become a layer like any other. A jail without network and credentials is shown both. It
sends one wheel, or further build requirements: a build backend may name those only once it runs. The wheel is
untrusted: another sandbox, which runs none of its code, reads its name, version and requirements, and it is unpacked
like the others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, BinaryIO

from cloche.core.ceilings import normalize_package
from cloche.core.errors import InvalidRequest, StartFailed
from cloche.core.events import Progress, report_progress
from cloche.core.layers import Target
from cloche.core.limits import GIB, MIB
from cloche.core.policy import Policy
from cloche.core.protocols import Backend
from cloche.core.record import dataclass, field, replace
from cloche.core.result import Result

from .fetch import fetch
from .folders import make_shown
from .frames import Bounds, Reader, WrongFrame
from .index import Index
from .requirements import Requirement, parse_requirement, parse_requirements
from .resolve import Facts, Pin
from .steps import LIMITS, MOST_LAST_CHARS, Step, failed, on_stdout, run_step
from .target import tags

if TYPE_CHECKING:
    from .store import Layer

WHEEL, WANTED = 1, 2
MOST_BUILT_BYTES, MOST_WANTED_BYTES = 256 * MIB, 64 * 1024
MOST_ASKED = 4  # how often a build may say that it needs more
BUILD_LIMITS = replace(
    LIMITS, memory_bytes=2 * GIB, disk_bytes=1 * GIB, tmp_bytes=1 * GIB, flood_bytes=MOST_BUILT_BYTES + MIB
)


@dataclass(slots=True, kw_only=True)
class _Product:
    """Take the output of a build: one wheel, written to a file, or a list of further build requirements."""

    path: str
    name: str = ""  # of the wheel, by its backend
    wanted: bytearray = field(default_factory=bytearray)
    file: BinaryIO | None = None

    def begin(self, kind: int, name: str, size: int) -> BinaryIO | _Wanted:
        """Begin it. Raises WrongFrame."""
        if kind == WANTED and size <= MOST_WANTED_BYTES:
            return _Wanted(self.wanted)
        if kind != WHEEL or not name:
            raise WrongFrame("the build result is not a wheel")
        self.name = name
        self.file = open(self.path, "xb")  # noqa: SIM115 - Reader closes it, or `close`
        os.fchmod(self.file.fileno(), 0o644)  # a guest that reads it may be another user, whatever the umask is
        return self.file

    def close(self) -> None:
        """Close an incomplete file."""
        if self.file is not None:
            self.file.close()


@dataclass(slots=True)
class _Wanted:
    """Take a list of build requirements."""

    held: bytearray

    def write(self, data: bytes) -> None:
        self.held += data

    def close(self) -> None:
        """Do nothing."""


@dataclass(slots=True, kw_only=True)
class Workshop:
    """Build wheels, each once, below a folder that is removed with all that was not taken from it.

    `layer_for` returns a layer of wheels that meets the requirements of a source's build.
    """

    backend: Backend
    policy: Policy
    index: Index
    target: Target
    folder: str
    layer_for: Callable[[Pin, Sequence[Requirement]], Awaitable[Layer]]
    _built: dict[tuple[str, ...], str] = field(default_factory=dict)

    async def build(self, pin: Pin) -> Facts:
        """Build a wheel of a source with the newest build requirements, and return the wheel's own requirements.

        Raises StartFailed if the build fails, InvalidRequest if a build requirement cannot be met.
        """
        source = await self._fetch(pin)
        requirements: tuple[str, ...] = ()
        layer: Layer | None = None
        for number in range(MOST_ASKED):
            product = await self._run(pin, source, requirements, layer, number)
            if not product.wanted:
                facts = await self._described(pin, product)
                built = replace(pin, build=layer.pins if layer is not None else ())
                self._built[built.identity] = product.path
                return replace(facts, build=built.build)
            requirements = _read_wanted(pin, product.wanted)
            layer = await self._layer_for(pin, requirements)
        raise _refusal(pin, "its build requirements do not end")

    def wheel(self, pin: Pin) -> str:
        """Return the path of the wheel that was built of a source."""
        return self._built[pin.identity]

    async def _fetch(self, pin: Pin) -> str:
        folder = os.path.join(self.folder, f"source-{len(os.listdir(self.folder))}")
        make_shown(folder)
        (path,) = await fetch(self.backend, self.policy, (pin,), self.index, folder)
        return path

    async def _layer_for(self, pin: Pin, requirements: Sequence[str]) -> Layer:
        try:
            return await self.layer_for(pin, parse_requirements(requirements))
        except InvalidRequest as error:
            raise _refusal(pin, f"its build requirements: {error}") from None

    async def _run(
        self, pin: Pin, source: str, requirements: Sequence[str], layer: Layer | None, number: int
    ) -> _Product:
        """Run a build. Raises StartFailed with its last words."""
        step = build_step(source, requirements, layer.folder if layer is not None else "")
        folder = os.path.join(os.path.dirname(os.path.dirname(source)), f"built-{number}")  # which no build is shown
        make_shown(folder)
        product = _Product(path=os.path.join(folder, f"{pin.name}.whl"))
        reader = Reader(product.begin, Bounds(files=1, total_bytes=MOST_BUILT_BYTES))
        report_progress(Progress(what=f"building {pin.name}"))
        try:
            outcome = await run_step(self.backend, self.policy, step, on_stdout(reader.feed))
        except WrongFrame as error:
            raise _refusal(pin, str(error)) from None
        finally:
            product.close()
            report_progress(Progress(what=f"building {pin.name}", is_over=True))
        if not outcome.result.ok:
            raise _refusal(pin, _why(step, outcome.result))
        if not reader.is_between or not (product.name or product.wanted):
            raise _refusal(pin, "no complete wheel arrived")
        return product

    async def _described(self, pin: Pin, product: _Product) -> Facts:
        """Return the facts of the built wheel. Raises StartFailed for a wheel of another package or version."""
        stdin, shown = json.dumps({"wheel": product.path}).encode(), (os.path.dirname(product.path),)
        step = Step(name="read", program="describe", stdin=stdin, shown=shown)
        try:
            _check_name(pin, product.name, self.target)
            outcome = await run_step(self.backend, self.policy, step)
            if not outcome.result.ok:
                raise ValueError(_why(step, outcome.result))
            return _read_facts(pin, outcome.result.stdout)
        except (ValueError, KeyError, TypeError, RecursionError, InvalidRequest) as error:
            raise _refusal(pin, f"the wheel that was built: {error}") from None


def build_step(source: str, known: Sequence[str], layer: str) -> Step:
    """Return the step that builds a wheel with the packages of a layer."""
    order = {"source": source, "known": list(known)}
    shown = (*filter(None, (layer,)), os.path.dirname(source))
    return Step(
        name="build", program="build", stdin=json.dumps(order).encode(), shown=shown, runs_code=True,
        limits=BUILD_LIMITS,
    )  # fmt: skip


def _read_wanted(pin: Pin, data: bytes | bytearray) -> tuple[str, ...]:
    """Return the build requirements that a build asks for. Raises StartFailed for an invalid list."""
    try:
        requirements = json.loads(data)
        if not isinstance(requirements, list) or not all(isinstance(entry, str) for entry in requirements):
            raise ValueError("no list of requirements arrived")
        for requirement in requirements:
            if parse_requirement(requirement).is_npm:
                raise ValueError(f"{requirement[:80]!r} is not a Python package")
    except (ValueError, RecursionError, InvalidRequest) as error:
        raise _refusal(pin, f"its build requirements: {error}") from None
    return tuple(requirements)


def _check_name(pin: Pin, file_name: str, target: Target) -> None:
    """Raise ValueError for the file name of another wheel, or of one for another interpreter."""
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename
    from packaging.version import Version

    try:
        name, version, _, wheel_tags = parse_wheel_filename(file_name)
    except InvalidWheelFilename:
        raise ValueError(f"it is called {file_name[:100]!r}, which is not a name for a wheel") from None
    if name != pin.name or version != Version(pin.version):
        raise ValueError(f"it is {file_name[:100]!r}, of another package or version")
    if not {str(tag) for tag in wheel_tags} & set(tags(target)):
        raise ValueError(f"it is {file_name[:100]!r}, for another interpreter")


def _read_facts(pin: Pin, text: str) -> Facts:
    """Read the metadata of a wheel. Raises ValueError, KeyError, TypeError and InvalidRequest."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    metadata = json.loads(text)
    name, version = normalize_package(str(metadata["name"])), Version(str(metadata["version"]))
    if name != pin.name or version != Version(pin.version):
        raise ValueError(f"by its metadata it is {name[:100]} {version}")
    requires = [parse_requirement(str(text)) for text in metadata["requires"]]
    if any(requirement.is_npm for requirement in requires):
        raise ValueError("it needs a package that is not a Python package")
    python, extras = (
        str(SpecifierSet(str(metadata["python"]))),
        sorted({normalize_package(str(extra)) for extra in metadata["extras"]}),
    )
    if not all(extra.replace("-", "").isalnum() and extra.isascii() for extra in extras):
        raise ValueError("an extra has an invalid name")
    return Facts(requires=tuple(requirement.text for requirement in requires), python=python, extras=tuple(extras))


def _why(step: Step, result: Result) -> str:
    """Return why a step failed, with its last words: a build says much before them."""
    text = " ".join(line.strip() for line in result.stderr.splitlines() if line.strip())
    cut = replace(result, stderr=text if len(text) <= MOST_LAST_CHARS else f"... {text[4 - MOST_LAST_CHARS :]}")
    return str(failed(step, cut)).removeprefix(f"packages: cannot {step.name}: ")


def _refusal(pin: Pin, why: str) -> StartFailed:
    return StartFailed(f"packages: {pin.text} cannot be built from source: {why}", step="build")
