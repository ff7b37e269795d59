"""Files that builds copy: uploaded by an address that has a grant in it, and kept for a while by their hash.

E2B's SDKs send no credentials with the upload. The grant names project, key, template and hash, is signed with the
service's secret, ends after an hour, and is used up when the upload begins. Nothing here reads an archive: it is
unpacked in the sandbox of the build.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import os
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.responses import JSONResponse, Response

from cloche.core.limits import format_size
from cloche.core.loops import finish
from cloche.serving.http import SLOW_BODY
from cloche.wire.callers import Caller

from .build_steps import StepFailed
from .calls import Call, Row
from .errors import E2BError
from .templates import find_own

GRANT_S, KEPT_S = 3_600.0, 24 * 3_600.0
MOST_BYTES, MOST_KEPT_BYTES = 1 << 30, 4 << 30  # of one upload; of all
AT_ONCE, AT_ONCE_OF_KEY = 4, 2
UPLOADS, USED = "uploads", ".used"
IS_HASH = re.compile(r"[0-9a-f]{64}").fullmatch
MOST_GRANT = 1_024


def folder_of(call: Call) -> str:
    """Return the folder of uploads."""
    return os.path.join(call.service.templates.folder, UPLOADS)


def _path(call: Call, project: str, template_id: str, files_hash: str) -> str:
    name = hashlib.sha256(json.dumps([project, template_id, files_hash]).encode()).hexdigest()
    return os.path.join(folder_of(call), f"{name}.tar")


async def uploaded(call: Call, caller: Caller, template_id: str, files_hash: str) -> str:
    """Return the path of uploaded files. Raises StepFailed if there are none."""
    path = _path(call, caller.project, template_id, files_hash)
    try:
        await asyncio.to_thread(os.utime, path)  # it is kept from now on
    except FileNotFoundError:
        raise StepFailed(f"COPY: the files with the hash {files_hash} were not uploaded, or long ago") from None
    return path


async def link(call: Call) -> Response:
    """Tell whether files with a hash were uploaded for a template, and where to upload them."""
    caller = await call.caller()
    template = await find_own(call, caller, call.path["template_id"])
    files_hash = call.path["files_hash"]
    if IS_HASH(files_hash) is None:
        raise E2BError(400, "hash: this is not a SHA-256")
    path = _path(call, caller.project, template.id, files_hash)
    is_present = await asyncio.to_thread(os.path.exists, path)
    grant = {
        "project": caller.project, "key": caller.key_id, "template": template.id, "hash": files_hash,
        "until": time.time() + GRANT_S, "once": os.urandom(12).hex(),
    }  # fmt: skip
    url = f"{str(call.request.base_url).rstrip('/')}/templates/uploads/{_sealed(call, grant)}"
    return JSONResponse({"present": is_present, "url": url, "headers": {}}, 201)


def _sealed(call: Call, grant: dict[str, Any]) -> str:
    text = base64.urlsafe_b64encode(json.dumps(grant, separators=(",", ":")).encode()).decode().rstrip("=")
    return f"{text}.{call.e2b.sign('upload', text)}"


def _opened(call: Call, sealed: str) -> dict[str, Any]:
    """Return a grant that is ours and has time left. Raises E2BError (401)."""
    text, _, signature = sealed.partition(".")
    is_ours = len(sealed) <= MOST_GRANT and hmac.compare_digest(
        signature.encode(), call.e2b.sign("upload", text).encode()
    )
    grant: dict[str, Any] = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))) if is_ours else {}
    if not is_ours or grant["until"] < time.time():
        raise E2BError(401, "this address for an upload is not valid, or no longer; ask for another one")
    return grant


async def upload(call: Call) -> Response:
    """Take an upload: a tar archive, compressed or not. The address is used up when it begins."""
    grant = _opened(call, call.path["grant"])
    length = call.request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length[:20]) > MOST_BYTES:
        raise E2BError(413, f"the upload has more than {format_size(MOST_BYTES)}")
    await asyncio.to_thread(_use_up, folder_of(call), grant["once"])
    call.request.scope[SLOW_BODY] = True
    path = _path(call, grant["project"], grant["template"], grant["hash"])
    beside = f"{path}.{grant['once']}"
    try:
        async with asyncio.timeout(GRANT_S), _turn(call, grant["key"]):
            await _receive(call, beside)
        await asyncio.to_thread(os.rename, beside, path)
    except TimeoutError:
        raise E2BError(408, "the upload took more than an hour") from None
    finally:
        with suppress(FileNotFoundError):
            await asyncio.to_thread(os.unlink, beside)
    return Response(status_code=200)


@asynccontextmanager
async def _turn(call: Call, key: str) -> AsyncIterator[None]:
    """Wait for a turn of the key's own, then for one of all; what they may store together follows from these bounds."""
    own = call.e2b.parts.setdefault(f"uploads of {key}", asyncio.Semaphore(AT_ONCE_OF_KEY))
    async with own, call.e2b.parts.setdefault("uploads", asyncio.Semaphore(AT_ONCE)):
        yield


async def _receive(call: Call, path: str) -> None:
    size = 0
    with await asyncio.to_thread(open, path, "xb") as file:
        async for piece in call.request.stream():
            size += len(piece)
            if size > MOST_BYTES:
                raise E2BError(413, f"the upload has more than {format_size(MOST_BYTES)}")
            await finish(asyncio.to_thread(file.write, piece))


def _use_up(folder: str, once: str) -> None:
    """Note that a grant is used, and make room. Raises E2BError (403, 507). Blocks."""
    os.makedirs(folder, 0o700, exist_ok=True)
    kept = _tidy(folder)
    if kept > MOST_KEPT_BYTES:
        raise E2BError(
            507, f"the uploads for builds have more than {format_size(MOST_KEPT_BYTES)}; they go after a day"
        )
    try:
        os.close(os.open(os.path.join(folder, once + USED), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        raise E2BError(403, "this address for an upload was used already; ask for another one") from None


def _tidy(folder: str) -> int:
    """Remove what is older than a day; return the bytes of the rest."""
    size, before = 0, time.time() - KEPT_S
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):
            state = entry.stat(follow_symlinks=False)
            if state.st_mtime < before:
                os.unlink(entry.path)
            else:
                size += state.st_size
    return size


ROWS = (
    Row(method="GET", path="/templates/{template_id}/files/{files_hash}", handler=link),
    Row(method="PUT", path="/templates/uploads/{grant}", handler=upload),
)
