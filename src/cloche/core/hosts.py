"""What names a host: the address that a text means, the kind of an address, the one spelling of a name. Pure."""

from __future__ import annotations

import re
import unicodedata
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network
from typing import TypeAlias

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network

MOST_HOST_CHARACTERS = 253

# Kinds that no rule can allow. The others are not public either, but a rule can say that a name may resolve to them.
NEVER_OPENED = frozenset({"unspecified", "loopback", "link-local", "metadata", "multicast", "broadcast", "translated"})

# The first row that contains an address says its kind. Sources: "IANA IPv4 Special-Purpose Address Registry" and "IANA
# IPv6 Special-Purpose Address Registry" (RFC 6890 and its updates), "IPv4 Address Space Registry" for 224/4 and 240/4,
# "Internet Protocol Version 6 Address Space" for what is outside of 2000::/3. Stricter than these: the anycast services
# in 192.0.0.0/24 and 2001::/23 are globally reachable by the registry, but answer from the local network. Metadata
# services stand first: they are where the documents of the cloud providers put them, partly in public ranges.
_KINDS: tuple[tuple[str, str], ...] = (
    ("169.254.169.254/32", "metadata"),  # AWS, Azure, Google Cloud, Oracle, OpenStack and most others
    ("169.254.170.2/32", "metadata"),  # AWS: credentials of container tasks
    ("169.254.170.23/32", "metadata"),  # AWS: identity of Kubernetes pods
    ("100.100.100.200/32", "metadata"),  # Alibaba Cloud
    ("168.63.129.16/32", "metadata"),  # Azure: the host's agent
    ("192.0.0.192/32", "metadata"),  # Oracle Cloud, former
    ("0.0.0.0/8", "unspecified"),
    ("10.0.0.0/8", "private"),
    ("100.64.0.0/10", "carrier-grade NAT"),
    ("127.0.0.0/8", "loopback"),
    ("169.254.0.0/16", "link-local"),
    ("172.16.0.0/12", "private"),
    ("192.0.0.0/24", "reserved"),
    ("192.0.2.0/24", "documentation"),
    ("192.88.99.0/24", "reserved"),
    ("192.168.0.0/16", "private"),
    ("198.18.0.0/15", "benchmarking"),
    ("198.51.100.0/24", "documentation"),
    ("203.0.113.0/24", "documentation"),
    ("224.0.0.0/4", "multicast"),
    ("255.255.255.255/32", "broadcast"),
    ("240.0.0.0/4", "reserved"),
    ("0.0.0.0/0", "public"),
    ("fd00:ec2::/32", "metadata"),  # AWS: metadata, time, names
    ("fd20:ce::254/128", "metadata"),  # Google Cloud
    ("fd00:c1::a9fe:a9fe/128", "metadata"),  # Oracle Cloud
    ("fd00:42::42/128", "metadata"),  # Scaleway
    ("::/128", "unspecified"),
    ("::1/128", "loopback"),
    ("64:ff9b:1::/48", "translated"),  # local-use NAT64 whose layout only the place knows
    ("fc00::/7", "private"),
    ("fe80::/10", "link-local"),
    ("fec0::/10", "private"),
    ("ff00::/8", "multicast"),
    ("2001:db8::/32", "documentation"),
    ("2001::/23", "reserved"),
    ("3fff::/20", "documentation"),
    ("2000::/3", "public"),
    ("::/0", "reserved"),
)
_ROWS: tuple[tuple[Network, str], ...] = tuple((ip_network(text), kind) for text, kind in _KINDS)

# IPv6 networks whose addresses mean an IPv4 address: where its 32 bits are, counted from the right, and what they are
# combined with (Teredo inverts them). Of the local-use NAT64 prefix only one layout is known: the rest has a kind.
_EMBEDDED: tuple[tuple[IPv6Network, int, int], ...] = (
    (IPv6Network("::ffff:0:0/96"), 0, 0),  # IPv4-mapped
    (IPv6Network("::ffff:0:0:0/96"), 0, 0),  # IPv4-translated (SIIT)
    (IPv6Network("::/96"), 0, 0),  # IPv4-compatible
    (IPv6Network("64:ff9b::/96"), 0, 0),  # NAT64
    (IPv6Network("64:ff9b:1::/96"), 0, 0),  # NAT64, local use
    (IPv6Network("2002::/16"), 80, 0),  # 6to4
    (IPv6Network("2001::/32"), 0, 0xFFFFFFFF),  # Teredo: the client's
)

_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER_LABEL = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PART = re.compile(r"0[xX][0-9a-fA-F]+|[0-9]+")
# IDNA 2003, which the standard library has, turns these into something else or nothing; IDNA 2008 keeps them.
DEVIATIONS = frozenset("\u00df\u03c2\u200c\u200d")
_OTHER_DOTS = frozenset("\u3002\uff0e\uff61")


# --- addresses ----------------------------------------------------------------------------------------------------


def parse_address(text: str) -> Address | None:
    """Return the address that `text` means, in any spelling that a C library takes; None for other text.

    Parts may be decimal, octal (`0177`) or hexadecimal (`0x7f`), and up to three may be missing (`127.1`). IPv6 may
    have brackets and a zone, which is dropped; a form that means an IPv4 address is returned as IPv4.
    """
    inner = text[1:-1] if text[:1] == "[" and text[-1:] == "]" else text
    if ":" in inner:
        try:
            return meant_address(IPv6Address(inner.partition("%")[0]))
        except ValueError:
            return None
    return _parse_ipv4(text.removesuffix("."))


def _parse_ipv4(text: str) -> IPv4Address | None:
    """Read what `inet_aton` reads."""
    fields = text.split(".") if len(text) <= 128 else []
    if not 1 <= len(fields) <= 4 or not all(map(_PART.fullmatch, fields)):
        return None
    try:
        numbers = [_parse_number(text_field) for text_field in fields]
    except ValueError:  # an 8 or 9 in an octal number
        return None
    *leading, last = numbers
    if any(number > 255 for number in leading) or last >= 256 ** (4 - len(leading)):
        return None
    for index, number in enumerate(leading):
        last += number << (24 - 8 * index)
    return IPv4Address(last)


def _parse_number(digits: str) -> int:
    if digits[:2] in ("0x", "0X"):
        return int(digits, 16)
    return int(digits, 8 if digits[0] == "0" else 10)


def meant_address(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address stands for, or the address itself."""
    if isinstance(address, IPv4Address) or int(address) <= 1:  # :: and ::1 are addresses of their own
        return address
    for network, shift, inversion in _EMBEDDED:
        if address in network:
            return IPv4Address((int(address) >> shift & 0xFFFFFFFF) ^ inversion)
    return address


def address_kind(address: Address) -> str:
    """Return `public`, or why the address is not: loopback, link-local, metadata, private, multicast, reserved, ..."""
    return registry_row(meant_address(address))[1]


def registry_row(address: Address) -> tuple[Network, str]:
    """Return the network of the table that has this address, and its kind."""
    return next(row for row in _ROWS if address in row[0])


def has_only(network: Network, kinds: frozenset[str]) -> bool:
    """Tell whether all addresses of `network` are of these kinds."""
    return parts_of(network, kinds) == (network,)


def parts_of(network: Network, kinds: frozenset[str]) -> tuple[Network, ...]:
    """Return the largest networks within `network` whose addresses are all of these kinds."""
    row, kind = next((row, kind) for row, kind in _ROWS if row.version == network.version and row.overlaps(network))
    if row.prefixlen <= network.prefixlen:
        return (network,) if kind in kinds else ()
    halves: tuple[Network, ...] = tuple(network.subnets())
    parts = tuple(part for half in halves for part in parts_of(half, kinds))
    return (network,) if parts == halves else parts


def means_ipv4(network: Network) -> bool:
    """Tell whether the addresses of an IPv6 network are forms of IPv4 addresses."""
    if isinstance(network, IPv4Network) or int(network.network_address) <= 1:
        return False
    return any(network.subnet_of(embedded) for embedded, _, _ in _EMBEDDED)


# --- names --------------------------------------------------------------------------------------------------------


def normalize_host(text: str) -> str:
    """Return a host name in its one spelling: lower-case A-labels without a trailing dot.

    Raises ValueError with the reason for other text, and for an address: ask `parse_address` first.
    """
    name = text.removesuffix(".")
    if not name:
        raise ValueError("it is empty")
    if len(name) > MOST_HOST_CHARACTERS:
        raise ValueError(f"it has more than {MOST_HOST_CHARACTERS} characters")
    if not name.isascii():
        name = ".".join(map(_a_label, name.split(".")))
    name = name.lower()
    if len(name) > MOST_HOST_CHARACTERS:
        raise ValueError(f"it has more than {MOST_HOST_CHARACTERS} characters as A-labels")
    labels = name.split(".")
    for label in labels:
        _check_label(label)
    if _NUMBER_LABEL.fullmatch(labels[-1]):
        raise ValueError("it ends in a number and is not an IPv4 address")
    return name


def _check_label(label: str) -> None:
    if _LABEL.fullmatch(label):
        return
    if not label:
        raise ValueError("two dots follow each other, or it begins with one")
    if len(label) > 63:
        raise ValueError(f"{shown(label)} has more than 63 characters")
    raise ValueError(
        f"{shown(label)} is not a label: letters, digits, hyphens and underscores, a hyphen neither first nor last"
    )


def _a_label(label: str) -> str:
    """Return the A-label of one label, by IDNA 2003 where both versions of IDNA agree."""
    if label.isascii():
        return label
    lowered = unicodedata.normalize("NFC", label.lower())
    if _OTHER_DOTS & set(label):
        raise ValueError(f"{shown(label)} has a dot of another script; write it as '.'")
    if DEVIATIONS & set(lowered):
        a_label = "xn--" + lowered.encode("punycode").decode("ascii")
        raise ValueError(f"{shown(label)} means different names to different programs; write it as {a_label}")
    encoded = b""
    try:
        encoded = label.encode("idna")
        if encoded.startswith(b"xn--") and encoded.decode("idna") == lowered:
            return encoded.decode("ascii")
    except UnicodeError:  # what IDNA prohibits
        pass
    raise ValueError(f"{shown(label)} has no single spelling as an A-label; write it as xn--...")


def shown(text: str) -> str:
    """Quote untrusted text: short, in ASCII, on one line."""
    return ascii(text if len(text) <= 80 else text[:77] + "...")
