"""Usage of an account: durable counters in one SQLite file, shared by all processes of a user.

Theory of operation: expected usage is reserved in one transaction, which also checks the limits, and is corrected to
the actual usage at the end. If the process dies in between, the reservation stays, so the counters err on the safe
side. A day is a UTC day. Each open sandbox is a row, deleted when the sandbox ends or when its lifetime at the provider
is over. Calls block briefly: an event loop must make them in a thread.
"""

from __future__ import annotations

import logging
import math
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta

from cloche.core.errors import BackendUnavailable
from cloche.core.record import dataclass
from cloche.core.remote import RemoteAccount
from cloche.core.suppressed import suppress_logged

log = logging.getLogger("cloche.remote")
BUSY_S = 10.0
KEPT_DAYS = 40
MOST_AMOUNT = 1e12
_SCHEMA = """
CREATE TABLE IF NOT EXISTS used (
    account TEXT NOT NULL, day TEXT NOT NULL, runs INTEGER NOT NULL DEFAULT 0, seconds REAL NOT NULL DEFAULT 0,
    sandboxes INTEGER NOT NULL DEFAULT 0, money REAL NOT NULL DEFAULT 0, PRIMARY KEY (account, day));
CREATE TABLE IF NOT EXISTS living (
    id INTEGER PRIMARY KEY, account TEXT NOT NULL, sandbox TEXT NOT NULL DEFAULT '', ends REAL NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class RunTicket:
    """Usage reserved for one run."""

    counter: Counter
    day: str
    seconds: float

    def settle(self, seconds: float, cost: object = None) -> None:
        """Replace the reservation by the actual seconds and cost (in the provider's currency).

        On failure the reservation stays.
        """
        with _log_uncounted("the time of a run stays counted as it was reserved"):
            self.counter.add(self.day, seconds=amount(seconds) - self.seconds, money=amount(cost))

    def refund(self) -> None:
        """Remove the reservation, because nothing ran."""
        with _log_uncounted("a run that never began stays counted"):
            self.counter.add(self.day, runs=-1, seconds=-self.seconds)


@dataclass(slots=True)
class SandboxTicket:
    """Row of one open sandbox."""

    counter: Counter
    day: str
    row: int

    def note_id(self, sandbox: str) -> None:
        """Store the provider's id of the sandbox."""
        with _log_uncounted("the name of a sandbox could not be kept"):
            self.counter.note_sandbox(self.row, sandbox)

    def close(self, cost: object = None) -> None:
        """Delete the row. The sandbox still counts for its day."""
        with _log_uncounted("the place of a sandbox stays counted"):
            self.counter.end_sandbox(self.row)
            self.counter.add(self.day, money=amount(cost))

    def refund(self) -> None:
        """Delete the row and do not count the sandbox, because none was created."""
        with _log_uncounted("a sandbox that was not made stays counted"):
            self.counter.end_sandbox(self.row)
            self.counter.add(self.day, sandboxes=-1)


def amount(value: object) -> float:
    """Return an amount that a provider reported, or 0 if it is not a valid amount."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    return float(value) if 0 <= value <= MOST_AMOUNT and math.isfinite(value) else 0.0


def _log_uncounted(action: str) -> AbstractContextManager[None]:
    """Log a failure to count and continue: the run has already happened, and its result must not be lost."""
    return suppress_logged(log, action, BackendUnavailable)


class Counter:
    """Count the usage of one account. `now` returns seconds since the epoch."""

    def __init__(self, account: RemoteAccount, now: Callable[[], float] = time.time):
        self._account, self._now = account, now

    def begin_run(self, seconds: float) -> RunTicket:
        """Reserve a run of at most `seconds`.

        Raises BackendUnavailable if a limit is reached; the message says what remains.
        """
        quota, day = self._account.quota, self._today()
        with self._open() as database:
            used = self._used(database, day)
            self._check("runs", used["runs"], 1, quota.runs_per_day)
            self._check("seconds", used["seconds"], seconds, quota.seconds_per_day)
            self._check("money", used["money"], 0, quota.money_per_day)
            self._add(database, day, runs=1, seconds=seconds)
        return RunTicket(self, day, seconds)

    def open_sandbox(self, lifetime_s: float) -> SandboxTicket:
        """Reserve a sandbox that the provider ends after `lifetime_s`.

        Raises BackendUnavailable if a limit is reached.
        """
        quota, day = self._account.quota, self._today()
        with self._open() as database:
            database.execute("DELETE FROM living WHERE ends < ?", (self._now(),))
            used = self._used(database, day)
            self._check("sandboxes", used["sandboxes"], 1, quota.sandboxes_per_day)
            self._check("money", used["money"], 0, quota.money_per_day)
            living = database.execute("SELECT count(*) FROM living WHERE account = ?", (self._account.id,)).fetchone()
            if quota.sandboxes_at_once is not None and living[0] >= quota.sandboxes_at_once:
                raise self._refused(
                    f"{living[0]} of {quota.sandboxes_at_once} sandboxes at once are open",
                    'Close one; "cloche gc" ends what dead processes left.',
                )
            self._add(database, day, sandboxes=1)
            added = database.execute(
                "INSERT INTO living (account, ends) VALUES (?, ?)", (self._account.id, self._now() + lifetime_s)
            )
            return SandboxTicket(self, day, int(added.lastrowid or 0))

    def forget_sandbox(self, sandbox: str) -> None:
        """Delete the row of a sandbox, by the provider's id."""
        with self._open() as database:
            database.execute("DELETE FROM living WHERE account = ? AND sandbox = ?", (self._account.id, sandbox))

    def note_sandbox(self, row: int, sandbox: str) -> None:
        """Store the provider's id of a sandbox."""
        with self._open() as database:
            database.execute("UPDATE living SET sandbox = ? WHERE id = ?", (sandbox, row))

    def end_sandbox(self, row: int) -> None:
        """Delete the row of a sandbox."""
        with self._open() as database:
            database.execute("DELETE FROM living WHERE id = ?", (row,))

    def add(self, day: str, **amounts: float) -> None:
        """Add to a day's usage. No counter goes below 0."""
        with self._open() as database:
            self._add(database, day, **amounts)

    def used_today(self) -> dict[str, float]:
        """Return today's runs, seconds, sandboxes and money."""
        with self._open() as database:
            return self._used(database, self._today())

    def _add(self, database: sqlite3.Connection, day: str, **amounts: float) -> None:
        database.execute("INSERT OR IGNORE INTO used (account, day) VALUES (?, ?)", (self._account.id, day))
        for name, amount in amounts.items():
            change = f"UPDATE used SET {name} = max(0, {name} + ?) WHERE account = ? AND day = ?"  # noqa: S608 - ours
            database.execute(change, (amount, self._account.id, day))

    def _used(self, database: sqlite3.Connection, day: str) -> dict[str, float]:
        names = ("runs", "seconds", "sandboxes", "money")
        row = database.execute(
            "SELECT runs, seconds, sandboxes, money FROM used WHERE account = ? AND day = ?", (self._account.id, day)
        ).fetchone()
        return dict(zip(names, row or (0, 0.0, 0, 0.0), strict=True))

    def _check(self, name: str, used: float, more: float, limit: float | None) -> None:
        if limit is None or (used + more <= limit and used < limit):
            return
        remaining = max(0.0, limit - used)
        raise self._refused(
            f"{used:g} of {limit:g} {name} for today are used, {remaining:g} are left, and {more:g} are needed",
            f"It resets at {_next_day(self._now())} UTC; or raise {self._account.provider}.{name}_per_day.",
        )

    def _refused(self, reason: str, remedy: str) -> BackendUnavailable:
        account_name = f"backend {self._account.provider!r} (account {self._account.id})"
        return BackendUnavailable(f"{account_name}: {reason}.", remedy=remedy)

    def _today(self) -> str:
        return datetime.fromtimestamp(self._now(), UTC).strftime("%Y-%m-%d")

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Open a transaction that holds the file's lock. It is committed unless the body raises."""
        file = self._account.quota_file or ":memory:"
        database: sqlite3.Connection | None = None
        try:
            if self._account.quota_file:
                os.makedirs(os.path.dirname(file), mode=0o700, exist_ok=True)
                os.close(os.open(file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
            database = sqlite3.connect(file, timeout=BUSY_S, isolation_level=None)
            database.executescript(_SCHEMA)
            database.execute("BEGIN IMMEDIATE")
            oldest = datetime.fromtimestamp(self._now(), UTC) - timedelta(days=KEPT_DAYS)
            database.execute("DELETE FROM used WHERE day < ?", (oldest.strftime("%Y-%m-%d"),))
            yield database
            database.execute("COMMIT")
        except (OSError, sqlite3.Error) as error:
            raise self._refused(
                f"the use of the account cannot be counted in {file} ({error})",
                "Nothing runs there without the counter: free disk space, or move the damaged file away.",
            ) from error
        finally:
            if database is not None:
                database.close()


def counter_for(account: RemoteAccount) -> Counter | None:
    """Return the counter of an account, or None if no quota is configured.

    Raises BackendUnavailable if a quota is configured and there is no file for its counters.
    """
    if account.quota == type(account.quota)():
        return None
    if account.quota_file is None:
        raise BackendUnavailable(
            f"backend {account.provider!r}: a quota is configured, but this user has no home folder for its counter.",
            remedy="Set XDG_STATE_HOME to a folder that stays, or leave the quota out.",
        )
    return Counter(account)


def _next_day(now: float) -> str:
    return (datetime.fromtimestamp(now, UTC) + timedelta(days=1)).strftime("%Y-%m-%d 00:00")
