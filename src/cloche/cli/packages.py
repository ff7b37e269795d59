"""`cloche packages`: install and lock sets of packages ahead, list the layers, remove layers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cloche.core.errors import InvalidRequest
from cloche.core.escape import escape, escape_line

from .app import root
from .options import argument, flag, json_option, option, sandbox_options
from .output import show, showing_progress

if TYPE_CHECKING:
    from cloche.config.options import SandboxOptions
    from cloche.packages.store import Layer

MOST_NAMES = 6  # of a layer, in the table

packages = root.group("packages", help="Packages for sandboxes: install, list, remove.")(lambda: None)
_requirements = argument("words", nargs=-1, metavar="NAME", help="Packages, with versions: rich, 'httpx>=0.27'.")
_file = option("--requirements", metavar="FILE", help="Also take packages from a requirements.txt.")


@packages.command("install")
@_requirements
@_file
@flag("--upgrade", help="Resolve again, even if the same packages are installed.")
@option("--locked", metavar="FILE", help="Install exactly the packages of this lock file.")
@sandbox_options("config", "backend", "image")
@json_option()
def _install(
    words: tuple[str, ...], requirements: str | None, upgrade: bool, locked: str | None, as_json: bool,
    options: SandboxOptions,
) -> int:  # fmt: skip
    """Install packages ahead: the first run needs no network."""
    from cloche.execution.packages import install_ahead
    from cloche.sync_run import blocking

    requested = with_requirements(",".join(words), requirements)
    keywords: dict[str, Any] = {**options, "packages": requested, **({"locked": locked} if locked else {})}
    with showing_progress():
        report = blocking(install_ahead, name="install_ahead")(upgrade=upgrade, **keywords)
    _tell(report.as_dict(), as_json=as_json)
    return 0


@packages.command("lock")
@_requirements
@_file
@option("--output", metavar="FILE", default="cloche.lock", help="The lock file to write.")
@sandbox_options("config", "backend", "image")
@json_option()
def _lock(words: tuple[str, ...], requirements: str | None, output: str, as_json: bool, options: SandboxOptions) -> int:
    """Resolve packages, and write a lock file.

    It holds versions, addresses and hashes.
    """
    from cloche.core.layers import Target
    from cloche.execution.packages import install_ahead
    from cloche.packages.lock import write_lock
    from cloche.sync_run import blocking

    keywords: dict[str, Any] = {**options, "packages": with_requirements(",".join(words), requirements)}
    with showing_progress():
        report = blocking(install_ahead, name="install_ahead")(upgrade=True, **keywords)
    write_lock(output, report.asked, report.pins, Target(**report.layer.target))
    _tell({**report.as_dict(), "file": os.path.abspath(output)}, as_json=as_json)
    return 0


@packages.command("list")
@json_option()
def _list(as_json: bool) -> int:
    """List the layers, the last used first."""
    from cloche.packages.store import Store

    rows = [_row(layer, is_whole=as_json) for layer in Store().layers()]
    if not rows and not as_json:
        print("no packages are installed")
        return 0
    show(rows, as_json=as_json)
    return 0


@packages.command("prune")
@option("--most-size", metavar="SIZE", help="Keep layers of at most this total size: 2g.")
@option("--most-layers", metavar="N", type=int, help="Keep at most this many layers.")
@option("--unused", metavar="TIME", help="Remove layers that were not used for this time: 30d.")
@flag("--all", "everything", help="Remove all layers that are not in use.")
@json_option()
def _prune(most_size: str | None, most_layers: int | None, unused: str | None, everything: bool, as_json: bool) -> int:
    """Remove layers that are not in use.

    The least recently used ones are removed first.
    """
    from cloche.core.limits import format_size, parse_duration, parse_size
    from cloche.execution.packages import prune

    if not everything and most_size is None and most_layers is None and unused is None:
        raise InvalidRequest("give a limit: --most-size, --most-layers, --unused or --all")
    removed, copies = prune(
        most_bytes=parse_size(most_size, name="--most-size") if most_size else None,
        most_layers=0 if everything else most_layers,
        unused_s=parse_duration(unused, name="--unused") if unused else None,
    )
    if as_json:
        print(json.dumps([_row(layer, is_whole=True) for layer in removed], indent=2))
        return 0
    total = sum(layer.total_bytes for layer in removed)
    for line in copies:
        print(f"removed {line}")
    if removed or not copies:
        print(f"removed {len(removed)} layers, {format_size(total)}" if removed else "nothing to remove")
    return 0


def _row(layer: Layer, *, is_whole: bool) -> dict[str, object]:
    from cloche.core.limits import format_size

    names = [f"{pin.name} {pin.version}{' (built)' if pin.is_source else ''}" for pin in layer.pins]
    if is_whole:
        return {
            "layer": os.path.basename(layer.folder), "packages": names, "bytes": layer.total_bytes,
            "built": {pin.text: [requirement.text for requirement in pin.build] for pin in layer.pins if pin.is_source},
            "files": layer.files, "last_used": layer.last_used, "target": dict(layer.target), "folder": layer.folder,
        }  # fmt: skip
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return {
        "layer": os.path.basename(layer.folder)[:12], "packages": ", ".join(names[:MOST_NAMES]) + more,
        "size": format_size(layer.total_bytes), "unused": f"{max(0.0, time.time() - layer.last_used) / 3600:.1f} h",
        "for": layer.target.get("tag", ""),
    }  # fmt: skip


def _tell(report: dict[str, object], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report, indent=2))
        return
    installed = report["installed"]
    names = ", ".join(installed) if isinstance(installed, list) else ""
    print(escape(f"{'installed' if report['is_new'] else 'there already'}: {names}"))
    built = report.get("built")
    if isinstance(built, list):
        print(escape(f"built from source: {', '.join(built)}"))
    if "file" in report:
        print(escape_line(f"written: {report['file']}"))


def with_requirements(packages: Sequence[str] | None, file: str | None) -> str | list[str]:
    """Return the packages of the command line and of a `requirements.txt`. Raises InvalidRequest."""
    from cloche.config.readers import parse_packages
    from cloche.packages.requirements import MOST_FILE_BYTES, read_requirements_file

    named = parse_packages(packages, name="--packages") if packages else ()
    if file is None:
        return named if isinstance(named, str) else list(named)
    if isinstance(named, str):
        raise InvalidRequest("--packages auto and --requirements exclude each other; give one")
    try:
        with open(file, encoding="utf-8") as opened:
            text = opened.read(MOST_FILE_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--requirements: cannot read {file!r}: {error}") from None
    return [*named, *read_requirements_file(text, file=file)]
