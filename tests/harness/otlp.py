"""A receiver of OpenTelemetry's protocol over HTTP, on loopback: it keeps what it was sent, decoded and as bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

PATIENCE_S = 30


class Receiver:
    """Hold what came: spans, names of measurements, the resources' attributes, and all bodies."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.metrics: set[str] = set()
        self.services: set[str] = set()
        self.bodies: list[bytes] = []
        self._changed = threading.Condition()

    def take(self, path: str, body: bytes) -> None:
        """Take one request."""
        with self._changed:
            self.bodies.append(body)
            if path == "/v1/traces":
                for traces in ExportTraceServiceRequest.FromString(body).resource_spans:
                    self.services |= {
                        one.value.string_value for one in traces.resource.attributes if one.key == "service.name"
                    }
                    self.spans += [span for scope in traces.scope_spans for span in scope.spans]
            elif path == "/v1/metrics":
                for measured in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                    self.metrics |= {metric.name for scope in measured.scope_metrics for metric in scope.metrics}
            self._changed.notify_all()

    def of_trace(self, trace_id: bytes) -> dict[str, Span]:
        """Return the spans of a trace by name."""
        return {span.name: span for span in self.spans if span.trace_id == trace_id}

    def wait(self, is_there: Callable[[], bool]) -> None:
        """Wait until something came."""
        ends = time.monotonic() + PATIENCE_S
        with self._changed:
            while not is_there():
                assert self._changed.wait(ends - time.monotonic()), [span.name for span in self.spans]


@contextmanager
def receiving() -> Iterator[tuple[Receiver, str]]:
    """Receive, and give the address."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            receiver.take(self.path, self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the library's
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield receiver, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
