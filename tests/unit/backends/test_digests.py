"""Digests by which a sandbox goes to a machine that has what it needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cloche.backends.cloche.ray import RayBackend
from cloche.backends.docker.images import image_digests
from cloche.core.limits import Limits
from cloche.core.policy import Policy

FIRST, SECOND = "sha256:" + "1" * 64, "sha256:" + "2" * 64


def test_a_lease_prefers_what_its_sandbox_needs_and_a_daemon_has() -> None:
    """Packages and the image, whatever name it has; a daemon has its images by their ids, too."""
    backend = RayBackend().with_images({"*": f"registry.example/python@{FIRST}"})
    spec = backend._spec(Policy(digests=("packages:a",)), Limits(cpus=0.5))  # type: ignore[attr-defined]
    assert (spec.cpus, spec.prefers) == (0.5, ("packages:a", f"image:{FIRST}"))
    assert backend._spec(Policy(), Limits(), sandboxes=3).memory_bytes == 3 * Limits().memory_bytes  # type: ignore[attr-defined]
    rows = [{"Id": SECOND, "Created": 1, "RepoDigests": [f"python@{FIRST}"]}, {"Id": FIRST, "Created": 2}]
    daemon: Any = SimpleNamespace(api=SimpleNamespace(images=lambda: rows))
    assert image_digests(daemon) == [f"image:{FIRST}", f"image:{SECOND}"]
