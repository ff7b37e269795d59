"""What Firecracker 1.16 publishes of its API, as far as it is called: which fields, which must be there, what of.

Written down from the description that it ships (Swagger 2.0), and from what it says in words: a machine has one
processor or an even number of them, and a disk of a file has to say whether it is for reading alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

VERSION = "1.16.1"


@dataclass(frozen=True)
class Field:
    """Describe one field of a call."""

    kind: type
    is_required: bool = False
    least: int | None = None
    most: int | None = None
    choices: tuple[str, ...] = ()


SCHEMA: dict[str, dict[str, Field]] = {
    "/machine-config": {
        "vcpu_count": Field(int, True, least=1, most=32),
        "mem_size_mib": Field(int, True, least=1),
        "smt": Field(bool),
        "cpu_template": Field(str, choices=("C3", "T2", "T2S", "T2CL", "T2A", "V1N1", "None")),
        "track_dirty_pages": Field(bool),
        "huge_pages": Field(str, choices=("None", "2M")),
    },
    "/boot-source": {"kernel_image_path": Field(str, True), "initrd_path": Field(str), "boot_args": Field(str)},
    "/drives/{id}": {
        "drive_id": Field(str, True),
        "is_root_device": Field(bool, True),
        "path_on_host": Field(str, True),  # of a disk that is a file
        "is_read_only": Field(bool, True),  # likewise
        "partuuid": Field(str),
        "cache_type": Field(str, choices=("Unsafe", "Writeback")),
        "io_engine": Field(str, choices=("Sync", "Async")),
        "rate_limiter": Field(dict),
    },
    "/vsock": {"guest_cid": Field(int, True, least=3), "uds_path": Field(str, True), "vsock_id": Field(str)},
    "/actions": {"action_type": Field(str, True, choices=("FlushMetrics", "InstanceStart", "SendCtrlAltDel"))},
}


def fault(path: str, body: Any) -> str:
    """Return what is wrong with a PUT of `body`; empty when nothing is."""
    name = "/drives/{id}" if path.startswith("/drives/") else path
    if name not in SCHEMA:
        return f"Invalid request method and/or path: PUT {path}"
    if not isinstance(body, dict):
        return "the body is not an object"
    fields = SCHEMA[name]
    for key in body:
        if key not in fields:
            return f"unknown field `{key}`"
    for key, field in fields.items():
        if key in body:
            wrong = _wrong(body[key], field)
            if wrong:
                return f"{key}: {wrong}"
        elif field.is_required:
            return f"missing field `{key}`"
    if name == "/machine-config" and body["vcpu_count"] > 1 and body["vcpu_count"] % 2:
        return "vcpu_count: neither one nor even"
    if name == "/drives/{id}" and body["drive_id"] != path.removeprefix("/drives/"):
        return "drive_id: not that of the path"
    return ""


def _wrong(value: Any, field: Field) -> str:
    if type(value) is not field.kind:
        return f"{value!r} is no {field.kind.__name__}"
    if field.choices and value not in field.choices:
        return f"{value!r} is none of {', '.join(field.choices)}"
    if (field.least is not None and value < field.least) or (field.most is not None and value > field.most):
        return f"{value!r} is out of range"
    return ""
