"""What runs inside a container: pid 1 (`reaper`), programs, sessions and files, as it orders them.

These files are sent into the container as text, and imported there as the package `inside`, beside `interpreter`.
In: frames from the caller on standard input (`link`). Out: frames on standard output.

To be kept: the standard library alone, relative imports alone, and Python 3.11, whatever the image has besides. A
new file must be named in `containers/container.py`. A program can send anything that this code can: the caller
believes none of it.
"""
