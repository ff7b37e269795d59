"""Policy, limits and requests as fields of the wire. Values that cannot be sent are refused, never dropped."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from cloche.core.enforcement import Level
from cloche.core.errors import InvalidRequest
from cloche.core.limits import LIMITS, REQUESTED_LIMITS, Limits
from cloche.core.policy import Policy
from cloche.core.record import fields
from cloche.core.request import InputFile, Request

MOST_SENT = 20 << 20  # bytes of files and input in a call, as base64; larger files are written before
MOST_FILES = 2_500
MODE = 0o644  # default mode of files in a call
# Settings that the service decides and that cannot be requested: only the defaults are accepted.
_OWN_LIMITS = tuple(row.field for row in LIMITS if not row.is_requested)
_OWN_POLICY = ("read_only_root", "writable_paths", "user", "seccomp", "drop_capabilities")
_USUAL: Mapping[type, Policy | Limits] = {Policy: Policy(), Limits: Limits()}


def option_fields(policy: Policy, limits: Limits, *, usual_level: Level | None = Level.JAIL) -> dict[str, Any]:
    """Return the fields of a sandbox, or of a run in its own sandbox. Raises InvalidRequest.

    `usual_level` is the minimum unless the policy names a level.
    """
    _check_own(policy, _OWN_POLICY)
    _check_own(limits, _OWN_LIMITS)
    if policy.layers:
        raise InvalidRequest(
            "packages: backend 'cloche' cannot show folders of this host; see docs/limitations/cloche.md"
        )
    fields: dict[str, Any] = {row.wire: getattr(limits, row.field) for row in REQUESTED_LIMITS}
    fields["network"] = policy.network
    for name, values in (
        ("networkAllow", policy.network_allow), ("networkDeny", policy.network_deny),
        ("networkPorts", policy.network_ports),
    ):  # fmt: skip
        if values:
            fields[name] = list(values)
    if policy.packages:
        fields["packages"] = policy.packages if isinstance(policy.packages, str) else list(policy.packages)
    if policy.packages_lock:
        fields["packagesLock"] = policy.packages_lock
    if policy.secrets is not None and policy.secrets.hosts_by_name:
        fields["secrets"] = list(policy.secrets.hosts_by_name)
        if policy.network == "off":  # but for their hosts, which the service knows
            fields |= {"network": "allowlist", "networkAllow": []}
    if policy.users:
        fields["users"] = True
    if policy.account is not None:
        fields["account"] = policy.account
    if not policy.warm:
        fields["warm"] = False
    if policy.runtime is not None:
        fields["runtime"] = policy.runtime
    if policy.best_effort:
        fields["bestEffort"] = list(map(str, policy.best_effort))
    if policy.level is not None:
        fields["level"] = str(policy.level)
    least_level = policy.require_level or (usual_level if policy.level is None else None)
    required = [*([str(least_level)] if least_level is not None else []), *map(str, policy.require_controls)]
    if required:
        fields["require"] = required
    return fields


def _check_own(values: Policy | Limits, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(values, name) != getattr(_USUAL[type(values)], name):
            raise InvalidRequest(
                f"{name}: backend 'cloche' cannot request {getattr(values, name)!r} from a service, which decides this "
                "itself; leave it out"
            )


def fits_call(request: Request) -> bool:
    """Return whether a request's files and input fit into its call, in bytes and number."""
    size = len(request.stdin) + sum(len(file.data) for file in request.files)
    return size <= MOST_SENT and len(request.files) <= MOST_FILES


def fits_fields(files: tuple[InputFile, ...]) -> bool:
    """Return whether files fit into the fields of a call, in bytes and number."""
    return len(files) <= MOST_FILES and sum(len(file.data) for file in files) <= MOST_SENT


def run_fields(request: Request, files: tuple[InputFile, ...], *, has_stdin: bool = True) -> dict[str, Any]:
    """Return the fields of a run with these files, and its input unless that is streamed. Raises InvalidRequest."""
    if request.source_path is not None:
        raise InvalidRequest("source_path: backend 'cloche' cannot say where the code lies; run it as a command")
    if has_stdin and len(request.stdin) > MOST_SENT:
        raise InvalidRequest(
            f"stdin: {len(request.stdin)} bytes are more than {MOST_SENT}, which backend 'cloche' sends"
        )
    fields: dict[str, Any] = {"language": request.language}
    if request.code is not None:
        fields["code"] = request.code
    if request.argv:
        fields["argv"] = list(request.argv)
    if request.stdin and has_stdin:
        fields["stdinBase64"] = base64.b64encode(request.stdin).decode()
    if request.env:
        fields["env"] = dict(request.env)
    if files:
        fields["files"] = [_file_field(file) for file in files]
    if request.timeout_s is not None:
        fields["timeout"] = request.timeout_s
    return fields


def _file_field(file: InputFile) -> dict[str, str]:
    mode = {} if file.mode == MODE else {"mode": mode_field(file.mode)}
    return {"path": file.path, "base64": base64.b64encode(file.data).decode(), **mode}


def mode_field(mode: int) -> str:
    """Return permission bits as the wire writes them. Raises InvalidRequest."""
    if type(mode) is not int or not 0 <= mode <= 0o777:
        raise InvalidRequest(f"mode: {mode!r} is not possible at a service; give permission bits up to 0o777")
    return f"{mode:03o}"


def path_fields(path: str) -> dict[str, str]:
    """Return a path as the wire writes it; a relative one is below /workspace. Raises InvalidRequest."""
    if not path or "\0" in path:
        raise InvalidRequest(f"path: {path!r} is not valid; give text without NUL characters")
    full_path = path if path.startswith("/") else f"/workspace/{path}"
    try:
        encoded = full_path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"path: {path!r} cannot be encoded") from error
    try:
        encoded.decode()
    except UnicodeDecodeError:
        return encoded_path(full_path)
    return {"path": full_path}


def encoded_path(path: str) -> dict[str, str]:
    """Return the field of a path that is not UTF-8."""
    return {"pathBase64": base64.b64encode(path.encode("utf-8", "surrogateescape")).decode()}


MOST_OUTPUT = 64 << 20


def limits_of(reported: Mapping[str, Any], requested: Limits) -> Limits:
    """Return the limits that a service reports, and the requested ones where it reports none, or no valid ones.

    What is held here has bounds of its own: the requested disk, and `MOST_OUTPUT` of a stream if no more is requested.
    """
    names = {field.name: _camel(field.name) for field in fields(Limits)}
    changes = {name: reported[wire] for name, wire in names.items() if type(reported.get(wire)) in (int, float)}
    bounds = {"output_bytes": max(requested.output_bytes, MOST_OUTPUT), "disk_bytes": requested.disk_bytes}
    held = {name: min(changes[name], bound) for name, bound in bounds.items() if name in changes}
    try:
        return requested.with_changes(**{**changes, **held})
    except (InvalidRequest, TypeError, ValueError, OverflowError):
        return requested


def _camel(name: str) -> str:
    first, *further_words = name.split("_")
    return first + "".join(map(str.capitalize, further_words))
