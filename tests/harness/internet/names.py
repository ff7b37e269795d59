"""A name server: answers from a table that a test sets, and remembers every question.

A name of the table has turns: the first question of a type gets the first turn's addresses, the next one the next
turn's, and the last turn stays. `*.name` answers for whatever is below that name and not in the table.
"""

from __future__ import annotations

import struct
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from .record import Arrival, Record

A, CNAME, TXT, AAAA, OPT, AXFR, ANY = 1, 5, 16, 28, 41, 252, 255
TYPES = {A: "A", CNAME: "CNAME", TXT: "TXT", AAAA: "AAAA", AXFR: "AXFR", ANY: "ANY", 12: "PTR", 65: "HTTPS", 33: "SRV"}
TTL_S = 0
NXDOMAIN = 3
Table = Mapping[str, Sequence[Sequence[str]]]


@dataclass(frozen=True, slots=True)
class Question:
    """What a query asks, and its bytes up to the question's end."""

    name: str
    kind: int
    asked: bytes


class Names:
    """Answer from a table."""

    def __init__(self) -> None:
        self.record = Record()
        self._table: Table = {}
        self._asked: Counter[tuple[str, int]] = Counter()
        self._lock = threading.Lock()

    def set(self, table: Table) -> None:
        """Know these names from now on."""
        with self._lock:
            self._table = {**self._table, **table}
        self.forget()

    def forget(self) -> None:
        """Begin a new record, and have all names at their first turns."""
        self.record.forget()
        with self._lock:
            self._asked.clear()

    def address_of(self, name: str) -> str | None:
        """Return the first address of a name, as who is asked in its own house."""
        found = self._turn(Question(name, A, b"")) or [name]
        return next((one for one in found if one[:1].isdigit()), None)

    def reply(self, query: bytes, arrival: Arrival) -> bytes:
        """Answer a query that came to an address."""
        question = read_question(query)
        kind = TYPES.get(question.kind, str(question.kind))
        noted = Arrival(f"dns/{arrival.protocol}", arrival.address, arrival.port, peer=arrival.peer)
        noted.requests.append({"name": question.name, "type": kind})
        noted.note(query, question.name.encode())
        self.record.add(noted)
        turn = self._turn(question)
        if turn is None:
            return _header(query, NXDOMAIN, 0) + question.asked[12:]
        fitting = [answer for one in turn for answer in self._records(question, one)]
        return _header(query, 0, len(fitting)) + question.asked[12:] + b"".join(fitting)

    def _records(self, question: Question, answer: str, owner: bytes = b"\xc0\x0c") -> Iterator[bytes]:
        """Yield what answers: an address, a text, or another name (`=name`) and what answers for that."""
        if not answer.startswith("="):
            yield from _record(owner, question.kind, answer)
            return
        other = answer[1:]
        yield _packed(owner, CNAME, _as_labels(other))
        for one in self._turn(Question(other, question.kind, b"")) or ():
            yield from self._records(question, one, _as_labels(other))

    def _turn(self, question: Question) -> Sequence[str] | None:
        name = question.name.lower()
        with self._lock:
            found = self._table.get(name)
            above = name
            while found is None and "." in above:
                above = above.partition(".")[2]
                found = self._table.get(f"*.{above}")
            if found is None:
                return None
            number = self._asked[name, question.kind]
            self._asked[name, question.kind] += 1
            return found[min(number, len(found) - 1)]


def read_question(query: bytes) -> Question:
    """Return the one question of a query."""
    if len(query) < 12 or struct.unpack_from("!H", query, 4)[0] != 1:
        raise ValueError("not exactly one question")
    labels, at = [], 12
    while size := query[at]:
        labels.append(query[at + 1 : at + 1 + size].decode("latin-1"))
        at += 1 + size
    return Question(".".join(labels), struct.unpack_from("!H", query, at + 1)[0], query[: at + 5])


def _header(query: bytes, code: int, answers: int) -> bytes:
    flags = 0x8580 | (query[2] & 1) << 8 | code
    return query[:2] + struct.pack("!HHHHH", flags, 1, answers, 0, 0)


def _as_labels(name: str) -> bytes:
    return b"".join(bytes([len(label)]) + label.encode("latin-1") for label in name.split(".")) + b"\0"


def _packed(owner: bytes, kind: int, data: bytes) -> bytes:
    return owner + struct.pack("!HHIH", kind, 1, TTL_S, len(data)) + data


def _record(owner: bytes, asked: int, answer: str) -> Iterator[bytes]:
    """Yield the record of an address or a text, where that is what was asked for."""
    is_any = asked in (ANY, AXFR)
    try:
        packed = ip_address(answer).packed
    except ValueError:
        if is_any or asked == TXT:
            yield _packed(owner, TXT, bytes([len(answer)]) + answer.encode())
        return
    kind = A if len(packed) == 4 else AAAA
    if is_any or asked == kind:
        yield _packed(owner, kind, packed)
