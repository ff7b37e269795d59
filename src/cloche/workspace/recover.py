"""Complete or undo an interrupted commit, according to its journal. `journal.py` defines the states.

Theory of operation: until the journal says `done`, everything is undone; after that, only the stage is removed. So the
result is the old tree or the new one. Undoing does not depend on how far the commit came. For each step, last one
first, it looks into the stage: a file in a slot that is not the staged file is the host's, and is moved back to its
path. A path that has the staged file returns it to the stage. Both are recognised by inode, so a step that was not
done, or is already undone, is skipped, and undoing can be interrupted and repeated.

Concurrent changes by other processes are not lost. A path that has neither the old nor the staged file, or a staged
file that was written to, keeps it. Then the stage stays, with the old file in it, and a warning names it. Nothing is
removed recursively.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable
from contextlib import suppress

from cloche import hostfs
from cloche.core.errors import WorkspaceFailed
from cloche.core.escape import escape_name

from . import journal as journals
from .host_files import HostTree, facts_of, names_in
from .journal import CommitStep, FileFacts, Journal
from .renames import exchange, rename_new, sync_file_system

# Up to this many files or folders are synced one by one, more with syncfs(2). On a busy ext4, 1,000 files took 2 to 5 s
# with fsync, and 0.2 s with syncfs.
MOST_SYNCED = 16
StepHook = Callable[[str], None]
# errno of a lookup or rename when another process has moved a parent folder or taken the name.
_ELSEWHERE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EEXIST}
log = logging.getLogger("cloche.workspace")


def nothing(_: str) -> None:
    """Do nothing: the default `step`. Tests pass a function that interrupts at a step."""


def recover(folder: int, state: str, *, step: StepHook = nothing) -> str:
    """Complete or undo an interrupted commit to an open folder; return a sentence, empty if there was none.

    Raises WorkspaceFailed if another process is committing, or the journal is refused.
    """
    facts = os.fstat(folder)
    with journals.open_records(state) as records_fd, journals.locked(records_fd, journals.key_of(facts)) as is_ours:
        if not is_ours:
            raise WorkspaceFailed("another commit to this folder is under way; try again when it has ended")
        return recover_locked(folder, records_fd, step)


def recover_all(state: str) -> list[str]:
    """Recover every journal; return a sentence for each. A journal whose folder is not found is left."""
    sentences = []
    with journals.open_records(state) as records_fd:
        for key in journals.keys(records_fd):
            try:
                sentences.append(_recover_named(records_fd, key))
            except (WorkspaceFailed, OSError) as error:
                sentences.append(_warn(f"the journal {key}.json was kept: {error}"))
    return [sentence for sentence in sentences if sentence]


def recover_locked(folder: int, records_fd: int, step: StepHook = nothing) -> str:
    """Recover one folder, whose lock the caller holds; `records_fd` is the folder of journals."""
    facts = os.fstat(folder)
    journals.remove_unfinished(records_fd, journals.key_of(facts))
    named = journals.find(records_fd, facts)
    if named is None:
        return ""
    key, journal = named
    if not journal.is_of(facts):
        return _warn(f"the journal {key}.json was kept: it is of another folder")
    try:
        with HostTree(folder) as tree:
            return _settle(tree, records_fd, key, journal, step)
    except OSError as error:
        where = escape_name(journal.path)
        raise WorkspaceFailed(f"an interrupted commit to {where} cannot be undone now: {error.strerror}") from error


def undo(tree: HostTree, stage: int, steps: tuple[CommitStep, ...], step: StepHook = nothing) -> list[str]:
    """Undo steps, done or not, last one first; return the paths that could not be restored, with reasons."""
    not_restored: list[str] = []
    failed: OSError | None = None
    for number, planned in reversed(list(enumerate(steps))):
        step(f"undo {number}")
        try:
            if (why := _undo_step(tree, stage, planned)) is not None:
                not_restored.append(f"{escape_name(planned.path)} ({why})")
        except OSError as error:  # continue with the other steps
            failed = failed or error
    if failed is not None:
        raise failed
    return not_restored


def remove_stage(tree: HostTree, stage: int, name: str, step: StepHook = nothing) -> bool:
    """Remove a stage and the slots in it; tell whether it is gone. Other files in it are kept, and so is then the
    stage.
    """
    for slot in sorted(os.listdir(stage)):
        step(f"clear {slot}")
        if journals.is_slot(slot):
            with suppress(OSError):
                _remove(slot, stage)
    try:
        os.rmdir(name, dir_fd=tree.fd)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    os.fsync(tree.fd)
    return True


def open_stage(tree: HostTree, journal: Journal) -> int | None:
    """Return a descriptor of a journal's stage, None if it does not exist. It must have the inode in the journal."""
    try:
        fd = hostfs.open_folder(journal.stage, tree.fd)
    except (FileNotFoundError, NotADirectoryError):
        return None
    facts = os.fstat(fd)
    if (facts.st_ino, facts.st_dev, facts.st_uid) != (journal.stage_ino, tree.facts.st_dev, os.geteuid()):
        os.close(fd)
        return None
    return fd


def _recover_named(records_fd: int, key: str) -> str:
    with journals.locked(records_fd, key, patience_s=0) as is_ours:
        if not is_ours:
            return ""  # a commit is running
        journals.remove_unfinished(records_fd, key)
        journal = journals.read(records_fd, key)
        if journal is None:
            return ""
        try:
            folder = hostfs.open_folder(journal.path)
        except OSError as error:
            return _warn(f"the journal {key}.json was kept: {escape_name(journal.path)}: {error.strerror}")
        try:
            if not journal.is_of(os.fstat(folder)):
                return _warn(f"the journal {key}.json was kept: {escape_name(journal.path)} is another folder now")
            with HostTree(folder) as tree:
                return _settle(tree, records_fd, key, journal, nothing)
        finally:
            os.close(folder)


def _settle(tree: HostTree, records_fd: int, key: str, journal: Journal, step: StepHook) -> str:
    where = escape_name(journal.path)
    if journal.state == "intent":
        _remove_empty(tree, journal.stage)
        journals.remove(records_fd, key)
        return f"{where}: a commit had been interrupted before it began"
    stage = open_stage(tree, journal)
    if stage is None:
        journals.remove(records_fd, key)
        if journal.state == "applying":
            return _warn(f"{where}: a commit had been interrupted, and its files ({journal.stage}) are gone")
        return f"{where}: a commit had been interrupted; nothing was left to do"
    try:
        not_restored: list[str] = []
        if journal.state == "applying":
            not_restored = undo_durably(tree, stage, records_fd, key, journal, step)
        is_gone = not not_restored and remove_stage(tree, stage, journal.stage, step)
        step("cleared")
        journals.remove(records_fd, key)
    finally:
        os.close(stage)
    outcome = "completed" if journal.state == "done" else "undone"
    report = f"{where}: an interrupted commit was {outcome}"
    return report if is_gone else _warn(f"{report}; {journal.stage} stays there, {kept_sentence(not_restored)}")


def undo_durably(
    tree: HostTree, stage: int, records_fd: int, key: str, journal: Journal, step: StepHook = nothing
) -> list[str]:
    """Undo a journal's steps, sync, and record it in the journal; return as `undo` does.

    If files could not be restored, the journal is removed instead, so that no recovery ever removes the stage.
    """
    not_restored = undo(tree, stage, journal.steps, step)
    sync_folders(tree, journal.steps)
    os.fsync(stage)
    step("undone")
    if not_restored:
        journals.remove(records_fd, key)
    else:
        journals.write(records_fd, key, journals.advanced(journal, "undone", steps=()))
    step("undone written")
    return not_restored


def kept_sentence(not_restored: list[str]) -> str:
    """Return why a stage stays."""
    if not not_restored:
        return "because other files are there now"
    more = f" and {len(not_restored) - 8} more" if len(not_restored) > 8 else ""
    return f"since it has the host's version of {', '.join(not_restored[:8])}{more}"


def sync_folders(tree: HostTree, steps: tuple[CommitStep, ...]) -> None:
    """Sync the parent folder of every step. A folder that has disappeared is skipped."""
    folders = {planned.path.rpartition("/")[0] for planned in steps} - {""}
    if len(folders) > MOST_SYNCED:
        sync_file_system(tree.fd)
        return
    os.fsync(tree.fd)
    for folder in sorted(folders):
        try:
            parent_fd, name = tree.parent(folder)
            fd = hostfs.open_folder(name, parent_fd)
        except OSError as error:
            if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
                continue
            raise
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _undo_step(tree: HostTree, stage: int, planned: CommitStep) -> str | None:
    """Undo one step; return why the host's own file stays in the stage, None if it does not."""
    if planned.do == "chmod":
        _undo_chmod(tree, planned)
        return None
    in_stage = facts_of(planned.slot, stage)
    is_hosts = in_stage is not None and (planned.new is None or in_stage.ino != planned.new.ino)
    if not is_hosts and (in_stage is not None or planned.do == "take"):
        return None  # not done, or undone already
    try:
        parent_fd, name = tree.parent(planned.path)
        return (_put_back if is_hosts else _take_back)(stage, planned, parent_fd, name)
    except OSError as error:
        if error.errno not in _ELSEWHERE:
            raise
        return f"in {planned.slot}: its folder is gone" if is_hosts else None


def _undo_chmod(tree: HostTree, planned: CommitStep) -> None:
    """Restore permission bits of a file that is unchanged, and still has those of the step."""
    facts = tree.look(planned.path)
    if planned.was is not None and facts is not None and facts.st_mode & 0o777 == planned.mode:
        with suppress(FileNotFoundError, NotADirectoryError):
            tree.set_mode(planned.path, planned.was.ino, planned.was.mode)


def _put_back(stage: int, planned: CommitStep, parent_fd: int, name: str) -> str | None:
    """Move the host's file back to its path, whether or not it was the expected one."""
    present = facts_of(name, parent_fd)
    if present is None:
        rename_new(planned.slot, stage, name, parent_fd)
        return None
    if not _is_staged(present, planned):
        return f"in {planned.slot}: its path has a newer one"
    exchange(planned.slot, stage, name, parent_fd)
    return _edited(stage, planned)


def _take_back(stage: int, planned: CommitStep, parent_fd: int, name: str) -> str | None:
    """Move a new file from its path to the stage. It stays if it was written to, or if a folder is not empty."""
    present = facts_of(name, parent_fd)
    if present is None or not _is_staged(present, planned) or (present.is_folder and names_in(name, parent_fd)):
        return None
    rename_new(name, parent_fd, planned.slot, stage)
    if present.is_folder and names_in(planned.slot, stage):
        rename_new(planned.slot, stage, name, parent_fd)
        return None
    return _edited(stage, planned)


def _edited(stage: int, planned: CommitStep) -> str | None:
    """Return a reason to keep a returned staged file if another process has written to it."""
    facts = facts_of(planned.slot, stage)
    return None if facts is None or _is_staged(facts, planned) else f"in {planned.slot}: it was written to meanwhile"


def _is_staged(facts: FileFacts, planned: CommitStep) -> bool:
    """Tell whether a file is the staged one. An inode may have been reused, which size and mtime show."""
    if planned.new is None or facts.ino != planned.new.ino:
        return False
    return planned.new.is_folder or (facts.size, facts.mtime_ns) == (planned.new.size, planned.new.mtime_ns)


def _remove_empty(tree: HostTree, stage: str) -> None:
    """Remove a stage that is still empty. Any other file of that name is not an empty folder of this user."""
    facts = hostfs.look(stage, tree.fd)
    if facts is not None and stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid():
        with suppress(OSError):
            os.rmdir(stage, dir_fd=tree.fd)


def _remove(slot: str, stage: int) -> None:
    try:
        os.unlink(slot, dir_fd=stage)
    except IsADirectoryError:
        os.rmdir(slot, dir_fd=stage)


def _warn(sentence: str) -> str:
    log.warning("%s", sentence)
    return sentence
