"""The known coding agents, one row each. `docs/coding-agents.md` lists the versions that were tried."""

from __future__ import annotations

from collections.abc import Mapping

from .row import CodingAgent, Login, Package

_CLAUDE_SETTINGS = (
    '{"hasCompletedOnboarding": true, "bypassPermissionsModeAccepted": true, "projects": {"{project}": '
    '{"hasTrustDialogAccepted": true}}, "customApiKeyResponses": {"approved": ["{ANTHROPIC_API_KEY_end}"]}}'
)
_CLAUDE_LOGIN = (
    '{"claudeAiOauth": {"accessToken": "{access_token}", "refreshToken": "{refresh_token}", "expiresAt": {expires_ms}, '
    '"scopes": ["user:inference", "user:profile", "user:sessions:claude_code"]}}'
)

TABLE: Mapping[str, CodingAgent] = {
    agent.name: agent
    for agent in (
        CodingAgent(
            name="claude",
            title="Claude Code",
            program="claude",
            package=Package(
                registry="npm", name="@anthropic-ai/claude-code", scripts=("@anthropic-ai/claude-code",), node=22
            ),
            arguments=("--settings", '{"sandbox":{"enabled":false}}'),
            without_questions=("--dangerously-skip-permissions",),
            for_prompt=("--print", "{prompt}"),
            to_resume=("--continue",),
            env={
                "IS_SANDBOX": "1", "DISABLE_TELEMETRY": "1", "DISABLE_ERROR_REPORTING": "1", "DISABLE_AUTOUPDATER": "1",
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "ENABLE_CLAUDEAI_MCP_SERVERS": "false",
            },
            secrets=("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "CLAUDE_CODE_OAUTH_TOKEN"),
            login=Login(
                provider="anthropic", file=".claude/.credentials.json", template=_CLAUDE_LOGIN, command=("/login",),
                browser=("https://claude.ai", "https://claude.com", "https://platform.claude.com"),
            ),
            hosts=("api.anthropic.com", "claude.ai", "claude.com", "platform.claude.com"),
            telemetry=("http-intake.logs.us5.datadoghq.com", "browser-intake-us5-datadoghq.com"),
            first_files={".claude.json": _CLAUDE_SETTINGS},
            shown=(".claude/skills", ".claude/agents", ".claude/commands"),
            copied={
                ".claude/CLAUDE.md": (),
                ".claude/settings.json": ("model", "theme", "outputStyle", "language", "editorMode", "effortLevel"),
            },
            state_to_review=(
                ".claude/settings*.json", ".claude/CLAUDE.md", ".claude/hooks/**", ".claude/plugins/**", ".claude.json",
            ),
            instructions=".claude/CLAUDE.md",
        ),
        CodingAgent(
            name="codex",
            title="Codex",
            program="codex",
            package=Package(registry="npm", name="@openai/codex", node=16),
            arguments=("--dangerously-bypass-approvals-and-sandbox",),
            for_prompt=("exec", "{prompt}"),
            to_resume=("resume", "--last"),
            secrets=("CODEX_API_KEY", "OPENAI_API_KEY"),
            hosts=("api.openai.com", "chatgpt.com", "auth.openai.com"),
            telemetry=("ab.chatgpt.com",),
            shown=(".codex/skills", ".codex/prompts"),
            copied={
                ".codex/AGENTS.md": (),
                ".codex/config.toml": ("model", "model_reasoning_effort", "model_reasoning_summary", "personality"),
            },
            state_to_review=(".codex/config.toml", ".codex/hooks.json", ".codex/AGENTS.md"),
            instructions=".codex/AGENTS.md",
        ),
    )
}  # fmt: skip
