"""Templates of the operator, and E2B's own names: by name, and by the images that stand for them.

A file of `--e2b-templates` is YAML with two mappings:

    templates:
      science: {options: {packages: [numpy], memory: 1g}, env: {A: b}, workdir: /home/user, user: user,
                start: python3 -m http.server 8000, ready: curl -s localhost:8000}
    images:
      "python:3.12*": science

`options` are those of a sandbox. An image's pattern ends with `*` or has none; the longest that fits counts. Nothing is
pulled: an image is only a name. Without a pattern, the names of images that this machine itself has are accepted: its
system, and the versions of Python and Node.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from cloche.config.options import SandboxOptions
from cloche.config.plain_yaml import parse_yaml
from cloche.core.errors import InvalidRequest
from cloche.core.record import dataclass, field
from cloche.records.templates import check_name

from .errors import E2BError

BASE, INTERPRETER = "base", "code-interpreter-v1"
FIELDS = ("options", "env", "workdir", "user", "start", "ready")
MOST_FILE_BYTES = 1 << 20
# E2B's images, and its templates that cannot be here.
OWN_IMAGES = {"e2bdev/base": BASE, "e2bdev/code-interpreter": INTERPRETER}
REFUSED = {
    "desktop": "there is no desktop inside; start Xvfb and a VNC server from a template of yours, where they are",
    "mcp-gateway": "there is no MCP gateway inside; run the MCP server as a command, and reach it by get_host(port)",
}
# Variants of images' tags, which say nothing about the version.
_VARIANT = re.compile(r"-(slim|alpine|bullseye|bookworm|trixie|buster|stable|minimal|base|current).*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTemplate:
    """Hold a template that needs no build."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    user: str | None = None
    start: str | None = None
    ready: str | None = None


BUILT_IN = {name: OwnTemplate(name=name) for name in (BASE, INTERPRETER, "code-interpreter")}


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTemplates:
    """Hold all of them by name, and the names of images."""

    templates: Mapping[str, OwnTemplate] = field(default_factory=lambda: BUILT_IN)
    images: Mapping[str, str] = field(default_factory=dict)

    def find(self, name: str) -> OwnTemplate | None:
        """Return one by its name, None for another name. Raises E2BError (501) for one that cannot be here."""
        if name not in self.templates and name in REFUSED:
            raise E2BError(501, f"template {name!r}: {REFUSED[name]}")
        return self.templates.get(name)

    def of_image(self, image: str) -> OwnTemplate:
        """Return the template that stands for an image. Raises E2BError (400) for an unknown one."""
        name = image.removeprefix("docker.io/").removeprefix("library/")
        patterns = [pattern for pattern in self.images if _fits(pattern, image) or _fits(pattern, name)]
        if patterns:
            return self.templates[self.images[max(patterns, key=len)]]
        repository, _, tag = name.partition(":")
        if repository in OWN_IMAGES:
            return self.templates[OWN_IMAGES[repository]]
        if _is_here(repository, tag):
            return self.templates[BASE]
        raise E2BError(
            400, f"image {image[:200]!r}: no image is pulled here, and this name stands for no template; the server's "
            "operator maps it: images in the file of --e2b-templates. Here are e2bdev/base and " + ", ".join(_here()),
        )  # fmt: skip


def _fits(pattern: str, image: str) -> bool:
    return image.startswith(pattern[:-1]) if pattern.endswith("*") else image == pattern


@functools.cache
def _here() -> Mapping[str, tuple[str, ...]]:
    """Return what this machine has: names of images, with the words and versions of their tags."""
    release: Mapping[str, str] = {}
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        pass
    version = ".".join(map(str, sys.version_info[:3]))
    here: dict[str, tuple[str, ...]] = {"python": ("", "latest", "3", version)}
    if release.get("ID") and release.get("VERSION_ID"):
        here[release["ID"]] = ("", "latest", "stable", release.get("VERSION_CODENAME", ""), release["VERSION_ID"])
    if node := _node_version():
        here["node"] = ("", "latest", "lts", node)
    return here


def _node_version() -> str:
    try:
        told = subprocess.run(["node", "--version"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return told.stdout.strip().removeprefix("v")


def _is_here(repository: str, tag: str) -> bool:
    words = _here().get(repository)
    if words is None:
        return False
    plain = _VARIANT.sub("", tag) if tag[:1].isdigit() else tag.removesuffix("-slim")
    return plain in words or any(f"{word}.".startswith(f"{plain}.") for word in words if plain[:1].isdigit())


def read_templates(path: str | os.PathLike[str] | None) -> OwnTemplates:
    """Return the templates of a file, beside the built-in ones. Raises InvalidRequest."""
    if path is None:
        return OwnTemplates()
    where = f"e2b-templates: {os.fspath(path)}"
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MOST_FILE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{where} cannot be read: {error}") from error
    document = _mapping(parse_yaml(text, where) or {}, where, ("templates", "images"))
    own = {
        check_name(str(name)): _read(str(name), row, where)
        for name, row in _mapping(document.get("templates") or {}, where).items()
    }
    templates = {**BUILT_IN, **own}
    images = {str(image): str(name) for image, name in _mapping(document.get("images") or {}, where).items()}
    for image, name in images.items():
        if name not in templates:
            raise InvalidRequest(f"{where}: image {image!r} stands for {name!r}, which is no template here")
    return OwnTemplates(templates=templates, images=images)


def _read(name: str, row: object, where: str) -> OwnTemplate:
    fields = _mapping(row or {}, f"{where}: template {name}", FIELDS)
    options = _mapping(fields.get("options") or {}, f"{where}: template {name}", tuple(SandboxOptions.__annotations__))
    env = _mapping(fields.get("env") or {}, f"{where}: template {name}")
    texts = {key: str(fields[key]) for key in ("workdir", "user", "start", "ready") if fields.get(key) is not None}
    variables = {str(key): str(value) for key, value in env.items()}
    return OwnTemplate(name=name, options=dict(options), env=variables, **texts)


def _mapping(value: object, where: str, keys: tuple[str, ...] | None = None) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where}: {str(value)[:80]!r} is not a mapping")
    unknown = [str(key) for key in value if keys is not None and key not in keys]
    if unknown:
        raise InvalidRequest(f"{where}: {unknown[0]!r} is not a key here; there are {', '.join(keys or ())}")
    return value
