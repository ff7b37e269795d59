"""The program: serve the API until a machine is to be started, then be its vsock until it ends."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler
from typing import Any

from .rings import Device
from .schema import VERSION, fault
from .vsock import Vsock

QEMU = "/usr/bin/qemu-system-x86_64"
CONFIG = struct.Struct("<Q")


class Calls(BaseHTTPRequestHandler):
    """Take calls of the API, in order."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "Firecracker API", ""
    taken: dict[str, Any]

    def do_PUT(self) -> None:
        """Take a call, or say what is wrong with it."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            found = json.loads(body)
            wrong = fault(self.path, found)
        except ValueError as error:
            wrong = str(error)
        if not wrong:
            self.taken[self.path] = found
        self._answer(400 if wrong else 204, {"fault_message": wrong} if wrong else None)
        if "/actions" in self.taken:
            self.close_connection = True

    def do_GET(self) -> None:
        """Tell the version."""
        self._answer(200, {"firecracker_version": VERSION})

    def _answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode() if body is not None else b""
        self.send_response(status)
        if data:
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if data:
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def take_calls(path: str) -> dict[str, Any]:
    """Serve the API until the machine is to be started; return all that was asked for."""
    taken: dict[str, Any] = {}
    kind = type("Calls", (Calls,), {"taken": taken})
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(4)
        while "/actions" not in taken:
            one, _ = listener.accept()
            with one:
                kind(one, ("", 0), None)  # type: ignore[arg-type]
    return taken


def words(taken: dict[str, Any], link: int, khz: int) -> list[str]:
    """Return what starts QEMU with that machine, emulated, and for that with one processor: see `Plan.processors`."""
    machine, boot, disk = taken["/machine-config"], taken["/boot-source"], taken["/drives/root"]
    size = f"{machine['mem_size_mib']}M"
    is_read_only = "on" if disk["is_read_only"] else "off"
    # Emulated, a guest must be told how fast its processor counts, and it ends by another way.
    more = f"reboot=t mitigations=off no5lvl tsc=reliable tsc_early_khz={khz}"
    return [
        QEMU, "-name", "cloche", "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none",
        "-machine", "microvm,rtc=on,memory-backend=memory", "-accel", "tcg,tb-size=128", "-cpu", "max",
        "-m", size, "-object", f"memory-backend-memfd,id=memory,size={size},share=on,reserve=off",
        "-global", "virtio-mmio.force-legacy=false",
        "-kernel", boot["kernel_image_path"], "-initrd", boot["initrd_path"], "-append", f"{boot['boot_args']} {more}",
        "-blockdev", f"driver=file,node-name=file,filename={disk['path_on_host']},read-only={is_read_only},locking=off",
        "-blockdev", f"driver=raw,node-name=root,file=file,read-only={is_read_only}",
        "-device", "virtio-blk-device,drive=root",
        "-chardev", f"socket,id=vsock,fd={link}", "-device", "vhost-user-vsock-device,chardev=vsock",
        "-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console",
    ]  # fmt: skip


def carry(vsock: Vsock, monitor: subprocess.Popen[bytes]) -> None:
    """Be the vsock; a machine without one has no use."""
    try:
        vsock.serve()
    finally:
        monitor.kill()


def main() -> int:
    """Be Firecracker."""
    import counter

    arguments = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    taken = take_calls(arguments["--api-sock"])
    ours, theirs = socket.socketpair()
    vsock = taken["/vsock"]
    device = Device(ours, CONFIG.pack(vsock["guest_cid"]), rings=2)
    carrier = Vsock(device, vsock["guest_cid"], vsock["uds_path"])
    line = words(taken, theirs.fileno(), counter.counter_khz())
    monitor = subprocess.Popen(line, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
    theirs.close()
    threading.Thread(target=carry, args=(carrier, monitor), daemon=True).start()
    status = monitor.wait()
    os._exit(status)
