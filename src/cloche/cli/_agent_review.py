"""`cloche agent review`: the changes of a sandbox by file, to be written, tried, kept or discarded.

Nothing is written without an answer, and no answer loses anything: an unknown one, Enter, the end of input and Ctrl-C
leave all changes in the sandbox, and discarded ones are saved first. Text of the guest is escaped.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

from cloche.core.errors import ClocheError, InvalidRequest
from cloche.core.escape import escape_line, escape_name
from cloche.core.record import replace

from ._agent_compare import tell_conflicts
from ._agents import agent
from ._review import SIGNS, STYLES, agreed_paths, ask_letter, cut_line, row_of, tell_committed
from .options import argument, flag, option
from .output import GuestWriter, say, showing_progress

if TYPE_CHECKING:
    from cloche.coding_agents.review import Choice, Review, ReviewedFile, ReviewEnd
    from cloche.coding_agents.steps import Step
    from cloche.core.result import Result
    from cloche.execution.sandbox import AsyncSandbox

T = TypeVar("T")
Read = Callable[[str], str]
CHECK_TIME = "1h"  # Ctrl-C ends it before
MOST_ROWS, MOST_COMMITS = 200, 20
KEYS = "[a]ll, [f]iles, [h]unks, [d]iff, [c]heck, [b]ranch, [t]ake commits, [K]eep, discard, [?]: "
HELP = """\
a        write all changes; dangerous ones are asked about by reason
f        choose file by file
h        choose hunk by hunk
d        show the full diff in $PAGER
c        run a command on the result, in a copy without a network, and write nothing
b        write to a new git branch in place of the files
t        make a new git branch of the commits that were made inside, with their messages
k, Enter keep all changes in the sandbox, for the next time
discard  undo all changes in the sandbox; they are saved first (type the whole word)"""


@agent.command("review")
@argument("name", metavar="[NAME]", required=False, help="An agent on this project, or a sandbox with a folder.")
@option("--check", metavar="COMMAND", help="Run this line of shell on the result first, in a copy without a network.")
@option("--branch", metavar="BRANCH", help="Write to this new git branch in place of the files.")
@flag("--steps", "shows_steps", help="Show what the agent has changed step by step, the last step at the end.")
def _command(name: str | None, check: str | None, branch: str | None, shows_steps: bool) -> int:
    """Show the changes of a sandbox, and ask which to write.

    Dangerous changes come first, each with its reason. Nothing is written without an answer.
    """
    from cloche.coding_agents.running import named_here

    if shows_steps:
        return _show_steps(named_here(name, os.getcwd()))
    if not os.isatty(0):
        raise InvalidRequest(
            "agent review asks on a terminal, and standard input is not one; without one: cloche diff NAME, then "
            "cloche commit NAME --id ID"
        )
    return asyncio.run(_reviewed(named_here(name, os.getcwd()), check, branch))


def _show_steps(name: str) -> int:
    from cloche.coding_agents import about
    from cloche.coding_agents.places import AgentPlace, agents_folder
    from cloche.coding_agents.steps import steps

    from ._pager import page

    noted = about.read(f"{agents_folder()}/{name}")
    if noted is None:
        raise InvalidRequest(f"agent review: {escape_name(name)} is no sandbox of an agent, so it has no steps")
    found = steps(AgentPlace(agent=noted.agent, folder=noted.folder, number=noted.number))
    if not found:
        say("no step is noted: one is, when the agent's work is saved")
    page(line for step in found for line in _step_lines(step))
    return 0


def _step_lines(step: Step) -> Iterator[str]:
    """Yield the lines of one step; the pager escapes them."""
    files = "1 file" if step.count == 1 else f"{step.count:,} files"
    yield f"@ {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(step.saved_at))}: {files} ({step.reason})"
    for file in step.files[:MOST_ROWS]:
        yield f"  {SIGNS.get(file.what, '=')} {escape_name(file.path)}"
    yield from step.patch.removesuffix("\n").split("\n") if step.patch else ()
    if step.is_cut:
        yield "  the patch of this step does not show everything"
    yield ""


async def _reviewed(name: str, check: str | None, branch: str | None) -> int:
    from cloche.execution.sandbox import AsyncSandbox

    async with AsyncSandbox.attach(name) as sandbox:
        folder = str(sandbox.notes.get("workspace", {}).get("path", ""))
        await review(sandbox, folder=folder, check=check, branch=branch)
    return 0


async def review(
    sandbox: AsyncSandbox,
    *,
    folder: str,
    check: str | None = None,
    branch: str | None = None,
    saved: str | None = None,
    env: Mapping[str, str] | None = None,
    read: Read = input,
) -> ReviewEnd:
    """Show the changes of an open sandbox, ask until they are written, kept or discarded, and return how it ended.

    `saved` is the folder for changes that are discarded; by default one in Cloche's state. `env` are variables of the
    check.
    """
    reviewing = _Reviewing(sandbox, folder, check, branch, saved, env, read)
    try:
        return await reviewing.run()
    except (EOFError, KeyboardInterrupt):
        print()
        return reviewing.kept()


class _Reviewing:
    def __init__(
        self,
        sandbox: AsyncSandbox,
        folder: str,
        check: str | None,
        branch: str | None,
        saved: str | None,
        env: Mapping[str, str] | None,
        read: Read,
    ) -> None:
        self.sandbox, self.folder, self.check, self.branch, self.saved = sandbox, folder, check, branch, saved
        self.env, self._read = env, read
        self.review: Review
        self.actions: dict[str, Callable[[], Awaitable[ReviewEnd | None]]] = {
            "a": self.write_all, "f": self.write_files, "h": self.write_hunks, "d": self.show_diff,
            "c": self.run_check, "b": self.name_branch, "t": self.take_commits, "k": self.keep, "": self.keep,
            "discard": self.discard,
        }  # fmt: skip

    async def run(self) -> ReviewEnd:
        from cloche.coding_agents.review import ReviewEnd

        _drop_typed_ahead()
        if not await self.compare():
            say("nothing was changed")
            return ReviewEnd(how="nothing")
        while True:
            answer = self.read(KEYS).strip().lower()
            action = self.actions.get(answer)
            if action is None:
                print(HELP)
                continue
            try:
                end = await action()
            except ClocheError as error:
                say(str(error))
                if not await self.compare():
                    return self.kept()
                continue
            if end is not None:
                return end

    def read(self, question: str) -> str:
        """Ask; Ctrl-C raises KeyboardInterrupt at once, also below `asyncio.run`."""
        with interrupting():
            return self._read(question)

    async def compare(self) -> bool:
        """Compare and show the summary; tell whether there are changes."""
        from cloche.coding_agents.review import review_changes

        with showing_progress():
            self.review = await review_changes(self.sandbox)
        if self.review.files or self.review.branches or self.review.diff.left_out:
            _show_summary(self.review, self.folder)
        return bool(self.review.files or self.review.branches)

    def kept(self) -> ReviewEnd:
        from cloche.coding_agents.review import ReviewEnd

        left = len(self.review.files) if hasattr(self, "review") else 0
        say("nothing was written; the sandbox keeps its changes")
        return ReviewEnd(how="kept", left=left)

    # One method for each key. None: ask again.

    async def keep(self) -> ReviewEnd | None:
        return self.kept()

    async def write_all(self) -> ReviewEnd | None:
        from cloche.coding_agents.review import everything

        return await self.write(everything(self.review))

    async def write_files(self) -> ReviewEnd | None:
        from cloche.coding_agents.review import asked_files, choice_of

        chosen = [file for file in asked_files(self.review) if self._wants(f"{_row(file)}: write it? [y/N]: ")]
        return await self.write(choice_of({file.change.path: None for file in chosen}, self.review))

    async def write_hunks(self) -> ReviewEnd | None:
        from cloche.coding_agents.review import asked_files, choice_of

        chosen: dict[str, list[str] | None] = {}
        for file in asked_files(self.review):
            print(_row(file))
            if len(file.hunks) > 1:
                chosen[file.change.path] = self._chosen_hunks(file)
            elif self._wants_hunk(file.diff.text if file.diff is not None else ""):
                chosen[file.change.path] = None
        return await self.write(choice_of(chosen, self.review))

    def _chosen_hunks(self, file: ReviewedFile) -> list[str]:
        """Ask about each hunk of a file; return the ids of those to write."""
        chosen: list[str] = []
        for number, hunk in enumerate(file.hunks):
            show_lines(hunk.text)
            question = (
                f"hunk {number + 1} of {len(file.hunks)}: write it? [y]es, [N]o, [a]ll from here, [s]kip the rest: "
            )
            answer = ask_letter(self._read_or_end, question, "ynas")
            if answer == "a":
                return [*chosen, *(rest.id for rest in file.hunks[number:])]
            if answer == "s":
                break
            chosen += [hunk.id] if answer == "y" else []
        return chosen

    def _wants_hunk(self, text: str) -> bool:
        if text:
            show_lines(text)
        return self._wants("write this? [y/N]: ")

    def _wants(self, question: str) -> bool:
        return ask_letter(self._read_or_end, question, "yn") == "y"

    def _read_or_end(self, question: str) -> str:
        try:
            return self.read(question)
        except EOFError:  # else it would be a no, and the rest would be written
            raise KeyboardInterrupt from None

    async def write(self, choice: Choice) -> ReviewEnd | None:
        from cloche.coding_agents.review import ReviewEnd, left_after, questions_for

        by_path = {file.change.path: file.change for file in self.review.files}
        for question in questions_for(self.review, choice):
            changes = [by_path[path] for path in question.paths]
            agreed = agreed_paths(question.reason, changes, self._read_or_end)
            choice = choice.agreed(agreed).without(set(question.paths).difference(agreed))
        if not choice.paths:
            say("nothing was chosen")
            return None
        if self.check is not None and not await self._passes(choice):
            return None
        keywords = choice.keywords(self.review)
        with showing_progress():
            committed = await self.sandbox.commit(
                self.review.diff.id, **keywords, dangerous=choice.dangerous, branch=self.branch, as_user=True
            )
        declined = set(keywords["theirs"])
        tell_committed(
            replace(committed, left={path: why for path, why in committed.left.items() if path not in declined})
        )
        if self.branch is None and self.sandbox.name is not None:
            await tell_conflicts(self.folder, committed.written, by=self.sandbox.name)
        left = len(self.review.files) if self.branch else left_after(self.review, choice, committed)
        if left:
            say(f"{left} {'change stays' if left == 1 else 'changes stay'} in the sandbox")
        return ReviewEnd(how="committed", committed=committed, left=left)

    async def _passes(self, choice: Choice) -> bool:
        """Run the check on the chosen changes; tell whether to write them."""
        result = await self._try(choice)
        if result is not None and result.ok:
            return True
        return self._wants("the check has not passed; write the changes all the same? [y/N]: ")

    async def _try(self, choice: Choice) -> Result | None:
        """Run the check; return its result, None if Ctrl-C ended it."""
        check = str(self.check)
        say(f"running {escape_line(check)} on the result, in a copy without a network")
        writers = {"stdout": GuestWriter(1), "stderr": GuestWriter(2, is_red=True)}
        trying = self.sandbox.try_commit(
            check, self.review.diff.id, **choice.keywords(self.review), env=self.env, timeout=CHECK_TIME,
            on_output=lambda stream, data: writers[stream].write(data),
        )  # fmt: skip
        result = await _until_interrupted(trying)
        for writer in writers.values():
            writer.finish()
        if result is None:
            say("the check was interrupted")
        else:
            verdict = "passed" if result.ok else f"failed: {result.status}, exit code {result.exit_code}"
            say(f"the check {verdict}, after {result.meta.get('duration', 0):.1f} s")
        return result

    async def show_diff(self) -> ReviewEnd | None:
        from ._pager import page

        page(_pages(self.review))
        return None

    async def run_check(self) -> ReviewEnd | None:
        from cloche.coding_agents.review import everything

        command = self.read(f"command{f' [{escape_line(self.check)}]' if self.check else ''}: ").strip()
        self.check = command or self.check
        if self.check:
            await self._try(everything(self.review))
        return None

    async def name_branch(self) -> ReviewEnd | None:
        self.branch = self.read("new branch (Enter: none, write the files): ").strip() or None
        where = f"the branch {escape_name(self.branch)}" if self.branch else escape_name(self.folder)
        say(f"changes will be written to {where}; choose them: a, f or h")
        return None

    async def take_commits(self) -> ReviewEnd | None:
        if not self.review.branches:
            say("no commit was made inside")
        for inside in self.review.branches:
            if inside.dangerous and not self._wants("these commits have dangerous changes; take them? [y/N]: "):
                continue
            name = escape_name(inside.name)
            branch = self.read(f"new branch for the commits on {name} (Enter: none): ").strip()
            if branch:
                with showing_progress():
                    refs = await self.sandbox.take_commits(inside.name, branch, tip=inside.tip, as_user=True)
                for ref, commit in refs.items():
                    say(f"{escape_name(ref)} is {commit}")
        return None

    async def discard(self) -> ReviewEnd | None:
        from cloche.coding_agents.discard import save_and_discard
        from cloche.coding_agents.review import ReviewEnd

        target, count = await save_and_discard(self.sandbox, self.review.diff.id, self.saved)
        say(f"discarded {count} {'change' if count == 1 else 'changes'}, saved in {escape_name(target)}")
        return ReviewEnd(how="discarded", saved=target)


def _row(file: ReviewedFile) -> str:
    return f"{file.note:>14}  {row_of(file.change)}"


def _show_summary(review: Review, folder: str) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    number, added, removed = review.counts
    files = "1 file" if number == 1 else f"{number:,} files"
    console.print(Text(f"{files} in {escape_name(folder)} (+{added} -{removed})"))
    for file in review.files[:MOST_ROWS]:
        is_marked = file.change.dangers or file.change.conflict
        console.print(Text(_row(file), style="yellow" if is_marked else ""))
    if len(review.files) > MOST_ROWS:
        console.print(f"and {len(review.files) - MOST_ROWS:,} more; [d]iff shows all".replace("[", "\\["))
    left_out = [skipped for skipped in review.diff.left_out if skipped.path != ".git" or not review.branches]
    for skipped in left_out[:MOST_ROWS]:
        console.print(Text(f"left out: {escape_line(f'{escape_name(skipped.path)}: {skipped.reason}')}"))
    if review.git_error:
        console.print(Text(f"commits made inside cannot be read: {escape_line(review.git_error)}", style="yellow"))
    for branch in review.branches:
        subject = "1 commit was" if branch.count == 1 else f"{branch.count} commits were"
        console.print(Text(f"{subject} made inside on {escape_name(branch.name)}:"))
        for commit in branch.commits[:MOST_COMMITS]:
            console.print(Text(f"  {commit.id[:10]} {escape_line(commit.author)}: {escape_line(commit.subject)[:200]}"))
        for change in branch.dangerous[:MOST_ROWS]:
            console.print(Text(f"  {row_of(change)}", style="yellow"))


def _pages(review: Review) -> Iterator[str]:
    """Yield the lines of the full diff: the rows, then the patch; the pager escapes them."""
    for file in review.files:
        yield f"{'!' if file.change.dangers or file.change.conflict else ' '} {_row(file)}"
    yield ""
    yield from review.diff.patch.removesuffix("\n").split("\n")
    if review.diff.is_cut:
        yield "Some files are not shown: they are too long, or the diff is."


def show_lines(text: str) -> None:
    """Print lines of a diff, escaped, in colours."""
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False)
    for line in text.removesuffix("\n").split("\n"):
        console.print(Text(cut_line(line), style=STYLES.get(line[:1], "")))


def _drop_typed_ahead() -> None:
    """Drop earlier input: typed keys, and a terminal's answers to requests in the guest's output."""
    import termios

    with suppress(OSError, termios.error):
        termios.tcflush(0, termios.TCIFLUSH)


@contextmanager
def interrupting() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt meanwhile; `asyncio.run` would wait for the answer first."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


async def _until_interrupted(work: Awaitable[T]) -> T | None:
    """Return the result of work; None if Ctrl-C cancelled it."""
    task = asyncio.ensure_future(work)
    loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        if task.cancelled():
            return None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)
