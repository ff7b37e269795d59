"""The names of files that run code on the host, or control a tool that does, as data.

A row is a pattern and a reason, which says what runs the file and when. `RANKED` lists the reasons in the order in
which they are asked about: files that run without a build or a test come first. Tested and harmless, so without a row:
a Jupyter configuration in the working folder.
"""

from __future__ import annotations

from typing import Literal

from ..core.record import dataclass

Form = Literal["name", "folder", "prefix", "suffix", "glob", "path"]

GIT = "git reads it, and may run what it names"
OTHER_VERSIONS = "a version control system reads it, and may run what it names"
HOOKS = "git's hooks run what it names"
CI = "a continuous integration service runs it"
SHELL = "a shell, or a tool of its own, runs it when it starts"
STARTS = "a server, an interpreter or a debugger runs it when it starts there"
EDITOR = "an editor may run what it names when the folder is opened"
BUILD = "a build, test or package tool runs it, or what it names"
AGENT = "agents take their instructions from it"
CLOCHE = "it steers Cloche"
EXECUTABLE = "it is executable"
LEAVES = "the link leads out of the folder"
INTO_GIT = "the link leads into git's own folder"
WINDS = "the link goes up behind a name, where another link may lead it out of the folder"
TO_HIDDEN = "the link leads to what is hidden from the sandbox, or to a folder that holds it"
COMPILED = "it is compiled code, which no diff shows"
WINDOWS = "Windows runs it as a program"
WRITABLE = "every user of the host may write to it"
READABLE = "every user of the host may read it, and could not before"
TWIN = "another name there, which other file systems take for the same, differs from it in case or form alone"
UNKNOWN = "not all of the host's links could be followed, so it may have a name that runs it"
RANKED = (
    UNKNOWN, GIT, OTHER_VERSIONS, HOOKS, SHELL, EDITOR, AGENT, CLOCHE, INTO_GIT, LEAVES, TO_HIDDEN, WINDS, READABLE,
    WRITABLE, STARTS, CI, EXECUTABLE, COMPILED, WINDOWS, BUILD, TWIN,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DangerRow:
    """A pattern in lower case, and the reason.

    `name` matches a file name, `folder` the name of a folder above it (or of a link in place of one), `path` the last
    names of the path. `prefix` and `suffix` match the beginning and end of the file's or a folder's name, `glob` a file
    name with one `*`. With `guards`, removing the file is a danger too.
    """

    form: Form
    pattern: str
    reason: str
    guards: bool = False


def _rows(form: Form, reason: str, patterns: str, *, guards: bool = False) -> tuple[DangerRow, ...]:
    return tuple(DangerRow(form, pattern, reason, guards) for pattern in patterns.split())


TABLE: tuple[DangerRow, ...] = (
    *_rows("name", GIT, ".gitattributes .gitmodules .gitconfig .lfsconfig", guards=True),
    *_rows("folder", GIT, ".git .githooks .husky .hooks", guards=True),
    *_rows("path", GIT, ".config/git/config"),
    *_rows("folder", OTHER_VERSIONS, ".hg .jj .bzr .svn _darcs", guards=True),
    # Git treats a folder with these names, `objects` and `refs` as a repository, and runs programs that `config` names.
    *_rows("name", GIT, "head"),
    *_rows("name", CI,
           ".gitlab-ci.yml .gitlab-ci.yaml jenkinsfile azure-pipelines.yml azure-pipelines.yaml .travis.yml"
           " appveyor.yml .appveyor.yml .drone.yml .cirrus.yml bitbucket-pipelines.yml cloudbuild.yaml cloudbuild.yml"
           " buildspec.yml codefresh.yml .woodpecker.yml .woodpecker.yaml wercker.yml .semaphore.yml .readthedocs.yaml"
           " .readthedocs.yml netlify.toml .zuul.yaml zuul.yaml action.yml action.yaml", guards=True),
    *_rows("path", CI, ".github/dependabot.yml", guards=True),
    *_rows("name", CI, "codeowners", guards=True),
    *_rows("folder", CI, ".circleci .buildkite .woodpecker .teamcity .semaphore .tekton .builds .zuul.d", guards=True),
    *_rows("path", CI,
           ".github/workflows/* .github/actions/* .gitea/workflows/* .forgejo/workflows/* .gitlab/ci/*", guards=True),
    *_rows("prefix", CI, "jenkinsfile."),
    *_rows("name", SHELL,
           ".envrc .env .bashrc .bash_profile .bash_login .bash_logout .bash_aliases .profile .zshrc .zshenv"
           " .zprofile .zlogin .zlogout .kshrc .cshrc .tcshrc .login .inputrc config.fish .tool-versions .mise.toml"
           " mise.toml .mise.local.toml mise.local.toml .tmux.conf .screenrc .netrc .curlrc .wgetrc .hgrc .autoenv"
           " .autoenv.zsh .envrc.local devbox.json"),
    *_rows("path", SHELL,
           ".ssh/* .config/fish/* .config/systemd/* .direnv/* .mise/config.toml .config/mise.toml"
           " .config/mise/config.toml"),
    *_rows("name", STARTS,
           ".gdbinit .lldbinit .pdbrc .pythonrc .pythonrc.py .rprofile .renviron .irbrc .pryrc .psqlrc .sqliterc .ghci"
           " .iex.exs .ocamlinit .flaskenv gunicorn.conf.py"),
    *_rows("folder", EDITOR,
           ".vscode .idea .fleet .zed .vs .devcontainer .vim .nvim .emacs.d .sublime .theia .helix .bsp .run"
           " .externaltoolbuilders .idx"),
    *_rows("name", EDITOR,
           ".vimrc .gvimrc .exrc .nvimrc .nvim.lua .lvimrc .local.vimrc .dir-locals.el .dir-locals-2.el .emacs"
           " .devcontainer.json .ycm_extra_conf.py .projectile .nanorc .luarc.json .lazy.lua hie.yaml .gitpod.yml"
           " devfile.yaml .devfile.yaml .replit"),
    *_rows("suffix", EDITOR, ".code-workspace .sublime-project .iml"),
    *_rows("name", BUILD,
           "package.json setup.py setup.cfg pyproject.toml conftest.py sitecustomize.py usercustomize.py noxfile.py"
           " tox.ini pytest.ini .pytest.ini tasks.py dodo.py fabfile.py sconstruct sconscript wscript pipfile"
           " makefile gnumakefile bsdmakefile cmakelists.txt cmakepresets.json meson.build build.ninja configure"
           " configure.ac build.rs cargo.toml build.zig rust-toolchain rust-toolchain.toml build.gradle"
           " build.gradle.kts settings.gradle settings.gradle.kts gradle.properties init.gradle pom.xml build.xml"
           " build.sbt build.sc mvnw mvnw.cmd gradlew gradlew.bat dockerfile containerfile docker-compose.yml"
           " docker-compose.yaml compose.yml compose.yaml docker-compose.override.yml vagrantfile procfile .npmrc"
           " .pnpmfile.cjs pnpm-workspace.yaml bunfig.toml deno.json deno.jsonc lerna.json nx.json turbo.json"
           " gulpfile.js gulpfile.mjs gulpfile.ts gruntfile.js gruntfile.ts rakefile gemfile .rspec justfile"
           " .justfile taskfile.yml taskfile.yaml earthfile tiltfile skaffold.yaml build build.bazel workspace"
           " workspace.bazel module.bazel .bazelrc buck .buckconfig composer.json mix.exs rebar.config package.swift"
           " podfile fastfile directory.build.props directory.build.targets nuget.config default.nix shell.nix"
           " flake.nix pip.conf .pypirc uv.toml .condarc environment.yml environment.yaml go.work go.mod binding.gyp"
           " hatch_build.py cmakeuserpresets.json gradle-wrapper.properties compose.override.yml"
           " compose.override.yaml .latexmkrc latexmkrc .pnpmfile.mjs .pnp.cjs .pnp.loader.mjs devenv.nix"),
    # Packages are installed as a lock file says, from the sources that it names.
    *_rows("name", BUILD,
           "package-lock.json npm-shrinkwrap.json yarn.lock pnpm-lock.yaml bun.lock bun.lockb deno.lock poetry.lock"
           " uv.lock pdm.lock pipfile.lock pylock.toml conda-lock.yml cargo.lock go.sum gemfile.lock composer.lock"
           " mix.lock rebar.lock flake.lock pubspec.lock packages.lock.json package.resolved podfile.lock"
           " gradle.lockfile"),
    *_rows("glob", BUILD, "requirements*.txt docker-compose.*.yml docker-compose.*.yaml"),
    *_rows("path", BUILD, "docs/conf.py docs/source/conf.py doc/conf.py doc/source/conf.py"),
    *_rows("prefix", BUILD,
           ".yarnrc dockerfile. containerfile. makefile. .eslintrc .prettierrc eslint.config. prettier.config."
           " vite.config. vitest.config. webpack.config. rollup.config. jest.config. babel.config. next.config."
           " postcss.config. tailwind.config. playwright.config. svelte.config. astro.config. nuxt.config."
           " karma.conf. esbuild.config. metro.config. .babelrc .mocharc. .releaserc stylelint.config. .stylelintrc"
           " cypress.config. drizzle.config. svgo.config. craco.config. tsup.config. remix.config. ava.config."
           " nyc.config. .nycrc webpack.mix. wdio.conf. protractor.conf. gatsby-node. gatsby-config. vue.config."
           " rspack.config. rsbuild.config. knexfile. serverless. ember-cli-build. release.config."),
    *_rows("name", HOOKS,
           ".pre-commit-config.yaml .pre-commit-hooks.yaml lefthook.yml lefthook.yaml lefthook.toml .lefthook.yml"
           " .lefthook.yaml .lefthook.toml .overcommit.yml"),
    *_rows("prefix", HOOKS,
           ".lintstagedrc lint-staged.config. lefthook-local. .lefthook-local. .huskyrc commitlint.config."
           " .commitlintrc simple-git-hooks. .simple-git-hooks."),
    *_rows("suffix", BUILD,
           ".pth .egg-link .mk .gemspec .podspec .csproj .vbproj .fsproj .vcxproj .sln .cabal .gradle .gradle.kts"
           " .sbt .bzl .cmake .rake .pbxproj .targets .tf .gyp .gypi"),
    *_rows("name", BUILD,
           ".pylintrc pylintrc pylintrc.toml mypy.ini .mypy.ini .flake8 .coveragerc ansible.cfg snakefile"
           " phpunit.xml phpunit.xml.dist .rubocop.yml .pyre_configuration guardfile dangerfile capfile brewfile"
           " thorfile appraisals config.ru wrangler.toml angular.json project.json"),
    *_rows("suffix", COMPILED, ".so .pyd .dll .dylib .node .jar .class .exe"),
    *_rows("suffix", WINDOWS, ".bat .cmd .ps1"),
    *_rows("folder", BUILD, ".cargo .mvn .yarn .bundle .gradle .storybook"),
    *_rows("name", AGENT,
           "agents.md agents.override.md claude.md claude.local.md gemini.md qwen.md warp.md skill.md .cursorrules"
           " .windsurfrules .clinerules .goosehints .roorules .roomodes .rules .mcp.json mcp.json .aider.conf.yml"
           " .cursorignore .aiderignore .geminiignore opencode.json opencode.jsonc crush.json"
           " copilot-instructions.md agent.md crush.md .crush.json", guards=True),
    *_rows("folder", AGENT,
           ".cursor .claude .codex .gemini .windsurf .clinerules .roo .kiro .opencode .continue .agents .amazonq"
           " .junie .augment .goose .agent .qwen .factory .trae .kilocode .openhands .claude-plugin .amp"
           " .copilot", guards=True),
    *_rows("path", AGENT,
           ".github/copilot-instructions.md .github/instructions/* .github/prompts/* .github/agents/*"
           " .github/chatmodes/* .github/hooks/* hooks/hooks.json", guards=True),
    *_rows("prefix", AGENT, ".aider.", guards=True),
    *_rows("prefix", CLOCHE, ".cloche", guards=True),
    *_rows("name", CLOCHE, "cloche.yaml cloche.yml cloche.toml cloche.lock", guards=True),
)  # fmt: skip
