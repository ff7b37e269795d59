"""Debian's Chromium without windows, driven by Playwright, for the service's page; and what hostile outputs try."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page, StorageState, sync_playwright

PROGRAM = "/usr/bin/chromium-headless-shell"
# No sandbox of its own, as root may not have one; nothing that would look for the network.
ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
WAIT_MS = 60_000


@contextmanager
def chromium() -> Iterator[Browser]:
    """Hold a browser."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=PROGRAM, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Seen:
    """Hold a page, and what it did that it should not: errors, dialogs, and windows."""

    page: Page
    context: BrowserContext
    errors: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)


@contextmanager
def opened(browser: Browser, cookies: StorageState | None, *, width: int = 1280, **options: Any) -> Iterator[Seen]:
    """Hold a page of a fresh context."""
    context = browser.new_context(storage_state=cookies, viewport={"width": width, "height": 900}, **options)
    context.set_default_timeout(WAIT_MS)
    seen = Seen(page=context.new_page(), context=context)
    seen.page.on("pageerror", lambda error: seen.errors.append(str(error)))

    def note_dialog(dialog: Any) -> None:
        seen.dialogs.append(dialog.message)
        dialog.dismiss()

    seen.page.on("dialog", note_dialog)
    try:
        yield seen
    finally:
        context.close()


@dataclass
class Trap:
    """Be a server that notes who asks it for /hit/NAME, and serves each naive page as it is."""

    address: str
    pages: dict[str, str] = field(default_factory=dict)
    hits: set[str] = field(default_factory=set)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def hit(self, name: str) -> str:
        """Return the address that an output of this name tries to reach."""
        return f"{self.address}/hit/{name}"

    def wait_for(self, names: set[str], timeout_s: float = 60) -> None:
        """Wait until all of these were asked for."""
        with self.changed:
            assert self.changed.wait_for(lambda: names <= self.hits, timeout_s), f"not tried: {names - self.hits}"


@contextmanager
def trap() -> Iterator[Trap]:
    """Hold such a server, on loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            kind, _, name = self.path.strip("/").partition("/")
            if kind == "hit":
                with found.changed:
                    found.hits.add(re.split("[/?]", name)[0])
                    found.changed.notify_all()
            body = found.pages.get(name, "") if kind == "naive" else ""
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8" if kind == "naive" else "text/plain")
            self.send_header("Content-Length", str(len(body.encode())))
            self.end_headers()
            self.wfile.write(body.encode())

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Trap(address=f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# Each tries to reach HIT by itself, in a page that shows it as it is; or, in `ONLY_IN_THE_PAGE`, with our own scripts.
HOSTILE_HTML: Mapping[str, str] = {
    "script": "<script>fetch('HIT', {mode: 'no-cors'})</script>",
    "script-src": '<script src="HIT"></script>',
    "module": '<script type="module">fetch("HIT", {mode: "no-cors"})</script>',
    "img": '<img src="HIT">',
    "img-onerror": "<img src=data:x onerror=\"fetch('HIT', {mode: 'no-cors'})\">",
    "picture": '<picture><source srcset="HIT"><img alt=""></picture>',
    "svg-onload": "<svg onload=\"fetch('HIT', {mode: 'no-cors'})\"></svg>",
    "svg-image": '<svg><image href="HIT" width="9" height="9"/></svg>',
    "svg-script": "<svg><script>fetch('HIT', {mode: 'no-cors'})</script></svg>",
    "svg-animate": "<svg><animate onbegin=\"fetch('HIT', {mode: 'no-cors'})\" attributeName=x dur=1s></svg>",
    "body-onload": "<body onload=\"fetch('HIT', {mode: 'no-cors'})\">",
    "details": "<details open ontoggle=\"fetch('HIT', {mode: 'no-cors'})\"><summary>x</summary></details>",
    "iframe": '<iframe src="HIT"></iframe>',
    "iframe-script": "<iframe src=\"javascript:parent.fetch('HIT', {mode: 'no-cors'})\"></iframe>",
    "srcdoc": "<iframe srcdoc=\"<script>fetch('HIT', {mode: 'no-cors'})</script>\"></iframe>",
    "object": '<object data="HIT"></object>',
    "embed": '<embed src="HIT">',
    "stylesheet": '<link rel="stylesheet" href="HIT">',
    "preload": '<link rel="preload" as="fetch" href="HIT">',
    "import": "<style>@import url('HIT');</style>",
    "background": "<div style=\"background: url('HIT')\">x</div>",
    "font": "<style>@font-face{font-family:z;src:url('HIT')}p{font-family:z}</style><p>x</p>",
    "table-background": '<table background="HIT"><tr><td>x</td></tr></table>',
    "input-image": '<input type="image" src="HIT">',
    "video": '<video poster="HIT"></video>',
    "audio": '<audio src="HIT" preload="auto"></audio>',
    "refresh": '<meta http-equiv="refresh" content="0;url=HIT">',
    "base": '<base href="HIT/"><img src="x">',
    "form": '<form id="f" action="HIT" method="post"></form><script>document.forms.f.submit()</script>',
    "top": "<script>top.postMessage('x', '*'); new Image().src = 'HIT'</script>",
    "open": "<script>window.open('HIT')</script>",
}
HOSTILE_TEXT: Mapping[str, str] = {
    "close": "</pre><img src=HIT>",
    "close-all": "</pre></section></main></body></html><script src=HIT></script>",
    "textarea": "</textarea></title></style><img src=HIT>",
    "comment": "--><img src=HIT>",
    "attribute": '" onfocus="fetch(\'HIT\')" autofocus tabindex="0" style="background:url(HIT)',
}
# What acts only in our own page, with htmx and page.js there; and what steers terminals.
ONLY_IN_THE_PAGE: Mapping[str, str] = {
    "htmx": '<div hx-get="HIT" hx-trigger="load" data-events="HIT"></div>',
    "template": "{{ 7 * 7 }}{% include 'base.html' %}${7*7}",
    "title": "\x1b]0;owned\x07\x9d0;owned\x9c",
    "link": "\x1b]8;;HIT\x07click\x1b]8;;\x07",
    "colours": "\x1b[31m" + "\x1b[1;32;45mx" * 8_000,
    "clear": "\x1b[2J\x1b[H\x1b[?1049h\x1b[6n\x1bc",
    "direction": "\u202egnp.exe\u2066\u200b",
    "nulls": "\x00\x01\x08\x7f\x85\u2028\ufeff",
    "unended": "\x1b]0;" + "A" * 9_000 + "\x1b[",
    "huge": "M" * 3_000_000,
    "lines": "\n" * 300_000,
}
