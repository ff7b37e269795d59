"""HTTP/2 that takes almost anything, as some servers do: any header, CONNECT, trailers of a request."""

from __future__ import annotations

from dataclasses import dataclass, field

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, Event, RequestReceived, StreamEnded, TrailersReceived
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes

from .streams import Stream
from .web import Request, Site


@dataclass(slots=True)
class Asked:
    """Hold what came of a request."""

    pseudo: dict[str, str]
    headers: dict[str, str]
    body: bytearray = field(default_factory=bytearray)


class Http2Server:
    """Answer the requests of one connection, each when it is complete."""

    def __init__(self, stream: Stream, site: Site) -> None:
        self._stream, self._site = stream, site
        self._h2 = H2Connection(H2Configuration(
            client_side=False, header_encoding="latin-1", validate_inbound_headers=False,
            validate_outbound_headers=False, normalize_inbound_headers=False,
        ))  # fmt: skip
        self._asked: dict[int, Asked] = {}

    def serve(self) -> None:
        """Serve until the connection ends, or is no HTTP/2."""
        self._h2.initiate_connection()
        self._h2.update_settings({SettingCodes.ENABLE_CONNECT_PROTOCOL: 1})
        self._stream.send(self._h2.data_to_send())
        try:
            while data := self._stream.receive():
                for event in self._h2.receive_data(data):
                    self._take(event)
                self._stream.send(self._h2.data_to_send())
        except ProtocolError:
            return

    def _take(self, event: Event) -> None:
        if isinstance(event, RequestReceived):
            self._note(event.stream_id, [(str(name), str(value)) for name, value in event.headers])
        elif isinstance(event, TrailersReceived):
            self._say([(str(name), str(value)) for name, value in event.headers])
        elif isinstance(event, DataReceived):
            self._asked[event.stream_id].body += event.data
            self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, StreamEnded) and ":protocol" not in self._asked[event.stream_id].pseudo:
            self._answer(event.stream_id, self._asked[event.stream_id])

    def _say(self, rows: list[tuple[str, str]]) -> None:
        """Record headers as HTTP/1 would show them."""
        self._stream.arrival.note(said="".join(f"{name}: {value}\r\n" for name, value in rows).encode("latin-1"))

    def _note(self, stream_id: int, rows: list[tuple[str, str]]) -> None:
        self._say(rows)
        pseudo = {name: value for name, value in rows if name.startswith(":")}
        asked = Asked(pseudo, {name: value for name, value in rows if not name.startswith(":")})
        host = asked.headers.setdefault("host", pseudo.get(":authority", ""))
        self._stream.arrival.requests.append({
            "method": pseudo.get(":method", ""), "target": pseudo.get(":path", ""), "host": host, "version": "HTTP/2",
        })  # fmt: skip
        self._asked[stream_id] = asked
        if ":protocol" in pseudo:  # a web socket: a message that has the headers, and nothing more
            text = "\n".join(f"{name}: {value}" for name, value in asked.headers.items()).encode("latin-1")[:125]
            self._h2.send_headers(stream_id, [(":status", "200")])
            self._h2.send_data(stream_id, bytes([0x81, len(text)]) + text)

    def _answer(self, stream_id: int, asked: Asked) -> None:
        arrival, target = self._stream.arrival, asked.pseudo.get(":path", "/")
        method, body = asked.pseudo.get(":method", "GET"), bytes(asked.body)
        text = " ".join(f"{name}: {value}" for name, value in asked.headers.items())
        if target == "/trailer":
            self._h2.send_headers(stream_id, [(":status", "200")])
            self._h2.send_data(stream_id, b"body")
            self._h2.send_headers(stream_id, [("x-echo", text)], end_stream=True)
            return
        request = Request(method, target, "HTTP/2", asked.headers, body, arrival.address, arrival.port)
        response = self._site(request, None)  # type: ignore[arg-type]  # a web socket of HTTP/1 alone reads on
        if response is None:
            return
        rows = [(name.lower(), value) for name, value in response.headers.items()]
        self._h2.send_headers(stream_id, [(":status", response.status.partition(" ")[0]), *rows])
        content = response.body if isinstance(response.body, bytes) else b"".join(response.body)
        self._h2.send_data(stream_id, content[:16_000], end_stream=True)
