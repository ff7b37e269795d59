"""Write a file in a folder that may be another user's, who can put anything at its name.

The file is made new beside its place, by a descriptor of the folder, and renamed over whatever is there: no link is
followed, no FIFO is waited for, and a file that has another name elsewhere keeps its content there.
"""

from __future__ import annotations

import os
from typing import BinaryIO

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def open_in_place_of(folder: str | os.PathLike[str], name: str, data: bytes = b"") -> BinaryIO:
    """Return a file that begins with `data` and takes the place of what has this name in a folder, to be written on.

    Raises OSError, where a folder is in its place above all.
    """
    folder_fd = os.open(folder, _FOLDER)
    try:
        temporary = f".{os.getpid()}-{os.urandom(6).hex()}.cloche"
        file = open(os.open(temporary, _NEW, 0o666, dir_fd=folder_fd), "wb")  # noqa: SIM115 - who asked closes it
        try:
            file.write(data)
            file.flush()
            os.rename(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
        except BaseException:
            os.unlink(temporary, dir_fd=folder_fd)
            file.close()
            raise
        return file
    finally:
        os.close(folder_fd)
