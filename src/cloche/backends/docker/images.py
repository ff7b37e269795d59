"""Images: which one runs a language, whether it is here, and what it holds."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cloche.core.errors import BackendUnavailable
from cloche.core.events import Progress, report_progress
from cloche.core.languages import LANGUAGES, Engine, Language

from ..containers.container import LEAST_PYTHON
from ..containers.program import LOOK, PROGRAMS, engine_of
from ..garbage_collection import owner
from ..host import KeptAnswers
from ..toolchain import version_numbers
from .daemon import CONNECT_S, OWNER_LABEL, Daemon, explained
from .plan import MAPPED_ID

ANY_LANGUAGE = "*"
PROBE_S = 30
log = logging.getLogger("cloche.docker")
# Copying needs these two, of whatever version.
_PROBE = f"""{LOOK}
for name in tar head; do command -v $name >/dev/null 2>&1 && printf '%s\\t%s\\t\\n' "$name" "$name"; done
"""
Rows = list[list[str]]
_turn = threading.Lock()
_known: dict[str, Image] = {}
_here: set[tuple[int, str]] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """Hold what is known of an image: its name, its id, its variables, the programs in it with paths and versions."""

    name: str
    id: str
    env: Mapping[str, str]
    programs: Mapping[str, str]
    versions: Mapping[str, str]

    @property
    def has_reaper(self) -> bool:
        """Tell whether our first process can run in it."""
        return version_numbers(self.versions.get("python3", "")) >= LEAST_PYTHON

    def engine(self, language: Language) -> Engine:
        """Return the first engine that is there. Raises BackendUnavailable saying what is missing."""
        engine = engine_of(language, self.programs, self.versions)
        if engine is not None:
            return engine
        wanted = "; or ".join(", ".join(engine.programs) for engine in language.engines)
        raise BackendUnavailable(
            f"image {self.name!r} cannot run {language.name}: it has no {wanted}. Name one that has: "
            f"--image, images: {{{language.name}: NAME}}, or CLOCHE_IMAGE_{language.name.upper()}"
        )

    def version(self, engine: Engine) -> str:
        """Return what the engine's main program prints as its version, else its name."""
        return self.versions.get(engine.programs[0]) or engine.programs[0]


def image_name(language: str, chosen: Mapping[str, str]) -> str:
    """Return the image that is configured for a language, else the table's."""
    return chosen.get(language) or chosen.get(ANY_LANGUAGE) or LANGUAGES[language].image


def find_image(daemon: Daemon, name: str) -> Image:
    """Return an image, pulled when it is not here, and looked into once.

    Raises BackendUnavailable saying how to get or name one.
    """
    daemon.check_socket(CONNECT_S)  # a daemon that is gone since the last run is reported, with the remedy
    with _turn:
        state = _inspect(daemon, name) or _pull(daemon, name)
        found = _known.get(f"{name} {state['Id']}")
        if found is None:
            rows = _KEPT.find((state["Id"], _PROBE, *PROGRAMS), lambda: _look_into(daemon, name, state))
            found = _known[f"{name} {state['Id']}"] = _image(name, state, rows)
        return found


def is_here(daemon: Daemon, name: str) -> bool:
    """Tell whether the daemon has an image; one that it had is taken to stay."""
    key = (id(daemon), name)
    if key not in _here and _inspect(daemon, name) is not None:
        _here.add(key)
    return key in _here


def _inspect(daemon: Daemon, name: str) -> Mapping[str, Any] | None:
    import docker.errors

    try:
        found: Mapping[str, Any] = daemon.api.inspect_image(name)
    except docker.errors.ImageNotFound:
        return None
    except Exception as error:
        raise BackendUnavailable(f"image {name!r} cannot be looked up: {explained(error)}") from error
    return found


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
                done, total = (sum(amounts) for amounts in zip(*layers.values(), strict=True))
                report_progress(Progress(what=f"pulling {name}", done=done, total=total))
    except Exception as error:
        why = explained(error)
    finally:
        report_progress(Progress(what=f"pulling {name}", is_over=True))
    found = _inspect(daemon, name)
    if found is None:
        raise BackendUnavailable(
            f"image {name!r} is not here and cannot be pulled: {why}. Build one with "
            '"docker build -f Dockerfile.sandbox -t cloche-sandbox ." and name it (or any other you have): '
            "--image cloche-sandbox, images: {python: NAME}, or CLOCHE_IMAGE_PYTHON=NAME"
        )
    return found


def _look_into(daemon: Daemon, name: str, state: Mapping[str, Any]) -> Rows:
    """Run a container once that prints which programs an image has: name, path, version."""
    body = {
        "Image": state["Id"],
        "Entrypoint": ["sh"],
        "Cmd": ["-c", _PROBE, "sh", *PROGRAMS],
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
            f"image {name!r} cannot be used: no container of it could say what is in it ({explained(error)}). "
            "An image for sandboxes needs at least a shell (sh) and tar."
        ) from error
    finally:
        daemon.remove(container)
    rows = [line.split("\t") for line in output.splitlines() if line.count("\t") == 2]
    log.debug("image %s (exit code %s): %s", name, code, json.dumps(rows))
    return rows


def _image(name: str, state: Mapping[str, Any], rows: Rows) -> Image:
    programs = {row[0]: row[1] for row in rows}
    versions = {row[0]: row[2] for row in rows if row[2]}
    return Image(name=name, id=str(state["Id"]), env=_environment(state), programs=programs, versions=versions)


def _from_plain(plain: Rows) -> Rows:
    return [[str(one), str(two), str(three)] for one, two, three in plain]


# What an image holds never changes: that is a container less for each new process.
_KEPT = KeptAnswers[Rows]("images", to_plain=lambda rows: rows or None, from_plain=_from_plain, is_of_host=False)


def _environment(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that an image sets: its toolchains may need them."""
    lines = [str(line) for line in (state.get("Config") or {}).get("Env") or ()]
    return {name: value for name, _, value in (line.partition("=") for line in lines) if name}
