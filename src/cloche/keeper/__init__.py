"""Sandboxes with a name, which outlive their caller: the process that keeps one, its registry, and attaching to it.

Input: an open sandbox (the socket to its init, and the descriptors that keep it alive) and its name, from a caller that
gives them away. Output: a Unix socket in a private folder, at which clients speak the wire of `cloche.init.wire`;
beside it a lock, and a file that describes the sandbox.

`process` is the keeper: a fresh interpreter from the archive of helpers, with the descriptors, time limits and end of
the sandbox. `life` counts its time. `relay` is its loop between one init and many clients. `plain_json` is JSON for
processes that must start fast. `registry` manages the folder of names, locks and sockets for callers. `attach` starts a
keeper, connects to one, and queries it without an event loop.

Constraints: `process` and `relay` import only these four modules, small parts of the standard library, and the wire's
codec (by `load`), since two hundred keepers may run at once. `registry` and `attach` are not in the archive. A keeper
opens no file by path, only by descriptors. When it ends for any reason, its sockets to the helper and init are closed,
and the whole sandbox ends.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

load: Any = None  # in a keeper, returns a module of another package of ours by its name
