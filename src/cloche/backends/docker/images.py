"""Images: which image runs a language, whether it is present, and which programs it has."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from cloche.core.ceilings import image_digest, is_digest
from cloche.core.errors import BackendUnavailable, LanguageUnavailable
from cloche.core.events import Progress, report_progress
from cloche.core.languages import LANGUAGES, Engine, Language
from cloche.core.layers import Interpreter, Target
from cloche.core.record import dataclass

from ..containers.container import LEAST_PYTHON
from ..containers.program import LOOK, PROGRAMS, engine_of
from ..garbage_collection import owner
from ..host import KeptAnswers
from ..toolchain import version_numbers
from .daemon import CONNECT_S, OWNER_LABEL, Daemon, explained
from .plan import MAPPED_ID

ANY_LANGUAGE = "*"
PROBE_S = 30
LAYERS = "/opt/cloche/packages"  # mount points of package layers in a container are below it, one per key
log = logging.getLogger("cloche.docker")
# Copying files needs tar and head; their versions do not matter.
_PROBE = f"""{LOOK}
for name in tar head; do command -v $name >/dev/null 2>&1 && printf '%s\\t%s\\t\\n' "$name" "$name"; done
"""
# Prints the interpreter's wheel tags in one line of JSON, and its modules that are not of the standard library.
_ASK_PYTHON = r"""
import glob, json, os, pkgutil, platform, re, subprocess, sys, sysconfig
try:
    libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
except (ValueError, OSError):
    libc = ""
for loader in glob.glob("/lib/ld-musl-*.so.1")[: not libc]:
    said = subprocess.run([loader], stderr=subprocess.PIPE, universal_newlines=True).stderr
    libc = "musl " + "".join(re.findall(r"Version (\S+)", said)[:1])
known, names, room = getattr(sys, "stdlib_module_names", ()), [], 32768
for name in sorted({one.name for one in pkgutil.iter_modules()}.difference(known)):
    room -= len(name) + 4
    names += [name] if room > 0 else []
is_plain = sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
print(json.dumps([
    sys.executable, platform.python_version(), sys.implementation.cache_tag if is_plain else "",
    sysconfig.get_platform(), libc, names,
]))
"""
Rows = list[list[str]]
Said = tuple[str, str, str, str, str, list[str]]  # path, version, tag, platform, C library, modules
_FORMS = (r"/[^\s\0]+", r"3\.\d+\.\d+\S*", r"cpython-3\d+", r"linux-\w+", r"(glibc|musl) \d+\.\d+\S*")
_turn = threading.Lock()
_images_by_id: dict[str, DockerImage] = {}
_present: set[tuple[int, str]] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class DockerImage:
    """An image: name, id, environment variables, and its programs with paths and versions."""

    name: str
    id: str
    env: Mapping[str, str]
    programs: Mapping[str, str]
    versions: Mapping[str, str]

    @property
    def has_reaper(self) -> bool:
        """Return whether our first process can run in it."""
        return version_numbers(self.versions.get("python3", "")) >= LEAST_PYTHON

    def engine(self, language: Language) -> Engine:
        """Return the first engine that the image can run. Raises BackendUnavailable that names the missing programs."""
        engine = engine_of(language, self.programs, self.versions)
        if engine is not None:
            return engine
        missing = "; or ".join(", ".join(engine.programs) for engine in language.engines)
        raise LanguageUnavailable(
            f"image {self.name!r} cannot run {language.name}: it has no {missing}. Name one that has: "
            f"--image, images: {{{language.name}: NAME}}, or CLOCHE_IMAGE_{language.name.upper()}"
        )

    def version(self, engine: Engine) -> str:
        """Return the version that the engine's main program prints, else its name."""
        return self.versions.get(engine.programs[0]) or engine.programs[0]


def image_name(language: str, chosen: Mapping[str, str]) -> str:
    """Return the configured image of a language, else the default of `LANGUAGES`."""
    return chosen.get(language) or chosen.get(ANY_LANGUAGE) or LANGUAGES[language].image


def find_image(daemon: Daemon, name: str) -> DockerImage:
    """Return an image with its programs. It is pulled if it is missing, and its programs are listed once.

    Raises BackendUnavailable, which says how to get or name an image.
    """
    daemon.check_socket(CONNECT_S)  # reports, with the remedy, a daemon that has stopped since the last run
    with _turn:
        state = _inspect(daemon, name) or _pull(daemon, name)
        image = _images_by_id.get(f"{name} {state['Id']}")
        if image is None:
            rows = _KEPT.find((state["Id"], _PROBE, *PROGRAMS), lambda: _look_into(daemon, name, state))
            image = _images_by_id[f"{name} {state['Id']}"] = _image(name, state, rows)
        return image


def interpreter_of(daemon: Daemon, image: DockerImage) -> Interpreter:
    """Return the interpreter that an image has as `python3`; cached. Blocks.

    Raises BackendUnavailable if packages cannot be chosen for it.
    """
    answer = _PYTHONS.find((image.id, _ASK_PYTHON), lambda: _ask_python(daemon, image))
    python, version, tag, platform, libc, modules = answer
    target = Target(python=python, version=version, tag=tag, platform=platform, libc=libc, folder=LAYERS)
    return Interpreter(target=target, modules=frozenset(modules))


def _ask_python(daemon: Daemon, image: DockerImage) -> Said:
    requirement = "packages take an image with CPython as python3, of a release"
    if "python3" not in image.programs:
        raise BackendUnavailable(
            f"packages: image {image.name!r} has no python3.", remedy=f"Name another: {requirement}."
        )
    code, output = _said_by(daemon, image.name, image.id, ["python3", "-I", "-c", _ASK_PYTHON])
    try:
        answer = _read_said(json.loads(output.splitlines()[-1]))
    except (ValueError, IndexError, TypeError):
        answer = None
    if code != 0 or answer is None:
        raise BackendUnavailable(
            f"packages: the python3 of image {image.name!r} is none that packages can be chosen for.",
            remedy=f"Name another image: {requirement}.",
        )
    return answer


def _read_said(answer: Any) -> Said | None:  # noqa: ANN401 - JSON of an image
    """Return the image's answer about its interpreter, or None if it is malformed."""
    *texts, names = answer
    if len(texts) != 5 or not all(isinstance(text, str) and 0 < len(text) < 200 for text in texts):
        return None
    if not all(re.fullmatch(form, text) for form, text in zip(_FORMS, texts, strict=True)):
        return None
    python, version, tag, platform, libc = texts
    return python, version, tag, platform, libc, [name for name in names if isinstance(name, str)]


def is_here(daemon: Daemon, name: str) -> bool:
    """Return whether the daemon has an image. A positive answer is cached."""
    key = (id(daemon), name)
    if key not in _present and _inspect(daemon, name) is not None:
        _present.add(key)
    return key in _present


def image_digests(daemon: Daemon) -> list[str]:
    """Return the digests by which the daemon's images can be named, the newest first. Raises BackendUnavailable."""
    try:
        rows = sorted(daemon.api.images(), key=lambda row: row["Created"], reverse=True)
        names = [name for row in rows for name in (row["Id"], *(row.get("RepoDigests") or ()))]
    except Exception as error:
        raise BackendUnavailable(f"images cannot be listed: {explained(error)}") from error
    return list(dict.fromkeys(image_digest(name) for name in names if is_digest(name)))


def _inspect(daemon: Daemon, name: str) -> Mapping[str, Any] | None:
    import docker.errors

    try:
        details: Mapping[str, Any] = daemon.api.inspect_image(name)
    except docker.errors.ImageNotFound:
        return None
    except Exception as error:
        raise BackendUnavailable(f"image {name!r} cannot be looked up: {explained(error)}") from error
    return details


def _pull(daemon: Daemon, name: str) -> Mapping[str, Any]:
    from docker.utils import parse_repository_tag

    log.info("pulling image %s", name)
    repository, tag = parse_repository_tag(name)
    why, layers = "the pull ended without it", dict[str, tuple[int, int]]()
    try:
        for message in daemon.api.pull(repository, tag=tag or "latest", stream=True, decode=True):
            why = str(message.get("error") or why)
            detail = message.get("progressDetail") or {}
            if message.get("status") == "Downloading" and detail.get("total"):
                layers[str(message.get("id"))] = int(detail["current"]), int(detail["total"])
                loaded, total = (sum(amounts) for amounts in zip(*layers.values(), strict=True))
                report_progress(Progress(what=f"pulling {name}", done=loaded, total=total))
    except Exception as error:
        why = explained(error)
    finally:
        report_progress(Progress(what=f"pulling {name}", is_over=True))
    details = _inspect(daemon, name)
    if details is None:
        raise BackendUnavailable(
            f"image {name!r} is not here and cannot be pulled: {why}. Build one with "
            '"docker build -f Dockerfile.sandbox -t cloche-sandbox ." and name it (or any other you have): '
            "--image cloche-sandbox, images: {python: NAME}, or CLOCHE_IMAGE_PYTHON=NAME"
        )
    return details


def _look_into(daemon: Daemon, name: str, state: Mapping[str, Any]) -> Rows:
    """Run a container that lists an image's programs: name, path, version."""
    code, output = _said_by(daemon, name, state["Id"], ["sh", "-c", _PROBE, "sh", *PROGRAMS])
    rows = [line.split("\t") for line in output.splitlines() if line.count("\t") == 2]
    log.debug("image %s (exit code %s): %s", name, code, json.dumps(rows))
    return rows


def _said_by(daemon: Daemon, name: str, image: str, arguments: Sequence[str]) -> tuple[int, str]:
    """Run a container of an image to its end; return its exit code and output. Raises BackendUnavailable."""
    body = {
        "Image": image,
        "Entrypoint": [arguments[0]],
        "Cmd": list(arguments[1:]),
        "User": f"{MAPPED_ID}:{MAPPED_ID}",
        "Env": ["HOME=/tmp", "DOTNET_NOLOGO=1", "DOTNET_CLI_TELEMETRY_OPTOUT=1", "DENO_NO_UPDATE_CHECK=1"],
        "Labels": {OWNER_LABEL: owner()},
        "HostConfig": {
            "NetworkMode": "none",
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges"],
            "ReadonlyRootfs": True,
            "PidsLimit": 128,
            "Memory": 1 << 29,
            "Tmpfs": {"/tmp": "size=64m,mode=1777"},
            "LogConfig": {"Type": "json-file", "Config": {"max-size": "64k", "max-file": "1"}},
        },
    }
    container = daemon.create(body)
    try:
        daemon.start(container)
        code = daemon.api.wait(container, timeout=PROBE_S)["StatusCode"]
        output = daemon.api.logs(container, stdout=True, stderr=False).decode("utf-8", "replace")
    except Exception as error:
        raise BackendUnavailable(
            f"image {name!r} cannot be used: no container of it could be inspected ({explained(error)}). "
            "An image for sandboxes needs at least a shell (sh) and tar."
        ) from error
    finally:
        daemon.remove(container)
    return int(code), output


def _image(name: str, state: Mapping[str, Any], rows: Rows) -> DockerImage:
    programs = {row[0]: row[1] for row in rows}
    versions = {row[0]: row[2] for row in rows if row[2]}
    return DockerImage(name=name, id=str(state["Id"]), env=_environment(state), programs=programs, versions=versions)


def _from_plain(plain: Rows) -> Rows:
    return [[str(name), str(two), str(three)] for name, two, three in plain]


# An image id's contents never change, so the answers are cached for later processes.
_KEPT = KeptAnswers[Rows]("images", to_plain=lambda rows: rows or None, from_plain=_from_plain, is_of_host=False)
_PYTHONS = KeptAnswers[Said]("pythons", to_plain=list, from_plain=_read_said, is_of_host=False)


def _environment(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that an image sets, which its toolchains may need."""
    lines = [str(line) for line in (state.get("Config") or {}).get("Env") or ()]
    return {name: value for name, _, value in (line.partition("=") for line in lines) if name}
