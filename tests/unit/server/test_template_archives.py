"""Archives of templates that a service which was killed has left."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path

from cloche.records import templates as records
from cloche.records.database import Database
from cloche.records.workers import own_worker
from cloche.records.writer import Writer
from cloche.server.sandbox_templates import Templates
from tests.harness.loops import in_loop


def test_what_a_killed_service_has_left_is_removed(tmp_path: Path) -> None:
    """Archives that were being written, after an hour; at once those of builds whose start command was being tried."""
    database = Database(tmp_path / "r.db")

    async def claim() -> None:
        writer = Writer(database)
        templates = Templates(database, writer, own_worker())
        begin = partial(
            records.begin, project="default", api_key=None, kind=records.TEMPLATE, name="t",
            worker=own_worker().rpartition("-")[0] + "-1", document={}, build={},
        )  # fmt: skip
        _, build = await templates.write(begin)
        os.makedirs(templates.folder)
        written = (os.path.join(templates.folder, f".7-{age}.cloche") for age in ("old", "new"))
        paths = [templates.path(build.id), *written]
        for path in paths:
            os.close(os.open(path, os.O_CREAT))
        os.utime(paths[1], (1, 1))
        await templates.tidy()
        assert os.listdir(templates.folder) == [".7-new.cloche"]
        assert (await templates.build_of(build.template_id, build.id)).status == records.ERROR
        await asyncio.to_thread(writer.close)

    in_loop(claim)
    database.close()
