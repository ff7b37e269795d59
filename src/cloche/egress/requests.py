"""Requests to a host whose rules have methods and paths: each is allowed by one of them, or refused. No I/O."""

from __future__ import annotations

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
