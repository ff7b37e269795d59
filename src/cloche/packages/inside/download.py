"""Download files and write them to standard output as frames, in the order of the request.

Standard input is JSON: `files`, rows of address and size (0: unknown); `ca`, the path of a bundle of certificates or
""; `most`, bytes of one file. With `page` in place of `files`, the address of an index's list of a package (PEP 691),
it writes JSON: the names of the hosts that the package's files are on. Credentials are in the variable
CLOCHE_CREDENTIALS, JSON by "host:port": a name and a password, or no name and a token. They go to that host alone, also
when it redirects to another one.
"""

from __future__ import annotations

import base64
import json
import os
import ssl
import struct
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FRAME = struct.Struct(">BHQ")
FILE = 1
LIST = "application/vnd.pypi.simple.v1+json"
PIECE = 1 << 18
TRIES, PAUSE_S, TIMEOUT_S = 3, 1.0, 60.0
PORTS = {"https": 443, "http": 80}


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follow redirects; what says who we are stays with the host it is for."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: Any,  # noqa: ANN401 - as the standard library has it
        code: int,
        msg: str,
        headers: Any,  # noqa: ANN401
        newurl: str,
    ) -> urllib.request.Request | None:
        """Return the request to the new address, with its own host's credentials or none."""
        if not newurl.startswith("https://") and not (newurl.startswith("http://") and req.type == "http"):
            return None  # never to what can be read on the way
        redirected = super().redirect_request(req, fp, code, msg, headers, newurl)
        if redirected is not None:
            redirected.remove_header("Authorization")
            identify(redirected)
        return redirected


def identify(request: urllib.request.Request) -> None:
    """Give a request the credentials of its host, if there are some."""
    address = urllib.parse.urlsplit(request.full_url)
    credentials = CREDENTIALS.get(f"{address.hostname}:{address.port or PORTS[address.scheme]}")
    if credentials and not credentials[0]:  # a token, which says by itself whose it is
        request.add_unredirected_header("Authorization", f"Bearer {credentials[1]}")
    elif credentials:
        token = base64.b64encode(":".join(credentials).encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {token}")


def fetch(opener: urllib.request.OpenerDirector, url: str, max_bytes: int, accept: str) -> bytes:
    """Return a file. Raises OSError, also for one that is too large."""
    headers = {"User-Agent": "cloche", "Accept-Encoding": "identity", "Accept": accept}
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - the other end has checked its scheme
    identify(request)
    pieces, total = [], 0
    with opener.open(request, timeout=TIMEOUT_S) as answer:
        while piece := answer.read(PIECE):
            total += len(piece)
            if total > max_bytes:
                raise OSError(f"it has more than {max_bytes} bytes")
            pieces.append(piece)
    return b"".join(pieces)


def fetch_retrying(opener: urllib.request.OpenerDirector, url: str, max_bytes: int, accept: str = "*/*") -> bytes:
    """Return a file, after a pause where the network or the server failed."""
    for pause in (PAUSE_S, 2 * PAUSE_S):
        try:
            return fetch(opener, url, max_bytes, accept)
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code != 429:
                raise
        except OSError:
            pass
        time.sleep(pause)
    return fetch(opener, url, max_bytes, accept)


def hosts_listed(opener: urllib.request.OpenerDirector, url: str, max_bytes: int) -> list[str]:
    """Return the hosts of a package's files, none for a package that is not there. Raises OSError, ValueError."""
    try:
        page = json.loads(fetch_retrying(opener, url, max_bytes, LIST))
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
        return []
    addresses = (urllib.parse.urlsplit(urllib.parse.urljoin(url, file["url"])) for file in page["files"])
    return sorted({str(address.hostname) for address in addresses if address.scheme == "https" and not address.port})


def main() -> None:
    """Write a frame for each file; the first failure is written to standard error, and ends the program."""
    asked = json.load(sys.stdin)
    context = ssl.create_default_context(cafile=asked["ca"] or None)
    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), Redirects())
    if "page" in asked:
        try:
            sys.stdout.write(json.dumps(hosts_listed(opener, asked["page"], asked["most"])))
        except (OSError, ValueError, KeyError, TypeError) as error:
            sys.exit(f"{asked['page']}: {error}")
        return
    out = os.fdopen(1, "wb", closefd=False)
    for number, (url, size) in enumerate(asked["files"]):
        try:
            data = fetch_retrying(opener, url, size or asked["most"])
        except (OSError, ValueError) as error:
            sys.exit(f"{url}: {error}")
        name = str(number).encode()
        out.write(FRAME.pack(FILE, len(name), len(data)) + name)
        out.write(data)
        out.flush()


CREDENTIALS = json.loads(os.environ.pop("CLOCHE_CREDENTIALS", "{}"))
if __name__ == "__main__":
    main()
