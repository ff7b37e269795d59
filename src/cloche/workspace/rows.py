"""A mapping by path in tree order, stored on disk except for a small cache.

The rows are in a temporary SQLite database, whose file has no name and whose cache takes a few MiB of memory, even for
a million changes. Its content is trusted, since no other process can open the file.
"""

from __future__ import annotations

import marshal
import sqlite3
import threading
from collections.abc import Callable, ItemsView, Iterator, MutableMapping, Sequence
from operator import attrgetter, eq
from typing import Any, TypeVar, cast, overload

from ..core.record import fields

T = TypeVar("T")
CACHE_KIB = 8192  # per database; the other pages are in its file
PAGE = 500  # rows per query
_SETTINGS = ("journal_mode = OFF", "synchronous = OFF", "locking_mode = EXCLUSIVE", f"cache_size = -{CACHE_KIB}")


class Rows(MutableMapping[bytes, T]):
    """Map paths to values of one data class with a `path` field, in tree order: folders before their contents.

    Values may be set and removed during iteration. Raises OSError if the disk is full.
    """

    def __init__(self, kind: type[T]) -> None:
        names = [value_field.name for value_field in fields(cast("Any", kind)) if value_field.name != "path"]
        self._kind, self._names, self._values = cast("Callable[..., T]", kind), names, attrgetter(*names)
        self._is_text = cast("Any", kind).__annotations__["path"] == "str"
        self._lock = threading.Lock()
        # An empty name makes a private temporary database in an unlinked file (sqlite.org/inmemorydb.html).
        self._base = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        for setting in _SETTINGS:
            self._base.execute(f"PRAGMA {setting}")
        self._base.execute("CREATE TABLE rows (place BLOB PRIMARY KEY, row BLOB) WITHOUT ROWID")
        self._base.execute("BEGIN")

    def __del__(self) -> None:
        base = getattr(self, "_base", None)  # missing if connect() raised
        if base is not None:
            base.close()

    def _do(self, command: str, *values: object) -> list[Any]:
        try:
            with self._lock:
                return self._base.execute(command, values).fetchall()
        except sqlite3.OperationalError as error:
            raise OSError(f"the changes cannot be stored in a temporary file: {error}") from error

    def _read(self, sort_key: bytes, row: bytes) -> T:
        path = path_at(sort_key)
        values = dict(zip(self._names, marshal.loads(row), strict=True))  # noqa: S302 - written by this process
        shown = path.decode("utf-8", "surrogateescape") if self._is_text else path
        return self._kind(path=shown, **values)

    def __getitem__(self, path: bytes) -> T:
        sort_key = place_of(path)
        rows = self._do("SELECT row FROM rows WHERE place = ?", sort_key)
        if not rows:
            raise KeyError(path)
        return self._read(sort_key, rows[0][0])

    def __setitem__(self, path: bytes, value: T) -> None:
        self._do("INSERT OR REPLACE INTO rows VALUES (?, ?)", place_of(path), marshal.dumps(self._values(value)))

    def __delitem__(self, path: bytes) -> None:
        if path not in self:
            raise KeyError(path)
        self._do("DELETE FROM rows WHERE place = ?", place_of(path))

    def __contains__(self, path: object) -> bool:
        return isinstance(path, bytes) and bool(self._do("SELECT 1 FROM rows WHERE place = ?", place_of(path)))

    def __len__(self) -> int:
        return cast("int", self._do("SELECT COUNT(*) FROM rows")[0][0])

    def __bool__(self) -> bool:
        return bool(self._do("SELECT 1 FROM rows LIMIT 1"))

    def __iter__(self) -> Iterator[bytes]:
        return (path_at(sort_key) for sort_key, _ in self._pages())

    def items(self) -> ItemsView[bytes, T]:
        """Return paths and values, read one page at a time."""
        return _Items(self)

    def read_all(self) -> Iterator[tuple[bytes, T]]:
        """Yield paths and values in tree order."""
        return ((path_at(sort_key), self._read(sort_key, row)) for sort_key, row in self._pages())

    def read_page(self, before: bytes) -> list[T]:
        """Return up to PAGE values after a path; an empty path means the first ones."""
        return [self._read(sort_key, row) for sort_key, row in self._after(place_of(before))]

    def _pages(self) -> Iterator[tuple[bytes, bytes]]:
        page = self._after(b"")
        while page:
            yield from page
            page = self._after(page[-1][0]) if len(page) == PAGE else []

    def _after(self, sort_key: bytes) -> list[tuple[bytes, bytes]]:
        return self._do("SELECT place, row FROM rows WHERE place > ? ORDER BY place LIMIT ?", sort_key, PAGE)


class _Items(ItemsView[bytes, T]):
    def __init__(self, rows: Rows[T]) -> None:
        super().__init__(rows)
        self._rows = rows

    def __iter__(self) -> Iterator[tuple[bytes, T]]:
        return self._rows.read_all()


class StoredValues(Sequence[T]):
    """The values of finished Rows as a sequence in tree order, read from disk on access."""

    def __init__(self, rows: Rows[T]) -> None:
        self._rows, self._length = rows, len(rows)
        self._starts: list[bytes] | None = None  # the last path before each page
        self._page: tuple[int, list[T]] = (-1, [])

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[T]:
        return (value for _, value in self._rows.read_all())

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return tuple(self[position] for position in range(*index.indices(self._length)))
        absolute_index = range(self._length)[index]
        number, page = self._page
        if number != absolute_index // PAGE:
            number = absolute_index // PAGE
            page = self._rows.read_page(self._before(number))
            self._page = number, page
        return page[absolute_index % PAGE]

    def _before(self, page: int) -> bytes:
        if self._starts is None:
            self._starts = [b"", *(path for number, path in enumerate(self._rows, 1) if number % PAGE == 0)]
        return self._starts[page]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(other) == self._length and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)

    def __repr__(self) -> str:
        return f"<{self._length} values in a temporary file>"


def place_of(path: bytes) -> bytes:
    """Return a path's sort key: names compare one by one, since no name contains a NUL."""
    return path.replace(b"/", b"\0")


def path_at(sort_key: bytes) -> bytes:
    """Return the path of a sort key."""
    return sort_key.replace(b"\0", b"/")
