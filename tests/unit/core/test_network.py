"""Which hosts a sandbox may reach: rules, spellings of addresses, decisions."""

import time
import timeit
from ipaddress import ip_address, ip_network
from typing import Any

import pytest

from cloche.core.errors import InvalidRequest
from cloche.core.network import (
    MOST_RULES,
    MOST_SERVED_PORTS,
    NetworkRules,
    Rule,
    address_kind,
    normalize_host,
    parse_address,
    parse_deny_rule,
    parse_ports,
    parse_rule,
)

WEB = (80, 443)


def _allowlist(*allow: str, deny: tuple[str, ...] = ()) -> NetworkRules:
    return NetworkRules.parse(mode="allowlist", allow=allow, deny=deny)


def _open(*allow: str, deny: tuple[str, ...] = (), ports: tuple[int, ...] = ()) -> NetworkRules:
    return NetworkRules.parse(mode="open", allow=allow, deny=deny, ports=ports)


def _rule(host: str, ports: tuple[int, ...] = WEB, *networks: str, is_wildcard: bool = False) -> dict[str, Any]:
    return {
        "host": host, "ports": ports, "is_wildcard": is_wildcard, "networks": tuple(map(ip_network, networks)),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("api.example.org", _rule("api.example.org")),
        ("API.Example.ORG", _rule("api.example.org")),
        ("example.org.", _rule("example.org")),
        ("db", _rule("db")),
        ("_acme.example.org", _rule("_acme.example.org")),
        ("a_b.example.org", _rule("a_b.example.org")),
        ("3com.example", _rule("3com.example")),
        ("1.2.3.4.example.org", _rule("1.2.3.4.example.org")),
        ("example.org:443", _rule("example.org", (443,))),
        ("example.org.:443", _rule("example.org", (443,))),
        ("example.org:8443,80,80", _rule("example.org", (80, 8443))),
        ("example.org:65535", _rule("example.org", (65535,))),
        ("*.example.org", _rule("example.org", is_wildcard=True)),
        ("*.Example.org.:8080", _rule("example.org", (8080,), is_wildcard=True)),
        ("db.internal:5432@10.0.0.0/8", _rule("db.internal", (5432,), "10.0.0.0/8")),
        ("db.internal@10.0.0.0/8,fd00::/8", _rule("db.internal", WEB, "10.0.0.0/8", "fd00::/8")),
        ("93.184.216.0/24", _rule("93.184.216.0/24", WEB, "93.184.216.0/24")),
        ("10.0.0.0/8:5432", _rule("10.0.0.0/8", (5432,), "10.0.0.0/8")),
        ("db.internal@10.1.2.3", _rule("db.internal", WEB, "10.1.2.3/32")),
        ("db.internal@fd00::7", _rule("db.internal", WEB, "fd00::7/128")),
        ("*.corp.example@192.168.0.0/16", _rule("corp.example", WEB, "192.168.0.0/16", is_wildcard=True)),
        ("index.example@203.0.113.0/24", _rule("index.example", WEB, "203.0.113.0/24")),
        ("nat.example@100.64.0.0/10", _rule("nat.example", WEB, "100.64.0.0/10")),
        ("any.example@0.0.0.0/0", _rule("any.example", WEB, "0.0.0.0/0")),
        ("10.0.0.5:5432", _rule("10.0.0.5", (5432,), "10.0.0.5/32")),
        ("8.8.8.8", _rule("8.8.8.8", WEB, "8.8.8.8/32")),
        ("0x0a.5:80", _rule("10.0.0.5", (80,), "10.0.0.5/32")),
        ("[::ffff:10.0.0.5]:5432", _rule("10.0.0.5", (5432,), "10.0.0.5/32")),
        ("b\u00fccher.example", _rule("xn--bcher-kva.example")),
        ("B\u00dcCHER.example", _rule("xn--bcher-kva.example")),
        ("*.b\u00fccher.example", _rule("xn--bcher-kva.example", is_wildcard=True)),
        ("xn--strae-oqa.example", _rule("xn--strae-oqa.example")),
        ("\u043f\u0440\u0438\u043c\u0435\u0440.\u0440\u0444", _rule("xn--e1afmkfd.xn--p1ai")),
    ],
)
def test_a_rule_names_host_ports_and_networks(text: str, parts: dict[str, Any]) -> None:
    """A rule is a host or what is below it, ports (80 and 443 unless said), and networks after the @."""
    assert parse_rule(text) == Rule(**parts, text=text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is empty or has blanks"),
        (" example.org", "is empty or has blanks"),
        ("example.org ", "is empty or has blanks"),
        ("exa mple.org", "is empty or has blanks"),
        ("example.org\n", "is empty or has blanks or control characters"),
        ("exam\x00ple.org", "control characters"),
        ("exam\u200bple.org", "control characters"),
        (".", "it is empty"),
        (".example.org", "two dots follow each other, or it begins with one"),
        ("example..org", "two dots follow each other"),
        ("example.org..", "two dots follow each other"),
        ("-a.example.org", "a hyphen neither first nor last"),
        ("a-.example.org", "a hyphen neither first nor last"),
        ("a%2eb.example.org", "is not a label"),
        ("a\\b.example.org", "is not a label"),
        ("a!b.example.org", "is not a label"),
        ("example.org,other.org", "is not a label"),
        ("a" * 64 + ".example.org", "has more than 63 characters"),
        (".".join(["a" * 49] * 5) + ".long", "it has more than 253 characters"),
        ("a" * 2001, "has more than 2000 characters"),
        ("256.1.1.1", "it ends in a number and is not an IPv4 address"),
        ("1.2.3.4.5", "it ends in a number and is not an IPv4 address"),
        ("1.2.3.08", "it ends in a number and is not an IPv4 address"),
        ("example.0x1f", "it ends in a number and is not an IPv4 address"),
        ("example.0x", "it ends in a number and is not an IPv4 address"),
        ("\uff11\uff12\uff17.0.0.1", "no single spelling as an A-label"),
        ("*", "means every host"),
        ("*:443", "means every host"),
        ("*.", "it is empty"),
        ("*.*.example.org", "has a * that is not at the beginning"),
        ("a.*.example.org", "has a * that is not at the beginning"),
        ("a*.example.org", "has a * that is not at the beginning"),
        ("example.*", "has a * that is not at the beginning"),
        ("*.com", "is too wide: it allows everything below .com; name a domain, as in *.example.com"),
        ("*.com.", "is too wide"),
        ("*.10.0.0.1", "is a wildcard below an address"),
        ("https://example.org/", "has a scheme. Write the host alone, or with methods and a path"),
        ("tcp://example.org", "has a scheme"),
        ("example.org/path", "has a path without methods, or methods without a path. Write the host alone, or"),
        ("example.org?q=1", "has a path"),
        ("example.org#a", "has a path"),
        ("GET example.org", "has a method before the host. Write the host alone, or"),
        ("post example.org/a", "has a method"),
        ("0.0.0.0/0", "has both public and other addresses"),
        ("example.org:", "has no port ''"),
        (":443", "it is empty"),
        ("example.org:0", "has no port '0'"),
        ("example.org:65536", "has no port '65536'"),
        ("example.org:443,", "has no port ''"),
        ("example.org:-1", "has no port '-1'"),
        ("example.org:+80", "has no port '+80'"),
        ("example.org:080", "has no port '080'"),
        ("example.org:\u0664\u0664\u0663", "has no port"),
        ("example.org:80-90", "has no port '80-90'"),
        ("example.org:https", "has no port 'https'"),
        ("example.org:80:90", "has more than one colon"),
        ("example.org:53", "has port 53, which only the sandbox's own name server uses"),
        ("example.org@", "has no network ''"),
        ("user@example.org", "has no network 'example.org'"),
        ("user:pass@example.org", "has no port 'pass'"),
        ("example.org@10.0.0.0/8,", "has no network ''"),
        ("example.org@10.0.0.0/33", "has no network '10.0.0.0/33'"),
        ("example.org@10.0.0.0/255.0.0.0", "has no network '10.0.0.0/255.0.0.0'"),
        ("example.org@10.0.0.5/8", "has host bits after its prefix; the network is 10.0.0.0/8"),
        ("example.org@::ffff:10.0.0.0/104", "whose addresses stand for IPv4 addresses; write the IPv4 network"),
        ("example.org@127.0.0.0/8", "which is loopback, which no rule can allow"),
        ("example.org@127.0.0.1", "which is loopback"),
        ("example.org@0.0.0.0/8", "which is unspecified"),
        ("example.org@169.254.0.0/16", "which is link-local"),
        ("example.org@169.254.169.254/32", "which is metadata"),
        ("example.org@168.63.129.16", "which is metadata"),
        ("example.org@100.100.100.200", "which is metadata"),
        ("example.org@fd00:ec2::/64", "which is metadata"),
        ("example.org@224.0.0.0/4", "which is multicast"),
        ("example.org@255.255.255.255", "which is broadcast"),
        ("example.org@::/127", "no rule can allow"),
        ("example.org@fe80::/10", "which is link-local"),
        ("example.org@ff00::/8", "which is multicast"),
        ("example.org@64:ff9b:1::/48", "which is translated"),
        ("example.org@8.0.0.0/8", "public addresses are allowed without it"),
        ("10.0.0.5@10.0.0.0/8", "is an address with @CIDR"),
        ("127.0.0.1", "is a loopback address, which no rule can allow"),
        ("2130706433", "is a loopback address"),
        ("0", "is an unspecified address"),
        ("169.254.169.254", "is a metadata address"),
        ("0xa9fea9fe", "is a metadata address"),
        ("168.63.129.16:80", "is a metadata address"),
        ("[::1]:80", "is a loopback address"),
        ("::1", "is a loopback address"),
        ("[::ffff:127.0.0.1]", "is a loopback address"),
        ("[fe80::1%eth0]:80", "is a link-local address"),
        ("255.255.255.255", "is a broadcast address"),
        ("239.1.1.1", "is a multicast address"),
        ("198.18.0.9:443", "is in 198.18.0.0/15, which sandboxes use for names"),
        ("[2606:4700::1]:443", "is an IPv6 address, and sandboxes have IPv4 inside"),
        ("[::1", "is not an IPv6 address in brackets"),
        ("[::1]443", "is not an IPv6 address in brackets"),
        ("[10.0.0.5]:80", "is not a label"),
        ("localhost", "is always the sandbox itself"),
        ("*.localhost.", "is always the sandbox itself"),
        ("db.LOCALHOST:5432", "is always the sandbox itself"),
        ("stra\u00dfe.example", "write it as xn--strae-oqa"),
        ("STRA\u1e9eE.example", "means different names to different programs"),
        ("\u03c3\u03b1\u03c2.example", "write it as xn--mxa8ab"),
        ("a\u200db.example", "means different names to different programs"),
        ("a\u200cb.example", "means different names to different programs"),
        ("example\u3002org", "has a dot of another script"),
        ("example\uff0eorg", "has a dot of another script"),
        ("\uff45xample.org", "has no single spelling as an A-label; write it as xn--"),
        ("\u212aey.org", "has no single spelling as an A-label"),
        ("a\u2024b\u00fc.org", "has no single spelling as an A-label"),
    ],
)
def test_what_is_no_rule_is_refused_with_the_reason(text: str, reason: str) -> None:
    """A rule that cannot be kept, opens nothing, or says another thing than it seems to say is refused."""
    with pytest.raises(InvalidRequest) as caught:
        parse_rule(text)
    assert str(caught.value).startswith("network_allow: '")
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_rule_must_be_text() -> None:
    """A number in a list of hosts is refused by the name of that list."""
    with pytest.raises(InvalidRequest, match="hosts: '443' must be text"):
        parse_rule(443, name="hosts")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "host", "ports", "networks"),
    [
        ("evil.example", "evil.example", (), ()),
        ("evil.example:25", "evil.example", (25,), ()),
        ("*.evil.example", "evil.example", (), ()),
        ("*.com", "com", (), ()),
        ("203.0.113.0/24", "203.0.113.0/24", (), ("203.0.113.0/24",)),
        ("2001:db8::/32", "2001:db8::/32", (), ("2001:db8::/32",)),
        ("203.0.113.7", "203.0.113.7", (), ("203.0.113.7/32",)),
        ("203.0.113.7:443", "203.0.113.7", (443,), ("203.0.113.7/32",)),
        ("0xcb007107", "203.0.113.7", (), ("203.0.113.7/32",)),
        ("[2606:4700::1]:443", "2606:4700::1", (443,), ("2606:4700::1/128",)),
        ("::ffff:203.0.113.7", "203.0.113.7", (), ("203.0.113.7/32",)),
    ],
)
def test_a_denying_rule_may_be_a_network(
    text: str, host: str, ports: tuple[int, ...], networks: tuple[str, ...]
) -> None:
    """What is denied is a host, an address or a network, on all ports unless said."""
    rule = parse_deny_rule(text)
    assert (rule.host, rule.ports, rule.networks) == (host, ports, tuple(map(ip_network, networks)))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("*", "means every host"),
        ("example.org/path", "has a path or is not a network"),
        ("https://example.org", "has a scheme"),
        ("example.org@10.0.0.0/8", "write a denied network alone"),
        ("203.0.113.7/24", "the network is 203.0.113.0/24"),
        ("203.0.113.0/24:443", "is not a network"),
        ("64:ff9b::/96", "write the IPv4 network"),
        ("*.10.0.0.1", "write a CIDR network"),
        ("999.1.1.1", "is not an IPv4 address"),
    ],
)
def test_what_cannot_be_denied_is_refused(text: str, reason: str) -> None:
    """A denying rule that would never hold is an error."""
    with pytest.raises(InvalidRequest, match=r"network_deny: '") as caught:
        parse_deny_rule(text)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.1.", "127.0.0.1"),
        ("127.1", "127.0.0.1"),
        ("127.0.1", "127.0.0.1"),
        ("2130706433", "127.0.0.1"),
        ("0x7f000001", "127.0.0.1"),
        ("0X7F000001", "127.0.0.1"),
        ("017700000001", "127.0.0.1"),
        ("0177.0.0.1", "127.0.0.1"),
        ("0x7f.0.0.0x1", "127.0.0.1"),
        ("00000177.0.0.1", "127.0.0.1"),
        ("010.0.0.1", "8.0.0.1"),
        ("10.65535", "10.0.255.255"),
        ("1.2.65535", "1.2.255.255"),
        ("4294967295", "255.255.255.255"),
        ("0", "0.0.0.0"),
        ("[::1]", "::1"),
        ("::1", "::1"),
        ("0:0:0:0:0:0:0:1", "::1"),
        ("::", "::"),
        ("fe80::1%eth0", "fe80::1"),
        ("::ffff:127.0.0.1", "127.0.0.1"),
        ("[::FFFF:7f00:1]", "127.0.0.1"),
        ("::ffff:0:10.0.0.5", "10.0.0.5"),
        ("::10.0.0.5", "10.0.0.5"),
        ("64:ff9b::10.0.0.5", "10.0.0.5"),
        ("64:ff9b:1::169.254.169.254", "169.254.169.254"),
        ("2002:7f00:1::", "127.0.0.1"),
        ("2002:a9fe:a9fe::1", "169.254.169.254"),
        ("2001:0:4136:e378:8000:63bf:3fff:fdd2", "192.0.2.45"),
        ("2606:4700::1111", "2606:4700::1111"),
    ],
)
def test_each_spelling_is_the_address_that_it_means(text: str, address: str) -> None:
    """Decimal, octal, hexadecimal and short forms, and IPv6 forms of IPv4, are one address."""
    assert parse_address(text) == ip_address(address)


@pytest.mark.parametrize(
    "text",
    [
        "", ".", "example.org", "1.2.3.4.5", "256.0.0.1", "1.2.3.256", "1.2.65536", "4294967296", "0x", "0x1ffffffff",
        "08.0.0.1", "1..2", "1.2.3.", "-1", "1.2.3.4 ", "1.2.3.4\n", "1_0.0.0.1", "\u0661.2.3.4", "\uff11.2.3.4",
        "[1.2.3.4]", "[]", ":", ":::", "1:2:3", "::g", "1" * 5000, "0b1", "1e3",
    ],
)  # fmt: skip
def test_other_text_is_no_address(text: str) -> None:
    """What no C library takes for an address is none."""
    expected = "1.2.0.3" if text == "1.2.3." else None  # a trailing dot is taken
    assert parse_address(text) == (ip_address(expected) if expected else None)


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("8.8.8.8", "public"), ("1.0.0.0", "public"), ("9.255.255.255", "public"), ("11.0.0.0", "public"),
        ("100.63.255.255", "public"), ("100.128.0.0", "public"), ("172.15.255.255", "public"), ("172.32.0.0", "public"),
        ("192.0.1.0", "public"), ("198.17.255.255", "public"), ("198.20.0.0", "public"), ("223.255.255.255", "public"),
        ("0.0.0.0", "unspecified"), ("0.1.2.3", "unspecified"), ("127.0.0.1", "loopback"), ("127.255.0.9", "loopback"),
        ("10.0.0.1", "private"), ("172.16.0.1", "private"), ("172.31.255.255", "private"), ("192.168.1.1", "private"),
        ("100.64.0.1", "carrier-grade NAT"), ("100.127.255.255", "carrier-grade NAT"),
        ("169.254.0.1", "link-local"), ("169.254.169.254", "metadata"), ("169.254.170.2", "metadata"),
        ("100.100.100.200", "metadata"), ("168.63.129.16", "metadata"), ("192.0.0.192", "metadata"),
        ("192.0.0.9", "reserved"), ("192.88.99.1", "reserved"), ("192.0.2.1", "documentation"),
        ("198.51.100.1", "documentation"), ("203.0.113.1", "documentation"), ("198.18.0.1", "benchmarking"),
        ("198.19.255.255", "benchmarking"), ("224.0.0.1", "multicast"), ("239.255.255.255", "multicast"),
        ("240.0.0.1", "reserved"), ("255.255.255.255", "broadcast"),
        ("2606:4700::1111", "public"), ("2a00::1", "public"), ("3ffe::1", "public"),
        ("::", "unspecified"), ("::1", "loopback"), ("::2", "unspecified"), ("fe80::1", "link-local"),
        ("fd00::1", "private"), ("fc00::1", "private"), ("fec0::1", "private"), ("ff02::1", "multicast"),
        ("fd00:ec2::254", "metadata"), ("fd20:ce::254", "metadata"), ("2001:db8::1", "documentation"),
        ("3fff::1", "documentation"), ("2001:2::1", "reserved"), ("2001:20::1", "reserved"), ("5f00::1", "reserved"),
        ("100::1", "reserved"), ("4000::1", "reserved"), ("64:ff9b:1:abcd::1", "translated"),
        ("::ffff:8.8.8.8", "public"), ("::ffff:127.0.0.1", "loopback"), ("::ffff:0:127.0.0.1", "loopback"),
        ("64:ff9b::8.8.8.8", "public"), ("64:ff9b::10.0.0.1", "private"), ("64:ff9b:1::10.0.0.1", "private"),
        ("2002:0a00:0001::1", "private"), ("2002:808:808::1", "public"), ("::169.254.169.254", "metadata"),
        ("2001:0:4136:e378:8000:63bf:80ff:fffe", "loopback"), ("fe80::1%eth0", "link-local"),
    ],
)  # fmt: skip
def test_kinds_of_addresses(address: str, kind: str) -> None:
    """An address is public, or has the kind that the special-purpose registries or a cloud give it."""
    assert address_kind(ip_address(address)) == kind


@pytest.mark.parametrize(
    ("rules", "host", "port", "is_allowed"),
    [
        (_allowlist("example.org"), "example.org", 443, True),
        (_allowlist("example.org"), "example.org", 80, True),
        (_allowlist("example.org"), "EXAMPLE.org.", 443, True),
        (_allowlist("example.org"), "example.org", 8443, False),
        (_allowlist("example.org"), "www.example.org", 443, False),
        (_allowlist("example.org"), "notexample.org", 443, False),
        (_allowlist("example.org"), "example.org.evil.example", 443, False),
        (_allowlist("*.example.org"), "a.example.org", 443, True),
        (_allowlist("*.example.org"), "a.b.c.example.org", 443, True),
        (_allowlist("*.example.org"), "example.org", 443, False),
        (_allowlist("*.example.org"), "aexample.org", 443, False),
        (_allowlist("b\u00fccher.example"), "xn--bcher-kva.example", 443, True),
        (_allowlist("xn--bcher-kva.example"), "b\u00fccher.example", 443, True),
        (_allowlist("db:5432"), "db", 5432, True),
        (_allowlist("db:5432"), "db", 443, False),
        (_allowlist("10.0.0.5:5432"), "10.0.0.5", 5432, True),
        (_allowlist("10.0.0.5:5432"), "0x0a000005", 5432, True),
        (_allowlist("10.0.0.5:5432"), "::ffff:10.0.0.5", 5432, True),
        (_allowlist("10.0.0.5:5432"), "10.0.0.6", 5432, False),
        (_allowlist("example.org"), "8.8.8.8", 443, False),
        (_allowlist("8.8.8.8"), "8.8.8.8", 443, True),
        (_allowlist("db@10.0.0.0/8"), "10.0.0.5", 443, False),
        (_allowlist(), "example.org", 443, False),
        (_allowlist("*.example.org", deny=("evil.example.org",)), "evil.example.org", 443, False),
        (_allowlist("*.example.org", deny=("evil.example.org",)), "good.example.org", 443, True),
        (_allowlist("a.example.org", deny=("*.example.org",)), "a.example.org", 443, False),
        (_allowlist("example.org", deny=("*.example.org",)), "example.org", 443, True),
        (_allowlist("example.org", deny=("example.org:80",)), "example.org", 80, False),
        (_allowlist("example.org", deny=("example.org:80",)), "example.org", 443, True),
        (_allowlist("8.8.8.8", deny=("8.8.8.0/24",)), "8.8.8.8", 443, False),
        (_allowlist("8.8.8.8", deny=("8.8.8.8",)), "0x08080808", 443, False),
        (_allowlist("example.org"), "exam ple.org", 443, False),
        (_allowlist("example.org"), "", 443, False),
        (_open(), "example.org", 443, True),
        (_open(), "example.org", 80, True),
        (_open(), "example.org", 22, False),
        (_open(ports=(22,)), "example.org", 22, True),
        (_open(), "8.8.8.8", 443, True),
        (_open(), "10.0.0.5", 443, False),
        (_open(), "127.0.0.1", 443, False),
        (_open(), "2130706433", 443, False),
        (_open(), "::ffff:169.254.169.254", 80, False),
        (_open(), "168.63.129.16", 80, False),
        (_open(), "localhost", 80, False),
        (_open(), "a.localhost.", 80, False),
        (_open("10.0.0.5:5432"), "10.0.0.5", 5432, True),
        (_open("db.internal:5432@10.0.0.0/8"), "db.internal", 5432, True),
        (_open("db.internal:5432@10.0.0.0/8"), "other.internal", 5432, False),
        (_open(deny=("evil.example",)), "evil.example", 443, False),
        (_open(deny=("evil.example",)), "EVIL.example.", 443, False),
        (_open(deny=("*.evil.example",)), "a.b.evil.example", 443, False),
        (_open(deny=("*.evil.example",)), "evil.example", 443, True),
        (_open(deny=("*.com",)), "a.com", 443, False),
        (_open(deny=("8.0.0.0/8",)), "8.8.8.8", 443, False),
        (_open(deny=("8.0.0.0/8",)), "::ffff:8.8.8.8", 443, False),
        (_open(deny=("0.0.0.0/0",)), "9.9.9.9", 443, False),
        (_open(deny=("::/0",)), "9.9.9.9", 443, True),
        (NetworkRules.parse(mode="off", allow=("example.org",)), "example.org", 443, False),
        (NetworkRules.parse(mode="bridge"), "example.org", 443, False),
    ],
)
def test_a_host_and_a_port_are_decided(rules: NetworkRules, host: str, port: int, is_allowed: bool) -> None:
    """What is listed, or public in mode open, is allowed; a denying rule wins."""
    decision = rules.decide(host, port)
    assert decision.is_allowed == is_allowed, decision.why


@pytest.mark.parametrize(
    ("allow", "deny", "address", "reason"),
    [
        ("db.example", (), "8.8.8.8", ""),
        ("db.example", (), "2606:4700::1", ""),
        (
            "db.example",
            (),
            "10.0.0.7",
            'it resolves to 10.0.0.7, a private address; allow it with network_allow "db.example@10.0.0.0/8"',
        ),
        ("db.example", (), "fd00::7", 'allow it with network_allow "db.example@fc00::/7"'),
        ("db.example", (), "4000::7", 'allow it with network_allow "db.example@4000::7/128"'),
        ("db.example", (), "203.0.113.9", "a documentation address; allow it with network_allow"),
        ("db.example@10.0.0.0/8", (), "10.0.0.7", ""),
        ("db.example@10.0.0.0/8", (), "::ffff:10.0.0.7", ""),
        ("db.example@10.0.0.0/8", (), "64:ff9b::10.0.0.7", ""),
        ("db.example@10.0.0.0/8", (), "8.8.8.8", ""),
        ("db.example@10.0.0.0/8", (), "192.168.0.7", "a private address"),
        ("db.example@203.0.113.0/24", (), "203.0.113.9", ""),
        ("db.example@fd00::/8", (), "fd00::7", ""),
        ("db.example@fd00::/8", (), "fd00:ec2::254", "a metadata address; no rule can allow that"),
        ("db.example@0.0.0.0/0", (), "10.0.0.7", ""),
        ("db.example@0.0.0.0/0", (), "127.0.0.1", "a loopback address; no rule can allow that"),
        ("db.example@0.0.0.0/0", (), "0.0.0.0", "an unspecified address; no rule can allow that"),
        ("db.example@0.0.0.0/0", (), "169.254.169.254", "a metadata address; no rule can allow that"),
        ("db.example@0.0.0.0/0", (), "169.254.1.1", "a link-local address; no rule can allow that"),
        ("db.example@0.0.0.0/0", (), "168.63.129.16", "a metadata address; no rule can allow that"),
        ("db.example@0.0.0.0/0", (), "224.0.0.1", "a multicast address; no rule can allow that"),
        ("db.example@0.0.0.0/0", (), "255.255.255.255", "a broadcast address; no rule can allow that"),
        ("db.example@::/0", (), "::1", "a loopback address; no rule can allow that"),
        ("db.example@::/0", (), "fe80::1", "a link-local address; no rule can allow that"),
        ("db.example@::/0", (), "::ffff:127.0.0.1", "a loopback address; no rule can allow that"),
        ("db.example@::/0", (), "64:ff9b:1:a00:0:500::", "a translated address; no rule can allow that"),
        ("10.0.0.5", (), "10.0.0.5", ""),
        ("10.0.0.5", (), "10.0.0.6", "a private address"),
        ("db.example", ("8.8.8.0/24",), "8.8.8.8", "and network_deny has 8.8.8.0/24; take that rule out"),
        ("db.example", ("8.8.8.0/24",), "::ffff:8.8.8.8", "and network_deny has 8.8.8.0/24; take"),
        ("db.example", ("8.8.8.0/24",), "64:ff9b::8.8.8.8", "and network_deny has 8.8.8.0/24; take"),
        ("db.example", ("8.8.8.0/24",), "8.8.9.8", ""),
        ("db.example", ("8.8.8.8:25",), "8.8.8.8", "and network_deny has 8.8.8.8:25; take"),
        ("db.example", ("2606::/16",), "2606:4700::1", "and network_deny has 2606::/16; take"),
        ("db.example", ("::/0",), "64:ff9b::8.8.8.8", "and network_deny has ::/0; take"),
        ("db.example@10.0.0.0/8", ("10.1.0.0/16",), "10.1.0.7", "and network_deny has 10.1.0.0/16; take"),
    ],
)
def test_a_resolved_address_is_decided(allow: str, deny: tuple[str, ...], address: str, reason: str) -> None:
    """Only public addresses, and those that the rule names, may be connected to; what is denied may not."""
    rules = _allowlist(allow, deny=deny)
    why = rules.decide_address(rules.allow[0], ip_address(address))
    assert reason in why
    assert bool(why) == bool(reason), why


def test_a_denied_address_may_be_denied_on_one_port() -> None:
    """A port after a denied address leaves its other ports alone."""
    rules = _open(deny=("8.8.8.8:25",))
    address = ip_address("8.8.8.8")
    assert "network_deny" in rules.decide_address(None, address, host="mail.example", port=25)
    assert rules.decide_address(None, address, host="mail.example", port=443) == ""


@pytest.mark.parametrize(
    ("rules", "host", "is_known"),
    [
        (_allowlist("example.org:8443"), "example.org", True),
        (_allowlist("example.org"), "other.org", False),
        (_allowlist("*.example.org"), "a.b.example.org", True),
        (_allowlist("*.example.org"), "example.org", False),
        (_allowlist("example.org", deny=("example.org",)), "example.org", False),
        (_allowlist("example.org", deny=("example.org:80",)), "example.org", True),
        (_allowlist("example.org", deny=("example.org:80,443",)), "example.org", False),
        (_allowlist("10.0.0.5"), "10.0.0.5", False),
        (_open(), "anything.example", True),
        (_open(), "localhost", False),
        (_open(), "8.8.8.8", False),
        (_open(), "a b", False),
        (_open(deny=("*.evil.example",)), "a.evil.example", False),
        (_open("db:5432", deny=("db:80,443",)), "db", True),
        (NetworkRules.parse(mode="off", allow=("example.org",)), "example.org", False),
    ],
)
def test_the_name_server_answers_for_names_that_may_be_reached(rules: NetworkRules, host: str, is_known: bool) -> None:
    """A name is known where one of its ports may be allowed."""
    assert rules.knows(host) == is_known


@pytest.mark.parametrize(
    ("rules", "ports"),
    [
        (_allowlist("a.example", "db:5432,443"), (80, 443, 5432)),
        (_allowlist("db:5432"), (80, 443, 5432)),
        (_allowlist(), (80, 443)),
        (_open(ports=(22, 80)), (22, 80, 443)),
        (_open("db:5432"), (80, 443, 5432)),
        (NetworkRules.parse(mode="off", allow=("a.example",), ports=(22,)), ()),
        (NetworkRules.parse(mode="allowlist", ports=(22,)), (80, 443)),
    ],
)
def test_served_ports_are_those_that_something_may_be_allowed_on(rules: NetworkRules, ports: tuple[int, ...]) -> None:
    """A sandbox with a network listens on 80, 443 and the ports of its rules, and no others."""
    assert rules.served_ports == ports


ALLOW = "allow it with network_allow"
OWN = "it is the sandbox itself, which is reached on its own loopback"
NEVER = "no rule can allow that"


@pytest.mark.parametrize(
    ("rules", "host", "port", "what", "why", "remedy"),
    [
        (_allowlist("a.example", "*.b.example"), "api.foo.com", 443,
         "api.foo.com:443", "the rules are a.example, *.b.example", f'{ALLOW} "api.foo.com"'),
        (_allowlist(), "a.example", 22, "a.example:22", "there are no rules", f'{ALLOW} "a.example:22"'),
        (_allowlist("a.example", "b.example"), "a.example", 8443,
         "a.example:8443", "the rules for this host are a.example", f'{ALLOW} "a.example:8443"'),
        (_open("a.example:443/GET:/x"), "a.example", 80,
         "a.example:80", "the rules for this host are a.example:443/GET:/x", f'{ALLOW} "a.example:80"'),
        (_open(), "a.example", 22,
         "a.example:22", "network 'open' has the ports 80, 443", f'{ALLOW} "a.example:22", or "22" in network_ports'),
        (_open(), "0x0a000007", 5432, "10.0.0.7:5432", "it is a private address", f'{ALLOW} "10.0.0.7:5432"'),
        (_open(), "127.1", 80, "127.0.0.1:80", "it is a loopback address", NEVER),
        (_open(), "a.localhost", 80, "a.localhost:80", OWN, NEVER),
        (_open(deny=("*.foo.com",)), "a.foo.com", 443,
         "a.foo.com:443", "network_deny has *.foo.com", "take that rule out to allow it"),
        (_allowlist("8.8.8.8", deny=("8.8.8.0/24",)), "8.8.8.8", 443,
         "8.8.8.8:443", "network_deny has 8.8.8.0/24", "take that rule out to allow it"),
        (NetworkRules(), "a.example", 443,
         "a.example:443", "the network of this sandbox is 'off'", f'{ALLOW} "a.example"'),
    ],
)  # fmt: skip
def test_a_refusal_says_what_why_and_what_would_allow_it(
    rules: NetworkRules, host: str, port: int, what: str, why: str, remedy: str
) -> None:
    """All are one sentence of three parts, which a model can act on."""
    decision = rules.decide(host, port)
    assert (decision.is_allowed, decision.why) == (False, f"{what} is not allowed; {why}; {remedy}")


def test_what_is_allowed_says_by_which_rule() -> None:
    """A decision names its rule."""
    assert _allowlist("a.example").decide("a.example", 443).why == "a.example:443 is allowed by a.example"


@pytest.mark.parametrize("host", ["a" * 250 + ".b", "a" * 100_000, "\x1b[31m" * 500, "x." * 120 + "example"])
def test_a_reason_is_short_and_printable(host: str) -> None:
    """What a guest asked for, and a long list, cannot fill a log or drive a terminal."""
    why = _allowlist(*(f"{'x' * 60}.host{number}.example" for number in range(900))).decide(host, 443).why
    assert len(why) < 800
    assert why.isprintable()


def test_rules_of_one_host_add_up() -> None:
    """Two rules that allow a host on a port open the networks of both."""
    rules = _allowlist("db.corp.example@10.0.0.0/8", "db.corp.example@192.168.0.0/16", "*.corp.example@100.64.0.0/10")
    rule = rules.decide("db.corp.example", 443).rule
    for address in ("10.0.0.1", "192.168.0.1", "100.64.0.1"):
        assert rules.decide_address(rule, ip_address(address)) == ""


def test_the_networks_of_a_rule_are_for_its_ports() -> None:
    """A network that is opened for one port stays closed for another."""
    rules = _allowlist("db.internal:5432@10.0.0.0/8", "db.internal")
    rule = rules.decide("db.internal", 443).rule
    assert "a private address" in rules.decide_address(rule, ip_address("10.0.0.1"))


@pytest.mark.parametrize(
    ("ports", "reason"),
    [
        ("443", "must be a list"),
        ((0,), "'0' is not a port"),
        ((65536,), "'65536' is not a port"),
        ((True,), "'True' is not a port"),
        (("443",), "is not a port"),
        ((53,), "53 is used by the sandbox's own name server"),
    ],
)
def test_wrong_ports_are_named(ports: Any, reason: str) -> None:
    """Further ports are numbers, and not that of the name server."""
    with pytest.raises(InvalidRequest, match="network_ports: ") as caught:
        parse_ports(ports)
    assert reason in str(caught.value)


def test_the_number_of_rules_is_bounded() -> None:
    """More rules than the bound are refused, as are more ports than a sandbox serves."""
    texts = [f"h{number}.example" for number in range(MOST_RULES + 1)]
    with pytest.raises(InvalidRequest, match=f"{MOST_RULES + 1} rules"):
        _allowlist(*texts)
    with pytest.raises(InvalidRequest, match=f"serves at most {MOST_SERVED_PORTS}"):
        _open(ports=tuple(range(1000, 1000 + MOST_SERVED_PORTS)))


def test_a_decision_does_not_scan_the_rules() -> None:
    """A thousand decisions among as many rules as are taken need far less than scanning them would."""
    names = [f"h{number}.example" for number in range(MOST_RULES // 2)]
    networks = [f"10.{number}.0.0/16" for number in range(200)]
    rules = _open(*names, deny=(*(f"*.{name}" for name in names[:300]), *networks))
    began = time.perf_counter()
    for _ in range(1000):
        rules.decide("a.b.h7.example", 443)
        rules.decide("10.9.0.1", 443)
    assert time.perf_counter() - began < 1.0


def test_a_name_is_normalized_once() -> None:
    """A normalized name stays as it is."""
    for name in ("example.org", "xn--bcher-kva.example", "_a.b"):
        assert normalize_host(normalize_host(name)) == name


def test_a_refusal_does_not_look_at_all_rules() -> None:
    """What a guest asks for in vain costs about as much with a thousand rules as with ten."""

    def cost_s(count: int) -> float:
        rules = NetworkRules.parse(mode="allowlist", allow=[f"n{number}.example.org" for number in range(count)])
        return min(timeit.repeat(lambda: rules.decide("other.example", 443), number=50, repeat=20))

    assert (
        "and 995 more"
        in NetworkRules.parse(mode="allowlist", allow=[f"n{number}.example.org" for number in range(1000)])
        .decide("other.example", 443)
        .why
    )
    assert cost_s(1000) < 8 * cost_s(10)


def test_a_network_allows_its_addresses_and_no_name() -> None:
    """Neither a name that resolves into it, nor another port, nor a public network's neighbour."""
    rules = _allowlist("93.184.216.0/24", "10.0.0.0/8:5432")
    asked = [("93.184.216.34", 80), ("93.184.217.1", 80), ("93.184.216.34", 22), ("10.1.2.3", 5432), ("a.example", 80)]
    assert [rules.decide(*one).is_allowed for one in asked] == [True, False, False, True, False]
    decision = rules.decide("10.1.2.3", 5432)
    assert not rules.decide_address(decision.rule, ip_address("10.1.2.3"))
    assert not rules.knows("a.example")
    for wrong in ("127.0.0.0/8", "169.254.0.0/16", "172.0.0.0/8", "fd00::/8"):
        with pytest.raises(InvalidRequest):
            parse_rule(wrong)


def test_rules_that_are_replaced_keep_their_ports_alone() -> None:
    """The mode and both lists are the new ones."""
    rules = _open("a.example", deny=("b.example",), ports=(8080,)).replaced(mode="allowlist", allow=["c.example"])
    assert rules.as_wire() == {
        "mode": "allowlist",
        "allow": ["c.example"],
        "deny": [],
        "ports": [8080],
        "host_ports": [],
    }
