"""Packages: a program's requirements, as a read-only layer of files that sandboxes are shown.

In: requirement lines, and the operator's own configuration of index and credentials. Out: folders of the store, one for
Python's packages and one for npm's.

Theory of operation: no file of a package is ever opened, unpacked or compiled in this process. Sandboxes do that, and
their output is bounded and checked here: *resolve* (`resolve.py`) runs uv with the network of the index alone and
answers with a pinned list; *download* (`fetch.py`) has the same network and sends wheels, whose hashes are compared
with the list; *unpack* (`unpack.py`) has no network and sends the files of the wheels and their bytecode. Credentials
are in the first two alone, and no code of a package runs in any of them. It does in a fourth, *build* (`build.py`),
which has neither network nor credentials: for packages without a wheel, and only where the operator permits it; and in
the install scripts of coding agents (`npm_scripts.py`), likewise, for the packages that an agent's row names. The
files become a layer of the store (`store.py`): made in a folder beside, then renamed, so that an incomplete layer is
never used. `install.py` is the way through all of it.

- `requirements.py`, `known_imports.py`, `npm_names.py`: requirements. Pure.
- `rules.py`: the operator's rules. Pure.
- `index.py`, `registry.py`: where packages come from.
- `build.py`: from a source to a wheel, which is then unpacked like the others.
- `npm.py`: the counterpart of `resolve.py` for npm. The other steps are the same for both.
- `steps.py`, `frames.py`, `inside/`: the sandbox of a step; its output; the programs that run in it.
- `folders.py`: the folders of the store and their locks, with few imports. `target.py`: the interpreter.
- `lock.py`: a pinned set in a file.
"""
