"""Calls that the reaper makes in a guest's place: the guest's own call does not continue, so no race can change it.

Theory of operation: a filter sees registers alone, and the memory behind a pointer can change at any time. So where a
decision depends on memory (a path, an address), the guest's thread is held, the argument is copied once, and that copy
is both checked and used here. The answer is a number, an errno, or a descriptor that is put into the guest.
`seccomp_notify.answer` receives the table of answerers by call. Answers take bounded time and little memory, one
question in each round of the reaper's loop, so endless questions delay nothing else.

The guest's memory, descriptors and directory are read below one descriptor of its folder in /proc, which refers to that
one thread and to no later one with the same number; once it is open, `SECCOMP_IOCTL_NOTIF_ID_VALID` confirms that the
thread still waits. This takes a process with the guest's uid outside of its Landlock domain, and Yama's first level
requires that process to be an ancestor.
"""

from __future__ import annotations

import posix

from .seccomp_notify import ioctl, reply, send_value
from .syscalls import read_uint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from .messages import Spec

    Answerer = Callable[["HeldCall"], int]

ID_VALID, ADDFD = 0x40082102, 0x40182103
SETFD, SEND = 1, 2
MOST_PATH, MOST_COPIED, MOST_ADDRESS = 4096, 1 << 16, (1 << 63) - 1
EPERM, EBADF, EFAULT, EINVAL, ENAMETOOLONG = 1, 9, 14, 22, 36
AT_CWD = 0xFFFFFF9C  # AT_FDCWD, in a register
SOCKET = b"socket:["  # and the inode, and a bracket: the name of any in /proc


class HeldCall:
    """Hold one question: the arguments in registers, and access to the memory and descriptors that they refer to."""

    def __init__(self, listener: int, question: bytes):
        self.listener, self.question = listener, question
        self.number, self.pid = read_uint(question, 16), read_uint(question, 8)
        self.arguments = [read_uint(question, 32 + 8 * index, 8) for index in range(6)]
        self.is_answered = False
        self._memory = -1
        self._folder = posix.open(f"/proc/{self.pid}", posix.O_PATH | posix.O_DIRECTORY | posix.O_CLOEXEC)

    def __enter__(self) -> Self:
        """Raise OSError where the thread does not ask any more: its number may be another one's by now."""
        try:
            ioctl(self.listener, ID_VALID, self.question[:8])
        except OSError:
            posix.close(self._folder)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        posix.close(self._folder)
        if self._memory >= 0:
            posix.close(self._memory)

    def argument(self, index: int) -> int:
        """Return an argument of 32 bits."""
        return self.arguments[index] & 0xFFFFFFFF

    def copy(self, address: int, size: int) -> bytes:
        """Return so many bytes of the guest's memory, at most MOST_COPIED. Raises OSError: EFAULT, or EINVAL for more.

        Each call copies anew, and may find something else.
        """
        if size > MOST_COPIED:
            raise OSError(EINVAL, "too much to copy")
        data = self._read(address, size)
        if len(data) < size:
            raise OSError(EFAULT, "not in the guest's memory")
        return data

    def text(self, address: int, max_bytes: int = MOST_PATH) -> bytes:
        """Return the bytes at an address up to a NUL, which is among the first `max_bytes`. Raises OSError."""
        data, nul, _ = self._read(address, max_bytes).partition(b"\0")
        if not nul:
            raise OSError(ENAMETOOLONG if len(data) == max_bytes else EFAULT, "no end of it in the guest's memory")
        return data

    def write(self, address: int, data: bytes) -> None:
        """Write into the guest's memory, as the guest itself could. Raises OSError."""
        memory = posix.open("mem", posix.O_WRONLY | posix.O_CLOEXEC, dir_fd=self._folder)
        try:
            posix.pwrite(memory, data, address)
        finally:
            posix.close(memory)

    def program(self) -> bytes:
        """Return the path of the guest's program, which the guest chooses."""
        return self._link(b"exe")

    def open_descriptor(self, number: int) -> int:
        """Return a descriptor (O_PATH) of the guest's open file of this number. Raises OSError: EBADF."""
        try:
            return posix.open(f"fd/{number}", posix.O_PATH | posix.O_CLOEXEC, dir_fd=self._folder)
        except FileNotFoundError:
            raise OSError(EBADF, "not open in the guest") from None

    def open_socket(self, number: int) -> int:
        """Return the inode of the guest's socket of this number, 0 for another kind of file. Raises OSError: EBADF.

        Nothing is read of other files: the kernel's description of an epoll instance is as long as the guest made it,
        and takes seconds to write.
        """
        name = self._link(b"fd/%d" % number)
        return int(name[len(SOCKET) : -1]) if name.startswith(SOCKET) else 0

    def open_flags(self, number: int) -> int:
        """Return the flags, as `open` takes them, of the guest's open file of this number. Raises OSError: EBADF."""
        try:
            fd = posix.open(f"fdinfo/{number}", posix.O_RDONLY | posix.O_CLOEXEC, dir_fd=self._folder)
        except FileNotFoundError:
            raise OSError(EBADF, "not open in the guest") from None
        try:
            rows = posix.read(fd, MOST_PATH).split(b"\n")
        finally:
            posix.close(fd)
        return int(rows[1].removeprefix(b"flags:\t"), 8)

    def directory(self, number: int = AT_CWD) -> bytes:
        """Return the path of an open directory of the guest's, of its working directory for AT_FDCWD.

        It is where the directory was a moment ago: no more than a word of the guest's.
        """
        return self._link(b"cwd" if number == AT_CWD else b"fd/%d" % number)

    def put(self, fd: int, number: int = -1, *, flags: int = posix.O_CLOEXEC, is_answer: bool = False) -> int:
        """Put a copy of `fd` into the guest and return its number there.

        It replaces the guest's descriptor `number`, or gets a new number; `flags` is 0 or O_CLOEXEC. It is the `answer`
        of the call, in one step (for a new number only), or is put there before the answer.
        """
        kind = (SETFD if number >= 0 else 0) | (SEND if is_answer else 0)
        fields = (kind, fd, max(0, number), flags)
        request = self.question[:8] + b"".join(field.to_bytes(4, "little") for field in fields)
        guest_fd = ioctl(self.listener, ADDFD, request)
        self.is_answered = is_answer
        return guest_fd

    def let_go_on(self) -> None:
        """Have the kernel make the call itself: for decisions that depend on registers, or on no argument at all."""
        reply(self.listener, self.question)
        self.is_answered = True

    def _link(self, name: bytes) -> bytes:
        try:
            return posix.readlink(name, dir_fd=self._folder)
        except FileNotFoundError:
            raise OSError(EBADF, "not open in the guest") from None

    def _read(self, address: int, size: int) -> bytes:
        if self._memory < 0:
            self._memory = posix.open("mem", posix.O_RDONLY | posix.O_CLOEXEC, dir_fd=self._folder)
        if not 0 < address <= MOST_ADDRESS - size:
            raise OSError(EFAULT, "no address")
        try:
            return posix.pread(self._memory, size, address)
        except OSError as error:
            raise OSError(EFAULT, "not in the guest's memory") from error


def load(spec: Spec) -> dict[int, Callable[[int, bytes], None]]:
    """Return the answerers of a sandbox's calls, by number; each gets the listener and the question.

    Each module that `spec.answered` names has a function `answerers`, which gets the spec and the calls' names by their
    numbers, and returns an `Answerer` for each number.
    """
    answerers_by_number: dict[int, Callable[[int, bytes], None]] = {}
    for module, names in spec.answered.items():
        answerers = __import__(module, globals(), None, ("answerers",), 1).answerers(spec, names)
        answerers_by_number |= {number: answering(answerer) for number, answerer in answerers.items()}
    return answerers_by_number


def answering(answerer: Answerer) -> Callable[[int, bytes], None]:
    """Return a function that answers a call with the result of `answerer`, or the errno of the OSError that it raises.

    Raises OSError if the notifying thread has ended meanwhile.
    """

    def answer(listener: int, question: bytes) -> None:
        value, refusal = 0, 0
        try:
            with HeldCall(listener, question) as held_call:
                value = answerer(held_call)
                if held_call.is_answered:
                    return
        except OSError as error:
            refusal = error.errno or EPERM
        send_value(listener, question, value, refusal)

    return answer
