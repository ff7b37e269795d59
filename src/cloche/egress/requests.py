"""Requests to a host whose rules have methods and paths, or that get headers. No I/O."""

from __future__ import annotations

from cloche.core.host_headers import Headers
from cloche.core.network import NetworkRules
from cloche.core.record import replace
from cloche.core.request_rules import RequestRefused, check_request

from .http_request import Rejected, RequestHead


def checked_request(head: RequestHead, rules: NetworkRules, host: str, port: int) -> RequestHead:
    """Return a request's head, with its path in the form that was compared. Raises Rejected."""
    rule = rules.decide(host, port).rule
    if rule is None or not rule.requests:
        return head
    try:
        target = check_request(head.method.decode("ascii"), head.target, head.headers, rule.requests, host)
    except RequestRefused as refused:
        raise Rejected(403, refused.what, refused.why) from None
    return replace(head, target=target)


def with_headers(head: RequestHead, headers: Headers) -> RequestHead:
    """Return a request's head with these headers, in place of those of the same names."""
    if not headers:
        return head
    names = {name.lower() for name, _ in headers}
    return replace(head, headers=[*(pair for pair in head.headers if pair[0].lower() not in names), *headers])
