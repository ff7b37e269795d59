"""Requests to a host whose rules have methods and paths, or that get headers. No I/O."""

from __future__ import annotations

from cloche.core.errors import InvalidRequest
from cloche.core.host_headers import Headers
from cloche.core.network import NetworkRules
from cloche.core.record import replace
from cloche.core.request_rules import RequestRefused, check_request

from .http_request import Rejected, RequestHead

NO_AUTHORITY = (
    "rules with methods and paths need a certificate authority of the sandbox, which this one was opened without; open "
    "one with such a rule or a secret"
)
NO_HEADERS = (
    "these need a certificate authority of the sandbox, which this one was opened without; open one with secrets, "
    "which may be an empty mapping"
)


def check_authority(rules: NetworkRules, *, is_there: bool) -> None:
    """Raise InvalidRequest for rules that need an authority, in a sandbox without one."""
    if rules.headers and not is_there:
        raise InvalidRequest(f"headers: {NO_HEADERS}")
    if rules.limited and not is_there:
        raise InvalidRequest(f"network_allow: {NO_AUTHORITY}")


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
