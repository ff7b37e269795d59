"""Work that a fork server does ahead for all its forks, and each fork for the run to come. Standard library only.

`warm_up` loads and uses modules in the fork server, or in pid 1 of a container. `warm_up_fork` performs an empty run in
a guest that waits.
"""

from __future__ import annotations

import gc
import os
import sys

from . import host_functions, oneshot, result_value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any

_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
# What a fork server does with a module once, so that its children find it set up; and they too, as they wait.
_FIRST_USES = {
    "numpy": "import numpy; str(numpy.arange(3.0) @ numpy.arange(3.0))",
    "pandas": "import pandas; str(pandas.DataFrame({'a': [1, 2], 'b': [0.5, 1.5], 'c': ['x', 'y']}).describe())",
    "matplotlib": "import matplotlib; matplotlib.use('agg')",
}
_NOWHERE = "/dev/null/main.py"
_OFTEN = 20  # CPython rewrites code that runs often: better here, once, than in the memory of each child

_uses: list[CodeType] = []  # of what is preloaded


def warm_up(settings: dict[str, Any]) -> dict[str, Any]:
    """Put a fork server into the state of a plain interpreter after its start; load and use `settings["preload"]`.

    Returns the modules that could not be loaded, with the reasons. `home` is the guest's home: the site module looks
    for packages of the user there, and must not find the caller's. `ahead` has the values that most runs will have,
    with a file as standard input and pipes for output: their environment `env`, and the folders `shown` that all of
    them see as they are here; or it is absent (None).
    """
    os.environ["HOME"] = settings["home"]
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, "1"))  # numpy's libraries would start threads
    preloaded = oneshot.prepare()
    preloaded.built_in_paths = len(sys.path)
    oneshot.restore_paths({**settings, "path": ""})
    del sys.path[0]
    failed = {}
    for name in settings["preload"]:
        try:
            __import__(name)
            use = compile(_FIRST_USES.get(name, ""), "<first use>", "exec")
            exec(use, {})
            _uses.append(use)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
    compile("1", "", "exec", oneshot.ONLY_AST)
    traceback = sys.modules.get("traceback")
    if traceback is not None:
        traceback.format_exception(ValueError("x"))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # output of imports is no guest's output
    os.environ.clear()
    sys.path_importer_cache.clear()
    preloaded.result_value, preloaded.host_functions = result_value, host_functions
    preloaded.warm_up_fork = warm_up_fork
    preloaded.modules.update(sys.modules)
    preloaded.libraries = oneshot.count_libraries() if "ctypes" in sys.modules else 0
    if settings["ahead"] is not None:
        _look_ahead(preloaded, **settings["ahead"])
    return {"failed": failed}


def _look_ahead(preloaded: oneshot.Preloaded, env: dict[str, str], shown: list[str]) -> None:
    """Take the environment and streams that the children will have, and warm up until all caches are filled.

    The streams are of the same kinds as a run's, so that they serve it, too. No caches are kept of folders that not all
    children will see.
    """
    import _frozen_importlib_external

    gc.collect()
    gc.freeze()  # else each run of nothing would look at everything
    paths = sys.path[:]
    preloaded.paths = [path for path in paths if any(f"{path}/".startswith(f"{folder}/") for folder in shown)]
    kept_fds = [os.dup(number) for number in range(3)]
    null = os.open(os.devnull, os.O_RDWR)
    reading, writing = os.pipe()
    try:
        for number, fd in enumerate((null, writing, writing)):
            os.dup2(fd, number)
        oneshot.take_over(env, preloaded)
        preloaded.env = env
        _frozen_importlib_external.PathFinder.find_spec("cloche_warms_up", preloaded.paths)
        for _ in range(_OFTEN):
            _run_nothing(preloaded)
    finally:
        sys.path[:], preloaded.paths = paths, None
        for number, fd in enumerate(kept_fds):
            os.dup2(fd, number)
        for fd in (*kept_fds, null, reading, writing):
            os.close(fd)


def warm_up_fork() -> None:
    """Perform an empty run while nothing waits: memory that it writes to is then this process's own, and cached.

    The import path, and fresh random seeds, serve the run too.
    """
    preloaded = oneshot.prepare()
    preloaded.paths = oneshot.visible_paths(preloaded)
    oneshot.reseed()
    for use in _uses:
        try:
            exec(use, {})
        except Exception:  # it worked in the fork server; a run that uses it will report the error itself
            _uses.clear()
            break
    _run_nothing(preloaded)
    gc.freeze()


def _run_nothing(preloaded: oneshot.Preloaded) -> None:
    """Do the work of a run from its order to its end, without exiting."""
    oneshot.set_up_paths({"path": _NOWHERE, "extra_paths": [], "customizes": False}, preloaded)
    oneshot.name_output()
    oneshot.main_module(_NOWHERE)
    oneshot.read_source(os.devnull)
    source = b"import sys\nprint(len(sys.path), file=sys.stdout)"
    body, last = oneshot.compile_at_last_line(source, "<warm-up>") or ("", "")
    namespace: dict[str, Any] = {}
    exec(body, namespace)
    eval(last, namespace)
    oneshot.flush()
    del sys.modules["__main__"]
    oneshot.unload(_NOWHERE, preloaded)
