"""One sentence and one remedy for each way a provider can fail before any code ran there."""

from __future__ import annotations

import enum
import math
import re

from cloche.core.errors import BackendUnavailable
from cloche.core.remote import RemoteAccount

MOST_DETAIL = 300  # characters of a provider's message
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+")


class Failure(enum.Enum):
    """Kinds of failure, each with a sentence and a remedy."""

    UNAUTHORIZED = ("it does not accept the key", "Check that the key is whole, not revoked, and of this provider.")
    FORBIDDEN = ("the key may not do this", "Use a key with the rights for it, or ask its owner.")
    RATE_LIMITED = ("it received too many requests", "Wait, then try again.")
    QUOTA = ("the account's own quota is used up", "Wait until it resets, end sandboxes, or raise it at the provider.")
    REGION = ("the region has no capacity", "Configure another region, or leave it out.")
    NO_NETWORK = ("it cannot be reached", "Check the address, the network of this host and its name server.")
    TLS = ("its certificate cannot be verified", "Check the address, the clock, and ca_file or certificate.")
    BAD_ANSWER = ("its answer does not follow the protocol", "Check the address; a proxy may have answered.")
    SERVER = ("it failed", "Try again later, and see the provider's status page.")
    NOT_FOUND = ("it does not know this object", "It may have ended; open another sandbox. Check template and address.")
    TIMEOUT = ("it did not answer in time", "Try again later.")

    def __init__(self, sentence: str, remedy: str):
        self.sentence, self.remedy = sentence, remedy


_BY_STATUS = {
    401: Failure.UNAUTHORIZED, 402: Failure.QUOTA, 403: Failure.FORBIDDEN, 404: Failure.NOT_FOUND, 408: Failure.TIMEOUT,
    429: Failure.RATE_LIMITED, 504: Failure.TIMEOUT,
}  # fmt: skip


class RemoteUnavailable(BackendUnavailable):
    """Raised when a provider fails.

    `failure` is the kind; `retry_after_s` is the provider's requested delay, if it sent one.
    """

    def __init__(self, reason: str, *, remedy: str, failure: Failure, retry_after_s: float | None = None):
        super().__init__(reason, remedy=remedy)
        self.failure, self.retry_after_s = failure, retry_after_s


def by_status(status: int) -> Failure:
    """Return the failure that an HTTP status of 400 or above stands for."""
    return _BY_STATUS.get(status, Failure.SERVER if status >= 500 else Failure.BAD_ANSWER)


def remote_error(
    provider: str,
    failure: Failure,
    *,
    detail: str = "",
    status: int | None = None,
    retry_after_s: float | None = None,
    account: RemoteAccount | None = None,
) -> RemoteUnavailable:
    """Return the error. At most one line of `detail`, the provider's own message, is repeated in it."""
    suffix = f" ({status})" if status is not None else ""
    where = f" at {account.host}" if account is not None and account.host else ""
    detail = scrub(detail, account)
    reason = f"backend {provider!r}: {failure.sentence}{suffix}{where}{f': {detail}' if detail else ''}."
    remedy = failure.remedy
    if retry_after_s is not None and math.isfinite(retry_after_s) and retry_after_s >= 0:
        remedy = f"It asks to wait for {retry_after_s:g} s. {remedy}"
    else:
        retry_after_s = None
    return RemoteUnavailable(reason, remedy=remedy, failure=failure, retry_after_s=retry_after_s)


def _keys(account: RemoteAccount | None) -> tuple[str, ...]:
    if account is None:
        return ()
    lease = "" if account.place is None else account.place.credential.reveal()
    return account.api_key.reveal(), lease, lease.rpartition(".")[2]


def scrub(text: str, account: RemoteAccount | None = None) -> str:
    """Return one bounded line of the provider's message, without control characters and without the account's keys."""
    line = _CONTROL.sub(" ", text[: MOST_DETAIL * 4]).strip().rstrip(".")
    for key in _keys(account):
        if len(key) < 4:  # no secret, and replacing it would garble the text
            continue
        line = line.replace(key, "(hidden)")
        for size in (len(key) // 2, 12):  # also a truncated key
            if size >= 8:
                line = line.replace(key[:size], "(hidden)")
    return line if len(line) <= MOST_DETAIL else f"{line[: MOST_DETAIL - 1]}…"
