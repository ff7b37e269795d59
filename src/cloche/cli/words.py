"""What one can say to the prompt of `cloche session`: words that begin with a colon."""

from __future__ import annotations

import os
import posixpath
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cloche.core.errors import InvalidRequest
from cloche.core.plain import plain_name
from cloche.core.units import format_size
from cloche.hostfs import open_in_place_of

if TYPE_CHECKING:
    from .prompt import Branch, Prompt

Act = Callable[["Prompt", Sequence[str]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """Describe one word: what may follow it, what it does, and who does it."""

    summary: str
    act: Act
    arguments: str = ""
    least: int = 0
    most: int = 0


def obey(prompt: Prompt, line: str) -> None:
    """Do what a line says. Raises InvalidRequest for what is no word, and whatever the deed raises."""
    try:
        name, *arguments = shlex.split(line)
    except ValueError as error:
        raise InvalidRequest(f"{line.split(maxsplit=1)[0]}: {error}") from error
    word = WORDS.get(name.removeprefix(":"))
    if word is None:
        raise InvalidRequest(f"{name} is not known here; known: {' '.join(f':{known}' for known in WORDS)}")
    if not word.least <= len(arguments) <= word.most:
        raise InvalidRequest(f"write it as {usage(name.removeprefix(':'), word)}")
    word.act(prompt, arguments)


def usage(name: str, word: Word) -> str:
    """Return a word as it is written."""
    return f":{name} {word.arguments}".strip()


def tell(text: str) -> None:
    """Print one line, whatever names of the guest's are in it."""
    print(plain_name(text), flush=True)


def show_help(_: Prompt, __: Sequence[str]) -> None:
    """List the words."""
    tell(
        "A cell ends where the code does; a blank line ends a block. Ctrl-C interrupts a cell, twice ends the session."
    )
    for name, word in WORDS.items():
        tell(f"  {usage(name, word):<20} {word.summary}")


def show_history(prompt: Prompt, _: Sequence[str]) -> None:
    """List what was run."""
    for number, entry in enumerate(prompt.branch.session.history, 1):
        first, *more = entry.code.splitlines() or [""]
        tell(f"{number:4}  {entry.status:<8} {entry.duration:7.2f} s  {first}{' …' if more else ''}")


def restart(prompt: Prompt, _: Sequence[str]) -> None:
    """Begin anew."""
    branch = prompt.branch
    branch.session.restart()
    branch.count = 0
    branch.checkpoints.clear()
    tell("a new interpreter, in the same workspace")


def checkpoint(prompt: Prompt, arguments: Sequence[str]) -> None:
    """Remember memory and files."""
    branch = prompt.branch
    name = arguments[0] if arguments else _free_name(branch)
    branch.session.checkpoint(name)
    branch.checkpoints.pop(name, None)
    branch.checkpoints[name] = branch.count
    tell(f"checkpoint {name}: :rollback {shlex.quote(name)} goes back to here")


def _free_name(branch: Branch) -> str:
    number = len(branch.checkpoints) + 1
    while str(number) in branch.checkpoints:
        number += 1
    return str(number)


def rollback(prompt: Prompt, arguments: Sequence[str]) -> None:
    """Go back to a checkpoint."""
    branch = prompt.branch
    if not arguments and not branch.checkpoints:
        raise InvalidRequest("there is no checkpoint; :checkpoint makes one")
    name = arguments[0] if arguments else list(branch.checkpoints)[-1]
    branch.session.rollback(name)
    branch.count = branch.checkpoints.get(name, branch.count)
    names = list(branch.checkpoints)
    for later in names[names.index(name) + 1 :] if name in names else ():
        del branch.checkpoints[later]
    tell(f"back at checkpoint {name}")


def fork(prompt: Prompt, arguments: Sequence[str]) -> None:
    """Make sessions that begin as this one is."""
    branch = prompt.branch
    forks = branch.session.fork(_number(arguments[0]) if arguments else 1)
    numbers = [prompt.adopt(session) for session in forks]
    tell(f"fork {' '.join(str(number) for number in numbers)}: :switch {numbers[0]} goes there")


def show_forks(prompt: Prompt, _: Sequence[str]) -> None:
    """List all sessions of this prompt."""
    for number, branch in prompt.branches.items():
        mark = "*" if number == prompt.at else " "
        origin = "the first one" if branch.origin is None else f"forked from {branch.origin}"
        state = "" if branch.session.is_alive else ", has ended"
        tell(f"{mark} {number}  {origin}, {branch.count} cells{state}")


def switch(prompt: Prompt, arguments: Sequence[str]) -> None:
    """Go on in another session."""
    number = _number(arguments[0])
    _check_there(prompt, number)
    prompt.at = number


def close(prompt: Prompt, arguments: Sequence[str]) -> None:
    """End a fork."""
    number = _number(arguments[0])
    _check_there(prompt, number)
    if number == 0:
        raise InvalidRequest("0 is the first session, which ends with the prompt; :quit leaves")
    prompt.branches.pop(number).session.close()
    if prompt.at == number:
        prompt.at = 0


def show_files(prompt: Prompt, _: Sequence[str]) -> None:
    """List the workspace."""
    for path in sorted(prompt.branch.session.sandbox.list_files()):
        tell(path)


def save(prompt: Prompt, arguments: Sequence[str]) -> None:
    """Copy a file out, under its own name; one that is there is replaced, a link never followed."""
    path, folder = arguments
    sandbox = prompt.branch.session.sandbox
    name = posixpath.basename(path)
    if name in ("", ".", ".."):
        raise InvalidRequest(f":save {path}: give the path of a file; :files lists them")
    data = sandbox.read_file(path, max_bytes=sandbox.limits.disk_bytes)
    target = os.path.join(folder, name)
    try:
        os.makedirs(folder, exist_ok=True)
        open_in_place_of(folder, name, data).close()
    except OSError as error:
        raise InvalidRequest(f"cannot write {target}: {error.strerror}") from error
    tell(f"{target} ({format_size(len(data))})")


def show_limits(prompt: Prompt, _: Sequence[str]) -> None:
    """List the limits."""
    for name, amount in prompt.branch.session.sandbox.limits.as_dict().items():
        if name.endswith("_bytes"):
            tell(f"  {name.removesuffix('_bytes'):<8} {format_size(int(amount))}")
        elif name == "timeout_s":
            tell(f"  timeout  {amount:g} s")
        else:
            tell(f"  {name:<8} {amount:g}")


def leave(prompt: Prompt, _: Sequence[str]) -> None:
    """Leave."""
    prompt.leave()


def _number(text: str) -> int:
    if not text.isdecimal():
        raise InvalidRequest(f"{text!r} is no number")
    return int(text)


def _check_there(prompt: Prompt, number: int) -> None:
    if number not in prompt.branches:
        raise InvalidRequest(f"there is no session {number}; :forks lists them")


WORDS: Mapping[str, Word] = {
    "help": Word(summary="list these words", act=show_help),
    "history": Word(summary="list what was run", act=show_history),
    "restart": Word(summary="begin anew; files stay, checkpoints do not", act=restart),
    "checkpoint": Word(summary="remember memory and files", act=checkpoint, arguments="[NAME]", most=1),
    "rollback": Word(
        summary="go back to a checkpoint, the latest by default", act=rollback, arguments="[NAME]", most=1
    ),
    "fork": Word(summary="make N sessions that begin as this one is", act=fork, arguments="[N]", most=1),
    "forks": Word(summary="list the sessions", act=show_forks),
    "switch": Word(summary="go on in session N", act=switch, arguments="N", least=1, most=1),
    "close": Word(summary="end fork N", act=close, arguments="N", least=1, most=1),
    "files": Word(summary="list the files of the workspace", act=show_files),
    "save": Word(summary="copy a file to a folder here", act=save, arguments="PATH DIR", least=2, most=2),
    "limits": Word(summary="list the limits of a cell", act=show_limits),
    "quit": Word(summary="leave, as Ctrl-D does", act=leave),
}
