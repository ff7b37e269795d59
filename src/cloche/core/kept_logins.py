"""Where the tokens of a login are kept: beyond a sandbox, in a file that several sandboxes of a user share."""

from __future__ import annotations

from typing import NoReturn

from .record import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptLogin:
    """Name the file of a login, and the key of 32 bytes that opens it.

    A sandbox that `takes_login` replaces the login by one that is made inside; any other one refreshes it alone.
    """

    path: str
    key: bytes = field(repr=False)
    takes_login: bool = False

    def __reduce__(self) -> NoReturn:
        from .errors import InvalidRequest

        raise InvalidRequest("the key of a login stays in its process: it cannot be pickled or copied")
