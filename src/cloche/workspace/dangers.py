"""Changes that run, or steer, something on the host once they are there, so that each needs a yes of its own.

One table says which names; beside it are executables and links, which no name tells. It is compared without regard to
letters' case, at any depth: what a tool reads at the top of a project it reads at the top of the next one, too. Whether
a link leads out through another link is not looked at, but one that goes up behind a name is named.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..core.changes import Change

Form = Literal["name", "folder", "prefix", "suffix", "path"]

GIT = "git reads it, and may run what it names"
OTHER_VERSIONS = "a version control system reads it, and may run what it names"
CI = "a continuous integration service runs it"
SHELL = "a shell, or a tool of its own, runs it when it starts"
EDITOR = "an editor may run what it names when the folder is opened"
BUILD = "a build, test or package tool runs it, or what it names"
AGENT = "agents take their instructions from it"
CLOCHE = "it steers Cloche"
EXECUTABLE = "it is executable"
LEAVES = "the link leads out of the folder"
INTO_GIT = "the link leads into git's own folder"
WINDS = "the link goes up behind a name, where another link may lead it out of the folder"
COMPILED = "it is compiled code, which no diff shows"
WRITABLE = "every user of the host may write to it"


@dataclass(frozen=True, slots=True)
class Row:
    """Hold a pattern, in lower case, and the reason.

    `name` is that of a file, `folder` one of the folders it is in (or a link in place of one), `path` its last names,
    `prefix` and `suffix` begin and end its name, or that of a folder.
    Where it `guards`, to remove it is a danger, too.
    """

    form: Form
    pattern: str
    reason: str
    guards: bool = False


def _rows(form: Form, reason: str, patterns: str, *, guards: bool = False) -> tuple[Row, ...]:
    return tuple(Row(form, pattern, reason, guards) for pattern in patterns.split())


TABLE: tuple[Row, ...] = (
    *_rows("name", GIT, ".gitattributes .gitmodules .gitconfig .lfsconfig", guards=True),
    *_rows("folder", GIT, ".git .githooks .husky .hooks", guards=True),
    *_rows("path", GIT, ".config/git/config"),
    *_rows("folder", OTHER_VERSIONS, ".hg .jj .bzr .svn _darcs", guards=True),
    # Any folder with these and `objects` and `refs` in it is a repository to git, which runs what its `config` names.
    *_rows("name", GIT, "head"),
    *_rows("name", CI,
           ".gitlab-ci.yml .gitlab-ci.yaml jenkinsfile azure-pipelines.yml azure-pipelines.yaml .travis.yml"
           " appveyor.yml .appveyor.yml .drone.yml .cirrus.yml bitbucket-pipelines.yml cloudbuild.yaml cloudbuild.yml"
           " buildspec.yml codefresh.yml .woodpecker.yml .woodpecker.yaml wercker.yml .semaphore.yml", guards=True),
    *_rows("path", CI, ".github/dependabot.yml", guards=True),
    *_rows("name", CI, "codeowners", guards=True),
    *_rows("folder", CI, ".circleci .buildkite .woodpecker .teamcity .semaphore .tekton", guards=True),
    *_rows("path", CI,
           ".github/workflows/* .github/actions/* .gitea/workflows/* .forgejo/workflows/* .gitlab/ci/*", guards=True),
    *_rows("prefix", CI, "jenkinsfile."),
    *_rows("name", SHELL,
           ".envrc .env .bashrc .bash_profile .bash_login .bash_logout .bash_aliases .profile .zshrc .zshenv"
           " .zprofile .zlogin .zlogout .kshrc .cshrc .tcshrc .login .inputrc config.fish .tool-versions .mise.toml"
           " mise.toml .tmux.conf .screenrc .gdbinit .lldbinit .pdbrc .pythonrc .pythonrc.py .rprofile .renviron"
           " .irbrc .pryrc .psqlrc .sqliterc .netrc .curlrc .wgetrc .hgrc .autoenv .autoenv.zsh"),
    *_rows("path", SHELL, ".ssh/* .config/fish/* .config/systemd/* .direnv/*"),
    *_rows("folder", EDITOR,
           ".vscode .idea .fleet .zed .vs .devcontainer .vim .nvim .emacs.d .sublime .theia"),
    *_rows("name", EDITOR,
           ".vimrc .gvimrc .exrc .nvimrc .nvim.lua .lvimrc .local.vimrc .dir-locals.el .dir-locals-2.el .emacs"
           " .devcontainer.json .ycm_extra_conf.py .projectile .nanorc"),
    *_rows("suffix", EDITOR, ".code-workspace .sublime-project .iml"),
    *_rows("name", BUILD,
           "package.json setup.py setup.cfg pyproject.toml conftest.py sitecustomize.py usercustomize.py noxfile.py"
           " tox.ini pytest.ini .pytest.ini tasks.py dodo.py fabfile.py sconstruct sconscript wscript pipfile"
           " makefile gnumakefile bsdmakefile cmakelists.txt cmakepresets.json meson.build build.ninja configure"
           " configure.ac build.rs cargo.toml build.zig rust-toolchain rust-toolchain.toml build.gradle"
           " build.gradle.kts settings.gradle settings.gradle.kts gradle.properties init.gradle pom.xml build.xml"
           " build.sbt build.sc mvnw mvnw.cmd gradlew gradlew.bat dockerfile containerfile docker-compose.yml"
           " docker-compose.yaml compose.yml compose.yaml docker-compose.override.yml docker-compose.override.yaml"
           " vagrantfile procfile .npmrc .pnpmfile.cjs pnpm-workspace.yaml bunfig.toml deno.json deno.jsonc"
           " lerna.json nx.json turbo.json gulpfile.js gulpfile.mjs gulpfile.ts gruntfile.js gruntfile.ts .babelrc"
           " .babelrc.js .mocharc.js .mocharc.json .pre-commit-config.yaml .pre-commit-hooks.yaml lefthook.yml"
           " .lefthook.yml .lintstagedrc .overcommit.yml rakefile gemfile .rspec justfile .justfile taskfile.yml"
           " taskfile.yaml earthfile tiltfile skaffold.yaml build build.bazel workspace workspace.bazel module.bazel"
           " .bazelrc buck .buckconfig composer.json mix.exs rebar.config package.swift podfile fastfile"
           " directory.build.props directory.build.targets nuget.config default.nix shell.nix flake.nix pip.conf"
           " .pypirc uv.toml .condarc environment.yml go.work"),
    *_rows("prefix", BUILD,
           ".yarnrc dockerfile. containerfile. makefile. .eslintrc .prettierrc eslint.config. prettier.config."
           " vite.config. vitest.config. webpack.config. rollup.config. jest.config. babel.config. next.config."
           " postcss.config. tailwind.config. playwright.config. svelte.config. astro.config. nuxt.config."
           " karma.conf. .lintstagedrc. lint-staged.config. esbuild.config. metro.config."),
    *_rows("suffix", BUILD,
           ".pth .egg-link .mk .gemspec .podspec .csproj .vbproj .fsproj .vcxproj .sln .cabal"),
    *_rows("name", BUILD,
           ".pylintrc pylintrc pylintrc.toml mypy.ini .mypy.ini .flake8 .coveragerc .ghci ansible.cfg snakefile"
           " phpunit.xml phpunit.xml.dist .rubocop.yml .releaserc"),
    *_rows("suffix", COMPILED, ".so .pyd .dll .dylib .node .jar .class .exe"),
    *_rows("folder", BUILD, ".cargo .mvn .yarn .bundle .gradle"),
    *_rows("name", AGENT,
           "agents.md agents.override.md claude.md claude.local.md gemini.md qwen.md warp.md skill.md .cursorrules"
           " .windsurfrules .clinerules .goosehints .roorules .roomodes .rules .mcp.json mcp.json .aider.conf.yml"
           " .cursorignore .aiderignore .geminiignore opencode.json crush.json copilot-instructions.md", guards=True),
    *_rows("folder", AGENT,
           ".cursor .claude .codex .gemini .windsurf .clinerules .roo .kiro .opencode .continue .agents .amazonq"
           " .junie .augment .goose", guards=True),
    *_rows("path", AGENT,
           ".github/copilot-instructions.md .github/instructions/* .github/prompts/* .github/agents/*"
           " .github/chatmodes/*", guards=True),
    *_rows("prefix", AGENT, ".aider.", guards=True),
    *_rows("prefix", CLOCHE, ".cloche", guards=True),
    *_rows("name", CLOCHE, "cloche.yaml cloche.yml cloche.toml", guards=True),
)  # fmt: skip
_BESIDE_HEAD = frozenset({"config", "config.worktree", "commondir"})
_BY_NAME: dict[str, list[Row]] = defaultdict(list)
for _row in TABLE:
    if _row.form not in ("prefix", "suffix"):
        _BY_NAME[_row.pattern.partition("/")[0]].append(_row)
_AFFIXED = tuple(row for row in TABLE if row.form in ("prefix", "suffix"))
_PREFIXES = tuple(row.pattern for row in _AFFIXED if row.form == "prefix")
_SUFFIXES = tuple(row.pattern for row in _AFFIXED if row.form == "suffix")


def may_steer_git(path: str) -> bool:
    """Tell whether a file is git's own where the folder that it is in is a repository, as any with a `HEAD` may be."""
    return path.rpartition("/")[2].casefold() in _BESIDE_HEAD


def dangers_of(change: Change, *, is_beside_head: bool = False) -> tuple[str, ...]:
    """Return the reasons why a change needs a yes of its own; none where it does not.

    `is_beside_head` says that the folder which it is in has a `HEAD`, on the host or in the sandbox.
    """
    reasons: dict[str, None] = {GIT: None} if is_beside_head and may_steer_git(change.path) else {}
    for path, is_removed in _touched(change):
        for row in _rows_for(path):
            if (row.guards or not is_removed) and matches(row, path):
                reasons[row.reason] = None
    if _is_executable(change):
        reasons[EXECUTABLE] = None
    if _becomes_writable(change):
        reasons[WRITABLE] = None
    if change.kind == "link" and change.what != "removed":
        reasons.update(dict.fromkeys(_dangers_of_link(change.path, change.target)))
    return tuple(reasons)


def _touched(change: Change) -> list[tuple[str, bool]]:
    """Return the paths that something comes to, or goes from. A folder is nothing without what is in it."""
    touched = []
    if change.kind != "directory":
        touched.append((change.path, change.what == "removed"))
    if change.old_path:
        touched.append((change.old_path, True))
    if change.old_kind and change.kind == "directory":
        touched.append((change.path, True))
    return touched


def _rows_for(path: str) -> Iterator[Row]:
    """Yield the rows that may match a path: there may be very many paths, and most rows are for one name."""
    for name in path.casefold().split("/"):
        yield from _BY_NAME.get(name, ())
        if name.startswith(_PREFIXES) or name.endswith(_SUFFIXES):
            yield from _AFFIXED


def matches(row: Row, path: str) -> bool:
    """Tell whether a path is one of a row's."""
    names = path.casefold().split("/")
    match row.form:
        case "name":
            return names[-1] == row.pattern
        case "folder":
            return row.pattern in names
        case "prefix":
            return any(name.startswith(row.pattern) for name in names)
        case "suffix":
            return any(name.endswith(row.pattern) for name in names)
        case "path":
            wanted = row.pattern.split("/")
            if wanted[-1] == "*":
                wanted.pop()
                return any(names[at : at + len(wanted)] == wanted for at in range(len(names)))
            return names[-len(wanted) :] == wanted


def _is_executable(change: Change) -> bool:
    """Tell whether a program comes to be, or is another one by then."""
    if change.kind != "file" or change.what == "removed":
        return False
    if change.what == "modified":
        return bool(change.mode & 0o111)
    was = change.old_mode if change.what != "added" and not change.old_kind else 0
    return bool(change.mode & 0o111 & ~was)


def _becomes_writable(change: Change) -> bool:
    if change.kind == "link" or change.what == "removed":
        return False
    was = change.old_mode if change.what != "added" and not change.old_kind else 0
    return bool(change.mode & 0o002 & ~was)


def _dangers_of_link(path: str, target: str) -> list[str]:
    """Return what is wrong with where a link leads, by its own words alone."""
    if target.startswith("/"):
        return [LEAVES]
    here = path.split("/")[:-1]
    is_behind_name = winds = False
    for name in target.split("/"):
        if name == "..":
            if not here:
                return [LEAVES]
            here.pop()
            winds = winds or is_behind_name
        elif name not in ("", "."):
            here.append(name)
            is_behind_name = True
    into_git = any(name.casefold().rstrip(". ") == ".git" for name in here)
    return [reason for reason, holds in ((INTO_GIT, into_git), (WINDS, winds)) if holds]
