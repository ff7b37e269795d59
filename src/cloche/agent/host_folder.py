"""A model's changes to a folder of the host: the answers to it, and the approver's request before they are written.

A model asks for a diff first. To commit, it names the diff's id, and the approver sees that diff: a yes is for exactly
these changes, the dangerous ones among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cloche.core.changes import Change, Committed, Diff
from cloche.core.errors import InvalidRequest
from cloche.core.escape import escape, escape_name

from .answers import MOST_CHARS, clip
from .approval import ApprovalRequest, Risk
from .catalog import FOLDER_TOOLS, Tool, ToolAction

if TYPE_CHECKING:
    from cloche.execution.sandbox import AsyncSandbox

MOST_SHOWN = 8  # diffs that a model may still commit
MOST_ROWS = 500
MOST_CHANGES = 20_000  # of a diff that is kept to be committed
MOST_PATCH_CHARS = 200_000  # that an approver is shown
MOST_NAMES = 5  # of one change


class ShownDiffs:
    """Remember the diffs last shown to a model, by their ids; `folder` is empty without one."""

    def __init__(self, folder: str):
        self.folder = folder
        self._shown: dict[str, Diff] = {}

    @property
    def tools(self) -> tuple[Tool, ...]:
        """Return the tools that work on the folder."""
        return tuple(FOLDER_TOOLS.values()) if self.folder else ()

    async def act(self, sandbox: AsyncSandbox, tool: Tool, read: Mapping[str, Any]) -> str:
        """Show the changes, or commit an approved diff, and return the text for the model."""
        if tool.action is ToolAction.DIFF:
            return self.note(await sandbox.diff())
        diff = self._found(tool, read["id"])
        approved = [change.path for change in diff.dangerous]  # by the approver
        return _told(await sandbox.commit(diff, dangerous=approved))

    def note(self, diff: Diff) -> str:
        """Remember a diff, and return the text for the model."""
        self._shown.pop(diff.id, None)
        if len(diff.changes) <= MOST_CHANGES:
            self._shown[diff.id] = diff
        while len(self._shown) > MOST_SHOWN:
            self._shown.pop(next(iter(self._shown)))
        if not diff.changes:
            return "Nothing was changed."
        head = f"id: {diff.id}"
        if len(diff.changes) > MOST_CHANGES:
            head = f"{len(diff.changes)} changes, more than a tool commits ({MOST_CHANGES}): remove what is not needed."
        text = "\n".join([head, *_rows(diff), *(_left_out(diff)), "", escape(diff.patch)])
        return clip(text, where="the folder") if len(text) > MOST_CHARS else text

    def _found(self, tool: Tool, diff_id: str) -> Diff:
        if diff_id not in self._shown:
            raise InvalidRequest(f"{tool.name}: no diff with id {diff_id!r} was shown; call show_changes first")
        return self._shown[diff_id]

    def request(self, tool: Tool, read: Mapping[str, Any]) -> ApprovalRequest:
        """Return the request for the approver: critical if one of the changes is dangerous.

        Raises InvalidRequest for a diff that was not shown.
        """
        diff = self._found(tool, read["id"])
        if len(diff.dangerous) > MOST_ROWS:
            raise InvalidRequest(
                f"{tool.name}: more than {MOST_ROWS} changes are dangerous, which nobody would look at; "
                "undo most of them"
            )
        rows = _rows(diff)
        patch = escape(diff.patch[:MOST_PATCH_CHARS])
        if diff.is_cut or len(diff.patch) > MOST_PATCH_CHARS:
            patch += "\n(the diff is longer: look at all of it before you approve)"
        return ApprovalRequest(
            tool=tool.name, risk=Risk.CRITICAL if diff.dangerous else Risk.HIGH, arguments=dict(read),
            rules={"writes_to": self.folder, **_dangers(diff), "changes": rows}, changes=patch,
        )  # fmt: skip


def _told(committed: Committed) -> str:
    lines = [f"Wrote {len(committed.written)} paths to the host's folder."]
    lines += [f"not written: {escape_name(path)}: {why}" for path, why in committed.left.items()]
    lines += [f"{escape_name(name)} is {commit}" for name, commit in committed.refs.items()]
    return clip("\n".join(lines))


def _dangers(diff: Diff) -> dict[str, list[str]]:
    """Return why changes are dangerous, the gravest reason first, each with how many are so."""
    counts = [f"{question.reason}: {len(question.paths)}" for question in diff.questions]
    return {"dangers": counts} if counts else {}


def _rows(diff: Diff) -> list[str]:
    """Return a line for each change, the dangerous ones first, so that none of these is one of those cut off.

    They stand by their gravest reason, in the order of the questions.
    """
    order = {path: index for index, question in enumerate(diff.questions) for path in question.paths}
    changes = sorted(diff.changes, key=lambda change: (not change.dangers, order.get(change.path, 0)))
    rows = [_row(change) for change in changes[:MOST_ROWS]]
    return rows if len(changes) <= MOST_ROWS else [*rows, f"and {len(changes) - MOST_ROWS} more"]


def _row(change: Change) -> str:
    name = (
        f"{escape_name(change.old_path)} -> {escape_name(change.path)}" if change.old_path else escape_name(change.path)
    )
    notes = [f"DANGEROUS: {', '.join(change.dangers)}"] if change.dangers else []
    notes += (
        [f"on the host also by {', '.join(map(escape_name, change.reached_as[:MOST_NAMES]))}"]
        if change.reached_as
        else []
    )
    notes += [change.mode_note] if change.mode_note else []
    notes += [f"conflict: {change.conflict}"] if change.conflict else []
    return f"{change.what} {change.kind} {name}" + (f" ({'; '.join(notes)})" if notes else "")


def _left_out(diff: Diff) -> list[str]:
    return [f"never written: {escape_name(change.path)}: {change.reason}" for change in diff.left_out[:MOST_ROWS]]
