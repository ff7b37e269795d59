"""`cloche devenv`: the manifest of a workspace's development environment, and a sandbox that is set up by it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from cloche.core.errors import NotFound
from cloche.core.escape import escape, escape_line

from ._records import Document, Kind, add_commands, opened
from ._records import folder as open_folder
from .app import root
from .options import argument, flag, json_option, option, sandbox_options
from .output import say, show, showing_progress

if TYPE_CHECKING:
    from cloche.config.options import SandboxOptions
    from cloche.records.devenv import DevEnvManifest

EXIT_FAILED_STEP = 1

devenv = root.group("devenv", help="Development environments: manifests, sandboxes.")(lambda: None)
_folder = argument(
    "folder", metavar="[FOLDER]", default=".", required=False, help="The workspace. Default: the current folder."
)


@devenv.command("generate")
@_folder
@flag("--print", "is_printed", help="Print the manifest; write and store nothing.")
@json_option()
def _generate(folder: str, is_printed: bool, as_json: bool) -> int:
    """Write cloche-devenv.json, from the files of the workspace.

    Nothing of the workspace is executed. The manifest is stored, too, for `cloche devenv list`.
    """
    from cloche.records.devenv import FILE, generate, write_manifest

    path = os.path.realpath(folder)
    notes: list[str] = []
    with _opened(folder) as fd:
        manifest = generate(fd, path, notes=notes)
        _say_all(notes)
        if not is_printed:
            write_manifest(fd, manifest)
            _store(manifest, path)
    if as_json or is_printed:
        _print_json(manifest)
    else:
        print(escape_line(f"written: {os.path.join(path, FILE)}"))
        _print_manifest(manifest)
    return 0


@devenv.command("show")
@_folder
@json_option()
def _show(folder: str, as_json: bool) -> int:
    """Show the manifest of a workspace."""
    manifest = _read(folder)
    if as_json:
        _print_json(manifest)
    else:
        _print_manifest(manifest)
    return 0


@devenv.command("check")
@_folder
@sandbox_options("config")
@json_option()
def _check(folder: str, as_json: bool, options: SandboxOptions) -> int:
    """Check a manifest.

    It lists the requests that the configuration does not grant.
    """
    from cloche.config.settings import given_options, load_settings
    from cloche.records.provision import tighten

    manifest = _read(folder)
    notes = tighten(manifest, load_settings(given_options(options))).notes
    if as_json:
        print(json.dumps({"name": manifest.name, "isValid": True, "notes": list(notes)}, indent=2))
        return 0
    for note in notes:
        print(escape_line(note))
    print(f"{manifest.name}: valid")
    return 0


@devenv.command("provision")
@_folder
@option("--name", metavar="NAME", help="The sandbox's name. Default: derived from the manifest's.")
@option("--keep", metavar="TIME", default="1h", help="How long it lives without a client.")
@option("--lifetime", metavar="TIME", help="How long it lives in total. Default: 24h.")
@option("--idle", metavar="TIME", help="End it after this time without a process or call.")
@sandbox_options()
@json_option()
def _provision(
    folder: str, name: str | None, keep: str, lifetime: str | None, idle: str | None, as_json: bool,
    options: SandboxOptions,
) -> int:  # fmt: skip
    """Open a sandbox with the workspace's files, and set it up.

    It follows the manifest, or a generated one if there is none. If a step fails, it is reported and the exit code is
    1. The sandbox lives on in any case.
    """
    from cloche.records.devenv import generate, read_manifest
    from cloche.records.provision import provision
    from cloche.sync_run import blocking

    notes: list[str] = []
    with _opened(folder) as fd, showing_progress():
        try:
            manifest = read_manifest(fd)
        except NotFound:
            manifest = generate(fd, os.path.realpath(folder), notes=notes)
        _say_all(notes)
        provisioned = blocking(provision, name="provision")(
            manifest, folder=fd, name=name, keep=keep, lifetime=lifetime, idle=idle, **options
        )
    if as_json:
        print(json.dumps(provisioned.as_dict(), indent=2))
    else:
        _say_all(provisioned.notes)
        print(provisioned.sandbox)
        rows = [
            {"step": " ".join(step.run), "status": "error" if step.error else "ok", "seconds": f"{step.seconds:.1f}",
             "error": step.error}
            for step in provisioned.steps
        ]  # fmt: skip
        if rows:
            show(rows, as_json=False, below=("error",))
    return 0 if provisioned.ok else EXIT_FAILED_STEP


def _read(folder: str) -> DevEnvManifest:
    from cloche.records.devenv import read_manifest

    with _opened(folder) as fd:
        return read_manifest(fd)


def _opened(path: str) -> AbstractContextManager[int]:
    return open_folder(path, "{!r} is not a readable folder: {}")


def _store(manifest: DevEnvManifest, path: str) -> None:
    with opened() as database:
        from cloche.records.devenv_store import save_manifest

        save_manifest(database, manifest, path)


def _page(**filters: Any) -> Document:  # noqa: ANN401 - the options of the command
    with opened() as database:
        from cloche.records.devenv_store import list_manifests

        return list_manifests(database, **filters)


add_commands(
    Kind(
        group=devenv, name="manifest", plural="stored manifests", none="no manifest is stored", page=_page,
        row=lambda record: {
            "name": record["name"], "created": record["createdAt"], "workspace": record["workspacePath"],
        },
        below=("workspace",),
    )
)  # fmt: skip


def _say_all(notes: Sequence[str]) -> None:
    for note in notes:
        say(note)


def _print_json(manifest: DevEnvManifest) -> None:
    print(json.dumps(manifest.as_dict(), indent=2))


def _print_manifest(manifest: DevEnvManifest) -> None:
    rows = [("name", manifest.name)]
    rows += [
        ("language", f"{language.name} {language.version or ''} ({language.evidence})")
        for language in manifest.languages
    ]
    rows += [("dependencies", f"{dependency.file} ({dependency.manager})") for dependency in manifest.dependencies]
    rows += [("setup", " ".join(step.run)) for step in manifest.setup]
    rows += [("env", name) for name in manifest.env]
    rows += [("limit", f"{name} {amount}") for name, amount in manifest.limits.items()]
    for label, text in rows:
        print(escape(f"{label + ':':14}{' '.join(text.split())}"))
