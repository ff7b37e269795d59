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
Told = Callable[[str], None]
# Where a look or a rename finds that somebody has moved what is above, or has taken the name.
_ELSEWHERE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EEXIST}
log = logging.getLogger("cloche.workspace")


def nothing(_: str) -> None:
    """Be told of a step and do nothing: tests pass a function that interrupts there."""


def recover(folder: int, state: str, *, step: Told = nothing) -> str:
    """Complete or undo what an interrupted commit left in one open folder; return a sentence, empty where nothing was.

    Raises WorkspaceFailed where a commit of another process is under way, or its journal is refused.
    """
    found = os.fstat(folder)
    with journals.open_records(state) as at, journals.locked(at, journals.key_of(found)) as is_ours:
        if not is_ours:
            raise WorkspaceFailed("another commit to this folder is under way; try again when it has ended")
        return recover_locked(folder, at, step)


def recover_all(state: str) -> list[str]:
    """Do so for every journal there is; return a sentence for each. One whose folder is not found is left."""
    told = []
    with journals.open_records(state) as at:
        for key in journals.keys(at):
            try:
                told.append(_recover_named(at, key))
            except (WorkspaceFailed, OSError) as error:
                told.append(_warn(f"the journal {key}.json was left: {error}"))
    return [sentence for sentence in told if sentence]


def recover_locked(folder: int, at: int, step: Told = nothing) -> str:
    """Do so for one folder, whose lock the caller has; `at` are the records."""
    found = os.fstat(folder)
    journals.remove_unfinished(at, journals.key_of(found))
    named = journals.find(at, found)
    if named is None:
        return ""
    key, journal = named
    if not journal.is_of(found):
        return _warn(f"the journal {key}.json was left: it is of another folder")
    try:
        with Tree(folder) as tree:
            return _settle(tree, at, key, journal, step)
    except OSError as error:
        where = escape_name(journal.path)
        raise WorkspaceFailed(f"an interrupted commit to {where} cannot be undone now: {error.strerror}") from error


def undo(tree: Tree, stage: int, steps: tuple[Step, ...], step: Told = nothing) -> list[str]:
    """Undo steps, done or not, last one first; return what could not be put back, since something else is there."""
    kept: list[str] = []
    failed: OSError | None = None
    for number, one in reversed(list(enumerate(steps))):
        step(f"undo {number}")
        try:
            if (why := _undo_step(tree, stage, one)) is not None:
                kept.append(f"{escape_name(one.path)} ({why})")
        except OSError as error:  # the others are undone all the same
            failed = failed or error
    if failed is not None:
        raise failed
    return kept


def remove_stage(tree: Tree, stage: int, name: str, step: Told = nothing) -> bool:
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
    found = os.fstat(fd)
    if (found.st_ino, found.st_dev, found.st_uid) != (journal.stage_ino, tree.facts.st_dev, os.geteuid()):
        os.close(fd)
        return None
    return fd


def _recover_named(at: int, key: str) -> str:
    """Recover by a journal's own word of where its folder is."""
    with journals.locked(at, key, patience_s=0) as is_ours:
        if not is_ours:
            return ""  # a commit is under way
        journals.remove_unfinished(at, key)
        journal = journals.read(at, key)
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
                return _settle(tree, at, key, journal, nothing)
        finally:
            os.close(folder)


def _settle(tree: Tree, at: int, key: str, journal: Journal, step: Told) -> str:
    where = escape_name(journal.path)
    if journal.state == "intent":
        _remove_empty(tree, journal.stage)
        journals.remove(at, key)
        return f"{where}: a commit had been interrupted before it began"
    stage = open_stage(tree, journal)
    if stage is None:
        journals.remove(at, key)
        if journal.state == "applying":
            return _warn(f"{where}: a commit had been interrupted, and its files ({journal.stage}) are gone")
        return f"{where}: a commit had been interrupted; nothing was left to do"
    try:
        kept: list[str] = []
        if journal.state == "applying":
            kept = undo_durably(tree, stage, at, key, journal, step)
        is_gone = not kept and remove_stage(tree, stage, journal.stage, step)
        step("cleared")
        journals.remove(at, key)
    finally:
        os.close(stage)
    what = "completed" if journal.state == "done" else "undone"
    told = f"{where}: an interrupted commit was {what}"
    return told if is_gone else _warn(f"{told}; {journal.stage} stays there, {kept_sentence(kept)}")


def undo_durably(tree: Tree, stage: int, at: int, key: str, journal: Journal, step: Told = nothing) -> list[str]:
    """Undo a journal's steps, have that on disk, and write so; return as `undo` does.

    Where something is kept the journal is removed instead, so that nothing ever removes the stage.
    """
    kept = undo(tree, stage, journal.steps, step)
    sync_folders(tree, journal.steps)
    os.fsync(stage)
    step("undone")
    if kept:
        journals.remove(at, key)
    else:
        journals.write(at, key, journals.advanced(journal, "undone", steps=()))
    step("undone written")
    return kept


def kept_sentence(kept: list[str]) -> str:
    """Say why a stage stays."""
    if not kept:
        return "since somebody has put files there"
    more = f" and {len(kept) - 8} more" if len(kept) > 8 else ""
    return f"since it has the host's version of {', '.join(kept[:8])}{more}"


def sync_folders(tree: Tree, steps: tuple[Step, ...]) -> None:
    """Have the names in every folder that steps are about on disk. A folder that is gone needs none."""
    folders = {one.path.rpartition("/")[0] for one in steps} - {""}
    if len(folders) > MOST_SYNCED:
        sync_file_system(tree.fd)
        return
    os.fsync(tree.fd)
    for folder in sorted(folders):
        try:
            at, name = tree.parent(folder)
            fd = hostfs.open_folder(name, at)
        except OSError as error:
            if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
                continue
            raise
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _undo_step(tree: Tree, stage: int, one: Step) -> str | None:
    """Undo one step; return why the host's own file stays in the stage, None where it does not."""
    if one.do == "chmod":
        _undo_chmod(tree, one)
        return None
    in_stage = facts_of(one.slot, stage)
    is_hosts = in_stage is not None and (one.new is None or in_stage.ino != one.new.ino)
    if not is_hosts and (in_stage is not None or one.do == "take"):
        return None  # it was not done, or is undone
    try:
        at, name = tree.parent(one.path)
        return (_put_back if is_hosts else _take_back)(stage, one, at, name)
    except OSError as error:
        if error.errno not in _ELSEWHERE:
            raise
        return f"in {one.slot}: its folder is gone" if is_hosts else None


def _undo_chmod(tree: Tree, one: Step) -> None:
    """Give permission bits back to what still is the same, and still has those of the step."""
    found = tree.look(one.path)
    if one.was is not None and found is not None and found.st_mode & 0o777 == one.mode:
        with suppress(FileNotFoundError, NotADirectoryError):
            tree.set_mode(one.path, one.was.ino, one.was.mode)


def _put_back(stage: int, one: Step, at: int, name: str) -> str | None:
    """Return to its path what the host had there, whether it was expected or not."""
    there = facts_of(name, at)
    if there is None:
        rename_new(one.slot, stage, name, at)
        return None
    if not _is_staged(there, one):
        return f"in {one.slot}: its path has a newer one"
    exchange(one.slot, stage, name, at)
    return _edited(stage, one)


def _take_back(stage: int, one: Step, at: int, name: str) -> str | None:
    """Move what was new at its path to the stage; what somebody has written to, or put something into, stays."""
    there = facts_of(name, at)
    if there is None or not _is_staged(there, one) or (there.is_folder and names_in(name, at)):
        return None
    rename_new(name, at, one.slot, stage)
    if there.is_folder and names_in(one.slot, stage):
        rename_new(one.slot, stage, name, at)
        return None
    return _edited(stage, one)


def _edited(stage: int, one: Step) -> str | None:
    """Say of a staged file that came back that somebody has written to it: then that is not lost, either."""
    found = facts_of(one.slot, stage)
    return None if found is None or _is_staged(found, one) else f"in {one.slot}: it was written to meanwhile"


def _is_staged(found: Facts, one: Step) -> bool:
    """Tell whether something is what was staged. An inode may be another file's by now, which its times tell."""
    if one.new is None or found.ino != one.new.ino:
        return False
    return one.new.is_folder or (found.size, found.mtime_ns) == (one.new.size, one.new.mtime_ns)


def _remove_empty(tree: Tree, stage: str) -> None:
    """Remove a stage that nothing was written into yet: whatever else has its name is not empty, or not a folder."""
    found = hostfs.look(stage, tree.fd)
    if found is not None and stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
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
