"""OpenTelemetry of the service: an SDK that exports spans and metrics to the endpoint in the OTEL_* variables.

The spans are defined in `audit/telemetry.py`. Without those variables nothing is imported or traced. A process started
by `opentelemetry-instrument` keeps the SDK that it has. Needs the extra `otel`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from importlib import util
from typing import TYPE_CHECKING

from cloche.core.errors import InvalidRequest
from cloche.core.escape import escape_name

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

END_S = 5.0  # unsent data is lost afterwards
_SIGNALS = ("TRACES", "METRICS")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_PROTOCOL", *(f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL" for signal in _SIGNALS))
_PROTOCOL = "http/protobuf"
_PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def configure_telemetry() -> Callable[[], None]:
    """Set up an SDK if the environment asks for one; return a function that shuts it down. Raises InvalidRequest."""
    signals = [signal for signal in _SIGNALS if _is_wanted(signal)]
    if not signals:
        return lambda: None
    _check(signals)
    from opentelemetry.sdk.resources import Resource

    resource = Resource.create({"service.name": "cloche"} if "OTEL_SERVICE_NAME" not in os.environ else {})
    ends = [end for signal in signals if (end := _START[signal](resource)) is not None]
    return lambda: _end(ends)


def _is_wanted(signal: str) -> bool:
    """Tell whether a signal, traces or metrics, has an exporter."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    exporter = os.environ.get(f"OTEL_{signal}_EXPORTER", "")
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
    return exporter not in ("", "none") or (not exporter and any(os.environ.get(name) for name in names))


def _check(signals: list[str]) -> None:
    missing = [name for name in _PACKAGES if not _is_installed(name)]
    if missing:
        raise InvalidRequest(f"OTEL_* asks for telemetry, and {missing[0]} is missing; pip install 'cloche[otel]'")
    allowed = {f"OTEL_{signal}_EXPORTER": "otlp" for signal in signals} | dict.fromkeys(_PROTOCOLS, _PROTOCOL)
    for name, supported in allowed.items():
        configured = os.environ.get(name) or supported
        if configured != supported:
            raise InvalidRequest(
                f"{name}={escape_name(configured)}: the service supports {supported} only; use that, or start it by "
                "opentelemetry-instrument, whose SDK it then uses"
            )


def _is_installed(name: str) -> bool:
    try:
        return util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def _start_traces(resource: Resource) -> Callable[[], None] | None:
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from cloche.audit.telemetry import is_provided

    if is_provided(trace.get_tracer_provider()):
        return None
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return provider.shutdown


def _start_metrics(resource: Resource) -> Callable[[], None] | None:
    from opentelemetry import metrics
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    from cloche.audit.telemetry import is_provided

    if is_provided(metrics.get_meter_provider()):
        return None
    reader = PeriodicExportingMetricReader(OTLPMetricExporter())
    provider = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
    metrics.set_meter_provider(provider)
    return provider.shutdown


_START = {"TRACES": _start_traces, "METRICS": _start_metrics}


def _end(ends: list[Callable[[], None]]) -> None:
    """Export the remaining data for at most `END_S`, so that an unresponsive receiver does not delay the exit."""
    threads = [threading.Thread(target=end, name="cloche-telemetry", daemon=True) for end in ends]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + END_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
