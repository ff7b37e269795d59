"""A harness for verifiers, which asks the model once: its own ones start a program with uv."""

from __future__ import annotations

from typing import Any

import httpx
import verifiers.v1 as vf


class SpeakingHarness(vf.Harness[vf.HarnessConfig]):
    """Send the prompt to the endpoint of the rollout."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, *more: Any, **others: Any
    ) -> vf.ProgramResult:
        """Speak once, and say how it ended."""
        prompt = trace.task.data.prompt
        body = {"model": ctx.model, "messages": [{"role": "user", "content": prompt}]}
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(trust_env=False) as client:
            answer = await client.post(f"{endpoint}/chat/completions", json=body, headers=headers)
        return vf.ProgramResult(exit_code=int(answer.status_code != 200), stdout="", stderr=answer.text)


__all__ = ["SpeakingHarness"]
