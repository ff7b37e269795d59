"""Packages: what a program asks for, as a read-only layer of files that sandboxes are shown.

In: requirement lines, and the operator's own configuration of index and credentials. Out: folders of the store, one for
Python's packages and one for npm's.

Theory of operation: nothing of a package is ever opened, unpacked or compiled in this process. Sandboxes do that, and
what they send is bounded and checked here: *resolve* (`resolve.py`) runs uv with the network of the index alone and
answers with a pinned list; *download* (`fetch.py`) has the same network and sends wheels, whose hashes are compared
with the list; *unpack* (`unpack.py`) has no network and sends the files of the wheels and their bytecode. Credentials
are in the first two alone, and no code of a package runs in any of them. It does in a fourth, *build* (`build.py`),
which has neither network nor credentials: for what has no wheel, and only where the operator says so. The files become
a layer of the store (`store.py`): made beside, then renamed, so nothing that is half made is ever used. `install.py` is
the way through all of it.

- `requirements.py`, `known_imports.py`, `npm_names.py`: what is asked for. Pure.
- `rules.py`: what the operator allows. Pure.
- `index.py`, `registry.py`: where packages come from.
- `build.py`: from a source to a wheel, which is then unpacked as all are.
- `npm.py`: what `resolve.py` is for Python's packages, for npm's. The other steps are the same for both.
- `steps.py`, `frames.py`, `inside/`: how a sandbox is used for a step; what it sends; the programs that run in it.
- `folders.py`: the folders of the store and their locks, for those who need no more. `target.py`: which interpreter.
- `lock.py`: a set that is written down, and required.
"""
