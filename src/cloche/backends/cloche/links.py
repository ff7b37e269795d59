"""A coordinator's link to the server of a node: the verbs of role `coordinator`, over the wire; see fleets.engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cloche.core.remote import HiddenText, LeasedPlace, RemoteAccount
from cloche.fleets.engine import EngineNode, KeepAnswer, NodeLink, NodeReport

from .connections import ask, disconnect

SILENCE_S = 3.0
ANSWER_S = 3.0
MOST_TEXT = 256
MOST_JSON = 2 << 20  # bytes of an answer: a node has 1,024 leases, and reports 1,000 digests
MOST_LEASES, MOST_DIGESTS = 10_000, 1_000


class WireLink:
    """Call one node's server. Each call has a fresh credential; all go over one kept connection."""

    def __init__(self, node: EngineNode, credential: Callable[[], HiddenText], *, engine: str = "fleet"):
        self._place = LeasedPlace(engine=engine, node=node.id, lease="", credential=HiddenText())
        self._credential = credential
        self._account = RemoteAccount(
            provider=engine, url=node.address, certificate=node.certificate, place=self._place,
            silence_s=SILENCE_S, most_json=MOST_JSON,
        )  # fmt: skip

    async def _ask(self, verb: str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON
        self._place.credential = self._credential()
        return await ask(self._account, verb, fields, timeout_s=ANSWER_S)

    async def status(self) -> NodeReport:
        """Return what the node reports. Raises ClocheError, OSError."""
        answer = await self._ask("node.status")
        leases, digests, clock = answer.get("leases"), answer.get("digests"), answer.get("clock")
        return NodeReport(
            version=_text(answer, "version"),
            boot=_text(answer, "boot"),
            level=_text(answer, "level"),
            python=_text(answer, "python"),
            is_draining=answer.get("isDraining") is True,
            clock=clock if type(clock) is float else 0.0,
            leases=leases if type(leases) is int and leases >= 0 else 0,
            digests=_texts(digests)[:MOST_DIGESTS],
            digests_tag=_text(answer, "digestsTag"),
        )

    async def keep(self, denied: Sequence[str] | None, ttl_s: float, leases: Mapping[str, float]) -> KeepAnswer:
        """Say that the coordinator lives, which addresses no guest may reach, and the later ends of leases."""
        told = {} if denied is None else {"denied": list(denied)}
        answer = await self._ask("node.keep", ttl=ttl_s, leases=dict(leases), **told)
        return KeepAnswer(digests_tag=_text(answer, "digestsTag"), denied_tag=_text(answer, "deniedTag"))

    async def leases(self) -> Mapping[str, float]:
        """Return the ends of the node's leases by id; what is not a lease is left out."""
        rows = (await self._ask("node.leases")).get("leases")
        if not isinstance(rows, dict) or len(rows) > MOST_LEASES:
            return {}
        return {name: float(ends) for name, ends in rows.items() if type(ends) in (int, float)}

    async def release(self, lease: str, until: float) -> None:
        """End a lease at the node."""
        await self._ask("node.release", lease=lease, until=until)

    async def drain(self, *, undo: bool = False) -> None:
        """Let the node accept no further lease; with `undo` it accepts them again."""
        await self._ask("node.drain", undo=undo)

    async def close(self) -> None:
        """Close the connection, with what the node has not answered."""
        disconnect(self._account)


def link_to(node: EngineNode, credential: Callable[[], HiddenText]) -> NodeLink:
    """Return the link to a node; see fleets.engine.LinkTo."""
    return WireLink(node, credential)


def _text(answer: Mapping[str, Any], name: str) -> str:
    text = answer.get(name)
    return text[:MOST_TEXT] if isinstance(text, str) else ""


def _texts(values: object) -> tuple[str, ...]:
    """Return the short texts of a list, none of what is no list."""
    listed = values if isinstance(values, list) else []
    return tuple(value for value in listed if isinstance(value, str) and len(value) <= MOST_TEXT)
