"""Sandboxes with a name, which outlive their caller: the process that keeps one, how it is found, how one gets in.

In: an open sandbox (the socket to its init, and the descriptors without which it ends) and its name, from a caller who
then has none of them. Out: a unix socket in a folder that is the user's alone, where clients speak the wire of
`cloche.init.wire`; a lock and a file with what results say of the sandbox, beside it.
`process` is the keeper: a fresh interpreter from the archive of helpers that holds the descriptors, its limits and its
end; `relay` is its loop, between one init and many clients; `plain_json` is JSON for all who must start soon.
`registry` has the folder with names, locks and sockets, for callers; `attach` starts a keeper, connects to one, and
asks it something without an event loop.

To be kept: `process` and `relay` import nothing but these three, small parts of the standard library, and the codec of
the wire (by `load`), for two hundred keepers may live at once; `registry` and `attach` are no part of the archive. A
keeper opens no file by its path: it has descriptors. With its end, however it comes about, the helper's socket and
init's are closed, and everything ends.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

load: Any = None  # in a keeper, returns a module of another package of ours by its name
