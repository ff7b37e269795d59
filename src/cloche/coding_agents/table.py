"""The known coding agents, one row each. `docs/coding-agents.md` lists the versions that were tried.

The rows of goose and cursor-agent were not tried: their packages are in neither npm nor PyPI.
"""

from __future__ import annotations

from collections.abc import Mapping

from .row import CodingAgent, Login, Package

_CLAUDE_SETTINGS = (
    '{"hasCompletedOnboarding": true, "bypassPermissionsModeAccepted": true, "projects": {"{project}": '
    '{"hasTrustDialogAccepted": true}}}'
)
_CLAUDE_KEY = '{"customApiKeyResponses": {"approved": ["{ANTHROPIC_API_KEY_end}"]}}'
_CLAUDE_LOGIN = (
    '{"claudeAiOauth": {"accessToken": "{access_token}", "refreshToken": "{refresh_token}", "expiresAt": {expires_ms}, '
    '"scopes": ["user:inference", "user:profile", "user:sessions:claude_code"]}}'
)
# At its start it is told the limits by the program that shows them, whatever its instructions file says by then.
_CLAUDE_OPTIONS = (
    '{"sandbox":{"enabled":false},"hooks":{"SessionStart":[{"hooks":[{"type":"command","command":"cloche-why"}]}]}}'
)
_CODEX_LOGIN = (
    '{"auth_mode": "chatgpt", "OPENAI_API_KEY": null, "tokens": {"id_token": "{id_token}", "access_token": '
    '"{access_token}", "refresh_token": "{refresh_token}", "account_id": "{account_id}"}, "last_refresh": "{now}"}'
)
_GEMINI_LOGIN = (
    '{"access_token": "{access_token}", "refresh_token": "{refresh_token}", "id_token": "{id_token}", "token_type": '
    '"Bearer", "scope": "https://www.googleapis.com/auth/cloud-platform", "expiry_date": {expires_ms}}'
)
_GEMINI_SETTINGS = (
    '{"security": {"toolSandboxing": false}, "privacy": {"usageStatisticsEnabled": false}, '
    '"general": {"enableAutoUpdate": false, "enableAutoUpdateNotification": false}}'
)
_QWEN_SETTINGS = (
    '{"security": {"folderTrust": {"enabled": false}}, "privacy": {"usageStatisticsEnabled": false}, '
    '"general": {"enableAutoUpdate": false}, "$version": 4}'
)
_USES_KEY = '{"security": {"auth": {"selectedType": "%s"}}}'
_CODEX_OFF = tuple(
    word
    for key in (
        "check_for_update_on_startup",
        "analytics.enabled",
        "tui.show_tooltips",
        "features.apps",  # the connectors of an account
        "features.plugins",
        "skills.bundled.enabled",  # else it writes its own skills into its home, among those that are reviewed
    )
    for word in ("-c", f"{key}=false")
)
_OPENCODE_CONFIG = '{"autoupdate": false, "share": "disabled"}'
# Its questions are switched off by a setting alone, so `--ask` has no effect.
_AMP_SETTINGS = (
    '{"amp.dangerouslyAllowAll": true, "amp.updates.mode": "disabled", "amp.remoteThreadCreation.enabled": false}'
)
_MODEL_KEYS = ("ANTHROPIC_API_KEY", "OPENAI_API_KEY", "GEMINI_API_KEY")  # of agents that use many providers
_OPENROUTER = "OPENROUTER_API_KEY@openrouter.ai"
_LITELLM = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # else it asks raw.githubusercontent.com for prices

TABLE: Mapping[str, CodingAgent] = {
    agent.name: agent
    for agent in (
        CodingAgent(
            name="claude",
            title="Claude Code",
            program="claude",
            package=Package(
                registry="npm", name="@anthropic-ai/claude-code", scripts=("@anthropic-ai/claude-code",), node=18
            ),
            arguments=("--settings", _CLAUDE_OPTIONS),
            without_questions=("--dangerously-skip-permissions",),
            for_prompt=("--print", "{prompt}"),
            to_resume=("--continue",),
            conversations=(".claude/projects/*/*.jsonl",),
            env={
                "IS_SANDBOX": "1", "DISABLE_TELEMETRY": "1", "DISABLE_ERROR_REPORTING": "1", "DISABLE_AUTOUPDATER": "1",
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "ENABLE_CLAUDEAI_MCP_SERVERS": "false",
                "CLAUDE_CODE_DISABLE_OFFICIAL_MARKETPLACE_AUTOINSTALL": "1",
            },
            passed=("ANTHROPIC_MODEL",),
            secrets=("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "CLAUDE_CODE_OAUTH_TOKEN"),
            login=Login(
                provider="anthropic", file=".claude/.credentials.json", template=_CLAUDE_LOGIN,
                command=("auth", "login"),
                browser=("https://claude.ai", "https://claude.com", "https://platform.claude.com"),
            ),
            hosts=("api.anthropic.com", "claude.ai", "claude.com", "platform.claude.com"),
            telemetry=("http-intake.logs.us5.datadoghq.com", "browser-intake-us5-datadoghq.com"),
            first_files={
                ".claude.json": _CLAUDE_SETTINGS,
                ".claude/settings.json": '{"skipDangerousModePermissionPrompt": true}',
            },
            key_files={"ANTHROPIC_API_KEY": {".claude.json": _CLAUDE_KEY}},
            shown=(".claude/skills", ".claude/agents", ".claude/commands"),
            copied={
                ".claude/CLAUDE.md": (),
                ".claude/settings.json": ("model", "theme", "outputStyle", "language", "editorMode", "effortLevel"),
            },
            state_to_review=(
                ".claude/settings*.json", ".claude/CLAUDE.md", ".claude/hooks/**", ".claude/plugins/**",
                ".claude/agents/**", ".claude/commands/**", ".claude/skills/**", ".claude/rules/**",
                ".claude/output-styles/**", ".claude/projects/*/memory/**", ".claude.json#mcpServers",
                ".claude.json#projects.*.mcpServers", ".claude.json#projects.*.enabledMcpjsonServers",
                ".claude.json#projects.*.allowedTools", ".claude.json#env", ".claude.json#apiKeyHelper",
            ),
            instructions=".claude/CLAUDE.md",
        ),
        CodingAgent(
            name="codex",
            title="Codex",
            program="codex",
            package=Package(registry="npm", name="@openai/codex", node=16),
            arguments=(
                "--sandbox", "danger-full-access", "-c", 'projects={"{project}"={trust_level="trusted"}}',
                *_CODEX_OFF,
            ),
            without_questions=("--ask-for-approval", "never"),
            for_prompt=("exec", "--skip-git-repo-check", "{prompt}"),
            to_resume=("resume", "--last"),
            secrets=("OPENAI_API_KEY", "CODEX_API_KEY"),
            login=Login(
                provider="openai", file=".codex/auth.json", template=_CODEX_LOGIN, command=("login",),
                browser=("https://auth.openai.com",), callback_ports=(1455, 1457),
            ),
            hosts=("api.openai.com", "chatgpt.com", "auth.openai.com"),
            telemetry=("ab.chatgpt.com", "raw.githubusercontent.com"),
            first_files={".codex/config.toml": "[tui]\nscreen_reader_detection_done = true\n"},  # else it notes that
            key_files={"OPENAI_API_KEY": {".codex/auth.json": '{"OPENAI_API_KEY": "{OPENAI_API_KEY}"}'}},
            shown=(".codex/skills", ".codex/prompts"),
            copied={
                ".codex/AGENTS.md": (),
                ".codex/config.toml": ("model", "model_reasoning_effort", "model_reasoning_summary", "personality"),
            },
            state_to_review=(
                ".codex/config.toml", ".codex/hooks.json", ".codex/AGENTS*.md", ".codex/prompts/**", ".codex/skills/**",
                ".codex/rules/**", ".codex/memories/**",
            ),
            instructions=".codex/AGENTS.md",
        ),
        CodingAgent(
            name="gemini",
            title="Gemini CLI",
            program="gemini",
            package=Package(registry="npm", name="@google/gemini-cli", node=20),
            arguments=("--skip-trust",),
            without_questions=("--yolo",),
            for_prompt=("--prompt", "{prompt}"),
            to_resume=("--resume", "latest"),
            env={"GEMINI_TELEMETRY_ENABLED": "false", "NO_BROWSER": "true"},
            passed=("GEMINI_MODEL",),
            secrets=("GEMINI_API_KEY", "GOOGLE_API_KEY"),
            login=Login(
                provider="google", file=".gemini/oauth_creds.json", template=_GEMINI_LOGIN, command=("--skip-trust",),
                env={"GOOGLE_GENAI_USE_GCA": "true"}, browser=("https://accounts.google.com",),
            ),
            hosts=("generativelanguage.googleapis.com", "cloudcode-pa.googleapis.com", "oauth2.googleapis.com"),
            telemetry=("play.googleapis.com",),
            first_files={".gemini/settings.json": _GEMINI_SETTINGS},
            key_files={"GEMINI_API_KEY": {".gemini/settings.json": _USES_KEY % "gemini-api-key"}},
            shown=(".gemini/commands", ".gemini/skills"),
            copied={".gemini/GEMINI.md": (), ".gemini/settings.json": ("model", "ui")},
            state_to_review=(
                ".gemini/settings.json", ".gemini/GEMINI.md", ".gemini/extensions/**", ".gemini/hooks/**",
            ),
            instructions=".gemini/GEMINI.md",
        ),
        CodingAgent(
            name="qwen",
            title="Qwen Code",
            program="qwen",
            package=Package(registry="npm", name="@qwen-code/qwen-code", node=22),
            without_questions=("--yolo",),
            for_prompt=("--prompt", "{prompt}"),
            to_resume=("--continue",),
            env={"QWEN_TELEMETRY_ENABLED": "false"},
            passed=("OPENAI_MODEL", "OPENAI_BASE_URL"),
            secrets=("OPENAI_API_KEY", "DASHSCOPE_API_KEY@dashscope.aliyuncs.com,dashscope-intl.aliyuncs.com"),
            hosts=("chat.qwen.ai", "portal.qwen.ai"),
            telemetry=("rum.aliyuncs.com", "gb4w8c3ygj-default-sea.rum.aliyuncs.com"),
            first_files={".qwen/settings.json": _QWEN_SETTINGS},
            key_files={"OPENAI_API_KEY": {".qwen/settings.json": _USES_KEY % "openai"}},
            shown=(".qwen/commands", ".qwen/skills", ".qwen/agents"),
            copied={".qwen/QWEN.md": (), ".qwen/settings.json": ("model", "ui")},
            state_to_review=(".qwen/settings.json", ".qwen/QWEN.md", ".qwen/extensions/*/**", ".qwen/hooks/**"),
            instructions=".qwen/QWEN.md",
        ),
        CodingAgent(
            name="opencode",
            title="OpenCode",
            program="opencode",
            package=Package(registry="npm", name="opencode-ai", scripts=("opencode-ai",)),
            without_questions=("--auto",),
            for_prompt=("run", "--auto", "{prompt}"),
            to_resume=("--continue",),
            env={
                "OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1",
                "OPENCODE_DISABLE_LSP_DOWNLOAD": "1", "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
                "OPENCODE_DISABLE_SHARE": "1", "OPENCODE_CONFIG_CONTENT": _OPENCODE_CONFIG,
            },
            secrets=(*_MODEL_KEYS, _OPENROUTER, "OPENCODE_API_KEY@opencode.ai"),
            telemetry=("models.opencode.ai", "models.dev"),
            shown=(".config/opencode/agent", ".config/opencode/command", ".config/opencode/skills"),
            copied={".config/opencode/AGENTS.md": (), ".config/opencode/opencode.json": ("model", "theme", "keybinds")},
            state_to_review=(
                ".config/opencode/opencode.json", ".config/opencode/AGENTS.md", ".config/opencode/plugin*/**",
            ),
            instructions=".config/opencode/AGENTS.md",
        ),
        CodingAgent(
            name="aider",
            title="aider",
            program="aider",
            package=Package(registry="pypi", name="aider-chat", python="3.12,3.11,3.10"),
            tools=("git",),
            arguments=(
                "--chat-history-file", "{home}/.aider/chat.history.md",
                "--input-history-file", "{home}/.aider/input.history",
            ),
            without_questions=("--yes-always",),
            for_prompt=("--message", "{prompt}"),
            to_resume=("--restore-chat-history",),
            env={
                "AIDER_CHECK_UPDATE": "false", "AIDER_ANALYTICS": "false", "AIDER_SHOW_RELEASE_NOTES": "false",
                "AIDER_GITIGNORE": "false", "AIDER_SHOW_MODEL_WARNINGS": "false", **_LITELLM,
            },
            passed=("AIDER_MODEL",),
            secrets=(*_MODEL_KEYS, _OPENROUTER, "DEEPSEEK_API_KEY@api.deepseek.com"),
            telemetry=("us.i.posthog.com", "raw.githubusercontent.com"),
            state_to_review=(".aider.conf.yml", ".env"),
        ),
        CodingAgent(
            name="mini-swe-agent",
            title="mini-SWE-agent",
            program="mini",
            package=Package(registry="pypi", name="mini-swe-agent"),
            tools=("git",),
            without_questions=("--yolo",),
            for_prompt=("--exit-immediately", "--task", "{prompt}"),
            env={"MSWEA_CONFIGURED": "true", "MSWEA_SILENT_STARTUP": "1", **_LITELLM},
            passed=("MSWEA_MODEL_NAME",),
            secrets=(*_MODEL_KEYS, _OPENROUTER),
            telemetry=("raw.githubusercontent.com",),
            copied={".config/mini-swe-agent/mini.yaml": ()},
            state_to_review=(".config/mini-swe-agent/*.y*ml", ".config/mini-swe-agent/.env"),
        ),
        CodingAgent(
            name="openhands",
            title="OpenHands",
            program="openhands",
            package=Package(registry="pypi", name="openhands", python="3.12"),
            tools=("git",),
            arguments=("--override-with-envs",),
            without_questions=("--always-approve",),
            for_prompt=("--headless", "--task", "{prompt}"),
            to_resume=("--resume", "--last"),
            env={"DO_NOT_TRACK": "1", "OPENHANDS_SUPPRESS_BANNER": "1", **_LITELLM},
            passed=("LLM_MODEL", "LLM_BASE_URL"),
            secrets=("LLM_API_KEY@api.anthropic.com,api.openai.com,openrouter.ai",),
            telemetry=("us.i.posthog.com", "raw.githubusercontent.com"),
            shown=(".openhands/skills",),
            state_to_review=(
                ".openhands/*.json", ".openhands/*.toml", ".openhands/hooks/**", ".openhands/skills/**",
                ".openhands/microagents/**",
            ),
        ),
        CodingAgent(
            name="copilot",
            title="GitHub Copilot CLI",
            program="copilot",
            package=Package(registry="npm", name="@github/copilot", node=22),
            arguments=("--no-auto-update", "--disable-client-telemetry", "--no-remote"),
            without_questions=("--allow-all",),
            for_prompt=("--prompt", "{prompt}"),
            to_resume=("--continue",),
            env={"COPILOT_AUTO_UPDATE": "false"},
            secrets=tuple(
                f"{name}@api.github.com,github.com,api.githubcopilot.com,api.individual.githubcopilot.com,"
                "api.business.githubcopilot.com,api.enterprise.githubcopilot.com"
                for name in ("COPILOT_GITHUB_TOKEN", "GH_TOKEN", "GITHUB_TOKEN")
            ),
            telemetry=("copilot-telemetry.githubusercontent.com", "collector.github.com", "default.exp-tas.com"),
            first_files={".copilot/config.json": '{"trustedFolders": ["{project}"], "banner": "never"}'},
            shown=(".copilot/skills", ".copilot/agents"),
            copied={".copilot/copilot-instructions.md": (), ".copilot/settings.json": ("model", "theme")},
            state_to_review=(
                ".copilot/settings.json", ".copilot/mcp-config.json",
                ".copilot/copilot-instructions.md", ".copilot/installed-plugins/**",
            ),
            instructions=".copilot/copilot-instructions.md",
        ),
        CodingAgent(
            name="amp",
            title="Amp",
            program="amp",
            package=Package(registry="npm", name="@ampcode/cli", scripts=("@ampcode/cli",)),
            arguments=("--no-remote-control-terminal",),
            for_prompt=("--execute", "{prompt}"),
            to_resume=("last",),
            secrets=("AMP_API_KEY@ampcode.com",),
            hosts=("ampcode.com",),
            first_files={".config/amp/settings.json": _AMP_SETTINGS},
            shown=(".config/amp/skills", ".config/agents/skills"),
            copied={".config/amp/AGENTS.md": ()},
            state_to_review=(".config/amp/**",),
            instructions=".config/amp/AGENTS.md",
        ),
        CodingAgent(
            name="goose",
            title="goose",
            program="goose",
            arguments=("session",),
            for_prompt=("run", "--no-session", "--text", "{prompt}"),
            to_resume=("--resume",),
            env={"GOOSE_MODE": "auto", "GOOSE_DISABLE_KEYRING": "1", "GOOSE_TELEMETRY_ENABLED": "false"},
            passed=("GOOSE_PROVIDER", "GOOSE_MODEL"),
            secrets=(*_MODEL_KEYS, _OPENROUTER),
            telemetry=("us.i.posthog.com",),
            copied={".config/goose/.goosehints": ()},
            state_to_review=(".config/goose/**",),
            instructions=".config/goose/.goosehints",
        ),
        CodingAgent(
            name="cursor-agent",
            title="Cursor CLI",
            program="cursor-agent",
            arguments=("--sandbox", "disabled"),
            without_questions=("--force",),
            for_prompt=("--print", "{prompt}"),
            to_resume=("resume",),
            env={"AGENT_CLI_CREDENTIAL_STORE": "memory"},
            secrets=("CURSOR_API_KEY@api2.cursor.sh",),
            hosts=("api2.cursor.sh", "api3.cursor.sh"),
            telemetry=("metrics.cursor.sh",),
            state_to_review=(".cursor/**",),
        ),
    )
}  # fmt: skip
