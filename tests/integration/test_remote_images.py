"""Images at a service: by digest, and only those that its settings allow, by the wire and by REST."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

import cloche
from cloche.backends.cloche import ClocheBackend
from cloche.core.errors import InvalidRequest, PolicyDenied
from tests.harness.containers import Daemon
from tests.harness.remote import account_at
from tests.harness.service import serving

IMAGE = "cloche-test:sessions"
ABSENT = f"example.org/absent@sha256:{'0' * 64}"


@pytest.mark.root
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("settings_of_nobody")
def test_an_image_that_the_daemon_has_may_be_named_by_its_digest(docker: Daemon, tmp_path: Path) -> None:
    """Runs and live sandboxes are in it, for a key below admin; one that is not there is refused, and never pulled."""
    words = ["docker", "-H", docker.url, "image", "inspect", "--format", "{{.Id}}", docker.image(IMAGE)]
    image = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
    (tmp_path / "cloche").mkdir()
    config = "sandbox: {backend: docker, images_allow: [present]}"
    (tmp_path / "cloche" / "cloche.yaml").write_text(config)
    variables = {"DOCKER_HOST": docker.url, "CLOCHE_RUNSC": "none", "CLOCHE_IMAGE_PYTHON": IMAGE}
    with serving(tmp_path, **variables) as service:
        account = account_at(service.address, service.new_key("run", "read"))
        backend = ClocheBackend(account).with_images({"*": image})
        result = cloche.run("import os; os.path.exists('/.dockerenv')", backend=backend)
        assert (result.value, result.meta["backend"]) == (True, "cloche"), result.stderr
        with cloche.Sandbox(backend=backend, live=True) as sandbox:
            assert sandbox.exec(["test", "-e", "/.dockerenv"]).ok
        with pytest.raises(PolicyDenied, match="is not here"):
            cloche.run("1", backend=ClocheBackend(account).with_images({"*": ABSENT}))
        with service.client(account.api_key.reveal()) as client:
            body: dict[str, Any] = {"code": "print(1)", "image": image}
            assert client.post("/api/code/exec", json=body).json()["stdout"] == "1\n"
            refused = client.post("/api/code/exec", json={**body, "image": IMAGE})
            assert (refused.status_code, "no image by digest" in refused.json()["detail"]) == (422, True), refused.text


def test_an_image_without_a_digest_is_not_sent() -> None:
    """Its name could mean another content there."""
    with pytest.raises(InvalidRequest, match="by its digest"):
        ClocheBackend().with_images({"*": "python:3.12"})
