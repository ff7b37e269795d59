"""Agents are on the page only with `--agents`."""

import asyncio
from pathlib import Path

import httpx
import pytest

from cloche.server.app import create_app
from cloche.server.service import ServiceOptions, opened


@pytest.mark.parametrize(("has_agents", "status"), [(False, 404), (True, 401)])
def test_agents_are_there_only_where_the_operator_asked_for_them(tmp_path: Path, has_agents: bool, status: int) -> None:
    """Without the option there is no such address; with it, one needs the cookie."""

    async def main() -> int:
        options = ServiceOptions(drain_s=1, has_agents=has_agents)
        async with opened(str(tmp_path / "records" / "records.db"), options) as service:
            transport = httpx.ASGITransport(create_app(service))
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                return (await client.get("/agents/claude-shop-00000000")).status_code

    assert asyncio.run(main()) == status
