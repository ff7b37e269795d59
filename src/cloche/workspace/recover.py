"""Complete or undo a commit that was interrupted, as its journal says. See `journal.py` for the states.

Theory of operation: until a journal says `done`, everything is undone; from then on, only the stage is removed. So what
is found afterwards is the old tree or the new one. Undoing decides nothing by how far the commit came. For each step,
last one first, it looks at what is in the stage: what lies in a slot and is not the staged file itself is the host's
own, and goes back to its path. A path that has the staged file gives it back to the stage. Both look at inodes, so a
step that was not done, or that is undone already, is left alone, and undoing can be interrupted and repeated.

What somebody else did meanwhile is not lost: a path that has neither the old nor the staged file, or that one written
to, keeps what it has. Then the stage stays, with the old one in it, and a warning names it. Nothing is ever removed
recursively.
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
from .host_files import Tree, facts_of, names_in
from .journal import Facts, Journal, Step
from .renames import exchange, rename_new, sync_file_system

# Files, or folders, that are synced one by one; for more the whole file system is. On a busy ext4 1,000 files took 2 to
# 5 s one by one, and 0.2 s so.
MOST_SYNCED = 16
StepHook = Callable[[str], None]
# Where a look or a rename finds that somebody has moved what is above, or has taken the name.
_ELSEWHERE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EEXIST}
log = logging.getLogger("cloche.workspace")


def nothing(_: str) -> None:
    """Be told of a step and do nothing: tests pass a function that interrupts there."""


def recover(folder: int, state: str, *, step: StepHook = nothing) -> str:
    """Complete or undo what an interrupted commit left in one open folder; return a sentence, empty where nothing was.

    Raises WorkspaceFailed where a commit of another process is under way, or its journal is refused.
    """
    facts = os.fstat(folder)
    with journals.open_records(state) as records_fd, journals.locked(records_fd, journals.key_of(facts)) as is_ours:
        if not is_ours:
            raise WorkspaceFailed("another commit to this folder is under way; try again when it has ended")
        return recover_locked(folder, records_fd, step)


def recover_all(state: str) -> list[str]:
    """Do so for every journal there is; return a sentence for each. One whose folder is not found is left."""
    sentences = []
    with journals.open_records(state) as records_fd:
        for key in journals.keys(records_fd):
            try:
                sentences.append(_recover_named(records_fd, key))
            except (WorkspaceFailed, OSError) as error:
                sentences.append(_warn(f"the journal {key}.json was left: {error}"))
    return [sentence for sentence in sentences if sentence]


def recover_locked(folder: int, records_fd: int, step: StepHook = nothing) -> str:
    """Do so for one folder, whose lock the caller has; `at` are the records."""
    facts = os.fstat(folder)
    journals.remove_unfinished(records_fd, journals.key_of(facts))
    named = journals.find(records_fd, facts)
    if named is None:
        return ""
    key, journal = named
    if not journal.is_of(facts):
        return _warn(f"the journal {key}.json was left: it is of another folder")
    try:
        with Tree(folder) as tree:
            return _settle(tree, records_fd, key, journal, step)
    except OSError as error:
        where = escape_name(journal.path)
        raise WorkspaceFailed(f"an interrupted commit to {where} cannot be undone now: {error.strerror}") from error


def undo(tree: Tree, stage: int, steps: tuple[Step, ...], step: StepHook = nothing) -> list[str]:
    """Undo steps, done or not, last one first; return what could not be put back, since something else is there."""
    not_restored: list[str] = []
    failed: OSError | None = None
    for number, planned in reversed(list(enumerate(steps))):
        step(f"undo {number}")
        try:
            if (why := _undo_step(tree, stage, planned)) is not None:
                not_restored.append(f"{escape_name(planned.path)} ({why})")
        except OSError as error:  # the others are undone all the same
            failed = failed or error
    if failed is not None:
        raise failed
    return not_restored


def remove_stage(tree: Tree, stage: int, name: str, step: StepHook = nothing) -> bool:
    """Remove a stage with what has our names in it; tell whether it is gone. A folder that is not empty stays."""
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


def open_stage(tree: Tree, journal: Journal) -> int | None:
    """Return a descriptor of a journal's stage, None where it is not there. Only its inode makes a folder the stage."""
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
    """Recover by a journal's own word of where its folder is."""
    with journals.locked(records_fd, key, patience_s=0) as is_ours:
        if not is_ours:
            return ""  # a commit is under way
        journals.remove_unfinished(records_fd, key)
        journal = journals.read(records_fd, key)
        if journal is None:
            return ""
        try:
            folder = hostfs.open_folder(journal.path)
        except OSError as error:
            return _warn(f"the journal {key}.json was left: {escape_name(journal.path)}: {error.strerror}")
        try:
            if not journal.is_of(os.fstat(folder)):
                return _warn(f"the journal {key}.json was left: {escape_name(journal.path)} is another folder by now")
            with Tree(folder) as tree:
                return _settle(tree, records_fd, key, journal, nothing)
        finally:
            os.close(folder)


def _settle(tree: Tree, records_fd: int, key: str, journal: Journal, step: StepHook) -> str:
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
    tree: Tree, stage: int, records_fd: int, key: str, journal: Journal, step: StepHook = nothing
) -> list[str]:
    """Undo a journal's steps, have that on disk, and write so; return as `undo` does.

    Where something is kept the journal is removed instead, so that nothing ever removes the stage.
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
    """Say why a stage stays."""
    if not not_restored:
        return "since somebody has put files there"
    more = f" and {len(not_restored) - 8} more" if len(not_restored) > 8 else ""
    return f"since it has the host's version of {', '.join(not_restored[:8])}{more}"


def sync_folders(tree: Tree, steps: tuple[Step, ...]) -> None:
    """Have the names in every folder that steps are about on disk. A folder that is gone needs none."""
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


def _undo_step(tree: Tree, stage: int, planned: Step) -> str | None:
    """Undo one step; return why the host's own file stays in the stage, None where it does not."""
    if planned.do == "chmod":
        _undo_chmod(tree, planned)
        return None
    in_stage = facts_of(planned.slot, stage)
    is_hosts = in_stage is not None and (planned.new is None or in_stage.ino != planned.new.ino)
    if not is_hosts and (in_stage is not None or planned.do == "take"):
        return None  # it was not done, or is undone
    try:
        parent_fd, name = tree.parent(planned.path)
        return (_put_back if is_hosts else _take_back)(stage, planned, parent_fd, name)
    except OSError as error:
        if error.errno not in _ELSEWHERE:
            raise
        return f"in {planned.slot}: its folder is gone" if is_hosts else None


def _undo_chmod(tree: Tree, planned: Step) -> None:
    """Give permission bits back to what still is the same, and still has those of the step."""
    facts = tree.look(planned.path)
    if planned.was is not None and facts is not None and facts.st_mode & 0o777 == planned.mode:
        with suppress(FileNotFoundError, NotADirectoryError):
            tree.set_mode(planned.path, planned.was.ino, planned.was.mode)


def _put_back(stage: int, planned: Step, parent_fd: int, name: str) -> str | None:
    """Return to its path what the host had there, whether it was expected or not."""
    present = facts_of(name, parent_fd)
    if present is None:
        rename_new(planned.slot, stage, name, parent_fd)
        return None
    if not _is_staged(present, planned):
        return f"in {planned.slot}: its path has a newer one"
    exchange(planned.slot, stage, name, parent_fd)
    return _edited(stage, planned)


def _take_back(stage: int, planned: Step, parent_fd: int, name: str) -> str | None:
    """Move what was new at its path to the stage; what somebody has written to, or put something into, stays."""
    present = facts_of(name, parent_fd)
    if present is None or not _is_staged(present, planned) or (present.is_folder and names_in(name, parent_fd)):
        return None
    rename_new(name, parent_fd, planned.slot, stage)
    if present.is_folder and names_in(planned.slot, stage):
        rename_new(planned.slot, stage, name, parent_fd)
        return None
    return _edited(stage, planned)


def _edited(stage: int, planned: Step) -> str | None:
    """Say of a staged file that came back that somebody has written to it: then that is not lost, either."""
    facts = facts_of(planned.slot, stage)
    return None if facts is None or _is_staged(facts, planned) else f"in {planned.slot}: it was written to meanwhile"


def _is_staged(facts: Facts, planned: Step) -> bool:
    """Tell whether something is what was staged. An inode may be another file's by now, which its times tell."""
    if planned.new is None or facts.ino != planned.new.ino:
        return False
    return planned.new.is_folder or (facts.size, facts.mtime_ns) == (planned.new.size, planned.new.mtime_ns)


def _remove_empty(tree: Tree, stage: str) -> None:
    """Remove a stage that nothing was written into yet: whatever else has its name is not empty, or not a folder."""
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
