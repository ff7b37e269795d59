"""The SDK's helpers for git, which run it in the sandbox."""

from __future__ import annotations

from e2b import AuthenticationException, GitUpstreamException, InvalidArgumentException

from .both import Both
from .rows import shows

REPOSITORY, ORIGIN, CLONE = "/home/user/repository", "/home/user/origin.git", "/home/user/clone"


@shows(
    "git.init", "git.configure_user", "git.set_config", "git.get_config", "git.add", "git.commit", "git.status",
    "git.branches", "git.create_branch", "git.checkout_branch", "git.delete_branch", "git.reset", "git.restore",
    "git.remote_add", "git.remote_get", "git.push", "git.pull", "git.clone",
    is_long=True,
)  # fmt: skip
async def work(sdk: Both) -> None:
    """A repository from its start to a clone of what was pushed."""
    sandbox = await sdk.create(timeout=300)
    git, files = sandbox.git, sandbox.files
    await sdk(git.init(REPOSITORY, initial_branch="main"))
    await sdk(git.init(ORIGIN, bare=True, initial_branch="main"))
    await sdk(git.configure_user("A User", "user@acme.example"))
    await sdk(git.set_config("pull.rebase", "false", scope="local", path=REPOSITORY))
    assert (await sdk(git.get_config("pull.rebase", scope="local", path=REPOSITORY))).strip() == "false"
    await sdk(files.write(f"{REPOSITORY}/a.txt", "1\n"))
    status = await sdk(git.status(REPOSITORY))
    assert (status.current_branch, status.has_untracked, status.staged_count) == ("main", True, 0)
    await sdk(git.add(REPOSITORY))
    assert (await sdk(git.status(REPOSITORY))).has_staged
    await sdk(git.commit(REPOSITORY, "The first"))
    assert (await sdk(git.status(REPOSITORY))).is_clean
    await sdk(git.create_branch(REPOSITORY, "other"))
    branches = await sdk(git.branches(REPOSITORY))
    assert (sorted(branches.branches), branches.current_branch) == (["main", "other"], "other")
    await sdk(git.checkout_branch(REPOSITORY, "main"))
    await sdk(git.delete_branch(REPOSITORY, "other", force=True))
    assert (await sdk(git.branches(REPOSITORY))).branches == ["main"]
    await sdk(files.write(f"{REPOSITORY}/a.txt", "2\n"))
    await sdk(git.add(REPOSITORY, files=["a.txt"]))
    await sdk(git.reset(REPOSITORY, mode="mixed"))
    assert not (await sdk(git.status(REPOSITORY))).has_staged
    await sdk(git.restore(REPOSITORY, ["a.txt"]))
    assert await sdk(files.read(f"{REPOSITORY}/a.txt")) == "1\n"
    await sdk.raises(GitUpstreamException, lambda: git.pull(REPOSITORY))
    await sdk(git.remote_add(REPOSITORY, "origin", ORIGIN))
    assert (await sdk(git.remote_get(REPOSITORY, "origin"))).strip() == ORIGIN
    await sdk(git.push(REPOSITORY, remote="origin", branch="main"))
    await sdk(git.clone(ORIGIN, path=CLONE))
    assert await sdk(files.read(f"{CLONE}/a.txt")) == "1\n"
    await sdk(git.pull(CLONE, remote="origin", branch="main"))
    await sdk.raises(InvalidArgumentException, lambda: git.clone(ORIGIN, path="/tmp/x", password="p"))


@shows("git.dangerously_authenticate", is_long=True)
async def authenticate(sdk: Both) -> None:
    """The store of git has the login afterwards."""
    sandbox = await sdk.create(timeout=300)
    await sdk(sandbox.git.dangerously_authenticate("me", "placeholder", host="git.example"))
    shown = await sdk(sandbox.commands.run("cat ~/.git-credentials"))
    assert shown.stdout.strip() == "https://me:placeholder@git.example"
    await sdk.raises(
        (InvalidArgumentException, AuthenticationException), lambda: sandbox.git.dangerously_authenticate("", "")
    )
