"""Agents of this service's user on this machine, and the review of their changes, as values for the page.

Only `cloche serve --agents` has them. A sandbox is one of `keeper.registry`, so it belongs to the user of this process.
What an agent has changed is the guest's: all text is escaped here, also line breaks that would hide a part of a line.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from cloche.coding_agents import archives
from cloche.coding_agents.discard import save_and_discard
from cloche.coding_agents.launch import format_age
from cloche.coding_agents.places import AgentPlace
from cloche.coding_agents.review import Choice, Review, ReviewedFile, choice_of, review_changes
from cloche.coding_agents.running import AgentStatus, open_agents, status
from cloche.core.changes import Change
from cloche.core.errors import NotFound
from cloche.core.escape import escape, escape_line, escape_name, utf8_safe
from cloche.core.limits import format_size
from cloche.core.record import dataclass
from cloche.execution.sandbox import AsyncSandbox
from cloche.wire.problems import Refused

MOST_FILES, MOST_HUNKS, MOST_LINES, MOST_LINE_CHARS = 500, 1000, 5000, 400
MOST_BRANCH_CHARS, MOST_NAMED = 200, 20
SIGNS: Mapping[str, str] = {"added": "A", "removed": "D", "modified": "M", "renamed": "R", "mode": "m"}
KINDS: Mapping[str, str] = {"+": "added", "-": "removed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Hold what a form chose: the diff's id, numbers of files, ids of hunks by number, and a branch or none."""

    diff_id: str
    files: tuple[int, ...] = ()
    hunks: Mapping[int, tuple[str, ...]]
    branch: str = ""


def listed() -> list[dict[str, Any]]:
    """Return a row for each living agent. Blocks for as long as the folder of names is read."""
    return [
        {
            "name": place.sandbox, "agent": place.agent, "project": shown_name(place.folder),
            "number": place.number,
        }
        for place in open_agents()
    ]  # fmt: skip


def found(name: str) -> AgentPlace:
    """Return a living agent by the name of its sandbox. Raises NotFound, also for a sandbox that is no agent's."""
    for place in open_agents():
        if place.sandbox == name:
            return place
    raise NotFound(f"no agent of this user lives in a sandbox {escape_name(name)!r}")


@asynccontextmanager
async def attached(name: str) -> AsyncIterator[tuple[AgentPlace, AsyncSandbox]]:
    """Attach to an agent's sandbox for the block."""
    place = await asyncio.to_thread(found, name)
    async with AsyncSandbox.attach(place.sandbox) as sandbox:
        yield place, sandbox


async def shown(name: str) -> dict[str, Any]:
    """Return all that the page of an agent shows; of a paused one the changes cannot be read."""
    async with attached(name) as (place, sandbox):
        now = await status(place)
        review = None if now.state == "paused" else await review_changes(sandbox)
        processes = await sandbox.processes()
    others = [one.sandbox for one in await asyncio.to_thread(open_agents, place.folder) if one.sandbox != name]
    runs = [escape_line(" ".join(process.command)) for process in processes if process.exit_code is None]
    return {
        "name": name, "agent": place.agent, "project": shown_name(place.folder), "others": others,
        "runs": runs[:MOST_NAMED], "facts": _facts(now),
        "review": None if review is None else await asyncio.to_thread(review_rows, review),
    }  # fmt: skip


def _facts(now: AgentStatus) -> list[tuple[str, str]]:
    """Return rows of a title and a text."""
    saved = "nothing yet" if now.saved_ago_s is None else f"{format_age(now.saved_ago_s)} ago"
    rows = [
        ("State", now.state), ("Open for", format_age(now.age_s)), ("Work saved", saved),
        ("Memory", format_size(now.memory_bytes)), ("Processes", str(now.processes)),
        *(("Network", line) for line in now.network.lines()), *(("Problem", text) for text in now.problems),
    ]  # fmt: skip
    return [(title, utf8_safe(escape_line(text))) for title, text in rows]


def review_rows(review: Review) -> dict[str, Any]:
    """Return a review for the template: files with their notes, and hunks up to the bounds. Pure."""
    number, added, removed = review.counts
    budget = _Budget(hunks=MOST_HUNKS, lines=MOST_LINES)
    files = [_file(index, file, budget) for index, file in enumerate(review.files[:MOST_FILES])]
    return {
        "id": review.diff.id, "count": number, "added": added, "removed": removed, "files": files,
        "more": max(0, len(review.files) - MOST_FILES), "is_cut": review.diff.is_cut,
        "left_out": [f"{shown_name(one.path)}: {escape_line(one.reason)}" for one in review.diff.left_out[:MOST_NAMED]],
        "git_error": utf8_safe(escape_line(review.git_error)),
        "branches": [shown_name(branch.name) for branch in review.branches[:MOST_NAMED]],
    }  # fmt: skip


@dataclass(slots=True, kw_only=True)
class _Budget:
    hunks: int
    lines: int


def _file(index: int, file: ReviewedFile, budget: _Budget) -> dict[str, Any]:
    change = file.change
    hunks = file.hunks if len(file.hunks) > 1 and len(file.hunks) <= budget.hunks else ()
    budget.hunks -= len(hunks)
    texts = [hunk.text for hunk in hunks] or ([file.diff.text] if file.diff is not None else [])
    return {
        "number": index, "sign": SIGNS[change.what], "path": _path(change), "note": file.note,
        "mode": change.mode_note, "dangers": [utf8_safe(escape_line(danger)) for danger in change.dangers],
        "conflict": utf8_safe(escape_line(change.conflict)), "is_split": bool(hunks),
        "parts": [
            {"id": hunks[number].id if hunks else "", "lines": list(_lines(text, budget))}
            for number, text in enumerate(texts)
        ],
    }  # fmt: skip


def _path(change: Change) -> str:
    path = shown_name(change.path) + ("/" if change.kind == "directory" else "")
    path = f"{shown_name(change.old_path)} -> {path}" if change.what == "renamed" else path
    return f"{path} -> {shown_name(change.target)}" if change.kind == "link" and change.what != "removed" else path


def _lines(text: str, budget: _Budget) -> Iterator[tuple[str, str]]:
    """Yield the lines of a part of a patch with their kinds, each escaped, as long as the budget lasts."""
    lines = text.removesuffix("\n").split("\n")
    for line in lines[: budget.lines]:
        over = len(line) - MOST_LINE_CHARS
        cut = f" [and {over} more characters, which are not shown]" if over > 0 else ""
        kind = "" if line[:3] in ("+++", "---") else KINDS.get(line[:1], "")
        yield kind, utf8_safe(escape(line[:MOST_LINE_CHARS])) + cut
    if len(lines) > budget.lines:
        yield "", f"[{len(lines) - budget.lines} more lines, which are not shown: cloche agent review shows all]"
    budget.lines = max(0, budget.lines - len(lines))


def shown_name(name: str) -> str:
    """Return a name escaped, as any protocol can carry it."""
    return utf8_safe(escape_name(name))


async def commit(name: str, chosen: Chosen) -> list[str]:
    """Write the chosen changes, or make a commit on a branch of them; return sentences about it.

    A dangerous change is agreed to by its own choice: the form says why it is dangerous. Raises Refused (409) if the
    changes are not those that the form showed.
    """
    from cloche.coding_agents.compare import conflicts_with

    async with attached(name) as (place, sandbox):
        review = await _same(sandbox, chosen.diff_id)
        choice = choice_from(review, chosen)
        if not choice.paths:
            return ["nothing was chosen, and nothing was written"]
        keywords = await asyncio.to_thread(choice.keywords, review)  # there may be a million changes
        committed = await sandbox.commit(
            chosen.diff_id, **keywords, dangerous=choice.dangerous, branch=chosen.branch or None
        )
        left = await sandbox.changes() if not chosen.branch else review.diff.changes
    if not left:
        await asyncio.to_thread(archives.settle, place)
    others = {} if chosen.branch else await conflicts_with(place.folder, committed.written, by=name)
    declined = set(keywords["theirs"])
    not_written = [(path, why) for path, why in committed.left.items() if path not in declined]
    return [
        f"wrote {len(committed.written)} of {len(review.files)} changes",
        *(f"not written: {shown_name(path)}: {escape_line(why)}" for path, why in not_written[:MOST_NAMED]),
        *(f"{shown_name(ref)} is {commit}" for ref, commit in committed.refs.items()),
        *(f"{other} has changed {_named(paths)}, too: now a conflict there" for other, paths in others.items()),
    ]  # fmt: skip


def _named(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - MOST_NAMED} more" if len(paths) > MOST_NAMED else ""
    return ", ".join(map(shown_name, paths[:MOST_NAMED])) + more


def choice_from(review: Review, chosen: Chosen) -> Choice:
    """Return the choice of a form for the review that it showed. Pure."""
    files = {number: review.files[number] for number in chosen.files if 0 <= number < len(review.files)}
    split = {number: file for number, file in files.items() if number in chosen.hunks}
    wanted = {file.change.path: None for number, file in files.items() if number not in split}
    by_hunk = {
        file.change.path: [hunk.id for hunk in file.hunks if hunk.id in chosen.hunks[number]]
        for number, file in split.items()
    }
    choice = choice_of({**wanted, **by_hunk}, review)
    return choice.agreed(file.change.path for file in files.values() if file.change.dangers)


async def discard(name: str, diff_id: str) -> list[str]:
    """Save all changes and discard them; return sentences about it. Raises Refused (409) for other changes."""
    async with attached(name) as (place, sandbox):
        await _same(sandbox, diff_id)
        target, count = await save_and_discard(sandbox, diff_id, place.saved)
    await asyncio.to_thread(archives.settle, place)
    return [f"discarded {count} changes; they are saved in {shown_name(target)}"]


async def _same(sandbox: AsyncSandbox, diff_id: str) -> Review:
    review = await review_changes(sandbox)
    if review.diff.id != diff_id:
        raise Refused(409, "conflict", "the changes are others than those that were shown; look at them again")
    return review
