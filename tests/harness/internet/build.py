"""Namespaces, addresses, certificates and a file tree for the internet and its host."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from cloche.jail.syscalls import (
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWUSER,
    MS_BIND,
    MS_PRIVATE,
    MS_REC,
    call,
    prctl,
    unshare,
)

FOLDER = Path("/mnt")  # a tmpfs, in the private mount namespace
HOME = FOLDER / "home"
CERTIFICATES = Path("/etc/ssl/certs")
BUNDLE = CERTIFICATES / "ca-certificates.crt"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# The host's own addresses, its gateway, and the host's resolver, which is on the internet's side.
OWN, OWN_PRIVATE, OWN6 = "45.67.89.2", "10.99.0.2", "2a01:4f8::2"
GATEWAY, GATEWAY6, RESOLVER = "45.67.89.1", "2a01:4f8::1", "10.9.9.53"
HOST_DEVICE, INTERNET_DEVICE = "toinet", "tohost"
HOST_ROUTES = f"""
link set lo up
link set {HOST_DEVICE} up
address add {OWN}/24 dev {HOST_DEVICE}
address add {OWN_PRIVATE}/32 dev {HOST_DEVICE}
route add default via {GATEWAY}
"""
HOST_ROUTES6 = f"""
address add {OWN6}/64 dev {HOST_DEVICE} nodad
route add default via {GATEWAY6}
"""
# Every address but the host's is one of the internet's own. The routes stand in the main table, where the host's
# network, which is longer, comes first.
INTERNET_ROUTES = f"""
link set lo up
link set {INTERNET_DEVICE} up
address add {GATEWAY}/24 dev {INTERNET_DEVICE}
route add {OWN_PRIVATE}/32 dev {INTERNET_DEVICE}
route add local 0.0.0.0/0 dev lo table main
"""
INTERNET_ROUTES6 = f"""
address add {GATEWAY6}/64 dev {INTERNET_DEVICE} nodad
route add local ::/0 dev lo table main
"""
FILES = {
    "/etc/resolv.conf": f"nameserver {RESOLVER}\noptions timeout:2 attempts:1\n",
    "/etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
LINUX_CAPABILITY_VERSION_3, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 0x20080522, 47, 2
EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")


def program(name: str) -> str:
    """Return the path of a program of the system's."""
    found = shutil.which(name, path=SYSTEM_PATH)
    if found is None:
        raise FileNotFoundError(f"missing: {name} (make setup-system)")
    return found


def enter_namespaces() -> None:
    """Give this process namespaces of its own; an ordinary user keeps the own id in one of users."""
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        unshare(CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC)
    else:
        unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC)
        maps = {"setgroups": "deny", "uid_map": f"{uid} {uid} 1", "gid_map": f"{gid} {gid} 1"}
        for name, text in maps.items():
            Path(f"/proc/self/{name}").write_text(text)
        hand_on_capabilities()
    call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)


def hand_on_capabilities() -> None:
    """Give what this process starts the capabilities in its user namespace, which who is not root loses by `execve`."""
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    every = (1 << (last + 1)) - 1
    halves = [half for at in (0, 32) for half in [every >> at & 0xFFFFFFFF] * 3]
    call("capset", struct.pack("=Ii", LINUX_CAPABILITY_VERSION_3, 0), struct.pack("=6I", *halves))
    for number in range(last + 1):
        prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, number, 0, 0)


def build_files(names: Iterable[str]) -> None:
    """Mount the folder, and what a host has in `/etc`: names, and the certificates that it trusts."""
    _mount_tmpfs(FOLDER)
    HOME.mkdir()
    for number, (path, text) in enumerate(FILES.items()):
        own = FOLDER / f"file{number}"
        own.write_text(text)
        if os.path.exists(path):
            call("mount", os.fsencode(own), os.fsencode(os.path.realpath(path)), None, MS_BIND, None)
    _make_certificates(sorted(names))
    _mount_tmpfs(CERTIFICATES)
    authority = (FOLDER / "authority.pem").read_bytes()
    BUNDLE.write_bytes(authority)
    hashed = _openssl("x509", "-subject_hash", "-noout", "-in", f"{FOLDER}/authority.pem").strip()
    (CERTIFICATES / f"{hashed}.0").write_bytes(authority)


def _mount_tmpfs(folder: Path) -> None:
    call("mount", b"none", os.fsencode(folder), b"tmpfs", 0, b"mode=755")


def _make_certificates(names: Sequence[str]) -> None:
    """Make an authority, and one certificate for all names."""
    authority = (
        "-keyout",
        f"{FOLDER}/authority.key",
        "-out",
        f"{FOLDER}/authority.pem",
        "-subj",
        "/CN=Authority of tests",
    )
    _openssl("req", "-x509", *EC, *authority, "-addext", "keyUsage=critical,keyCertSign,cRLSign")
    subjects = ",".join(f"DNS:{name}" for name in names)
    server = ("-keyout", f"{FOLDER}/server.key", "-out", f"{FOLDER}/server.pem", "-subj", "/CN=Server of tests")
    signer = ("-CA", f"{FOLDER}/authority.pem", "-CAkey", f"{FOLDER}/authority.key")
    extensions = (f"subjectAltName={subjects}", "basicConstraints=critical,CA:FALSE", "extendedKeyUsage=serverAuth")
    added = [word for extension in extensions for word in ("-addext", extension)]
    _openssl("req", "-x509", *EC, *server, *signer, *added)


def _openssl(*words: str) -> str:
    done = subprocess.run([program("openssl"), *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"openssl {words[0]}: {done.stderr}")
    return done.stdout


def set_up(routes: str, *, is_optional: bool = False) -> None:
    """Carry out lines of `ip -batch`; what the kernel lacks may be left out."""
    done = subprocess.run([program("ip"), "-batch", "-"], input=routes, text=True, capture_output=True, check=False)
    if done.returncode and not is_optional:
        raise RuntimeError(f"ip: {done.stderr}")


def set_up6(routes: str) -> None:
    """Carry out lines about IPv6, which a host may not have."""
    done = subprocess.run(
        [program("ip"), "-6", "-batch", "-"], input=routes, text=True, capture_output=True, check=False
    )
    if done.returncode and Path("/proc/net/if_inet6").exists():
        raise RuntimeError(f"ip: {done.stderr}")
