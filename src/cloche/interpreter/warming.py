"""What a template does ahead for all its forks, and each fork for the run to come. Standard library only."""

from __future__ import annotations

import gc
import os
import sys

from . import oneshot, telling

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any

_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
# What a template does with a module once, so that its children find it set up.
_FIRST_USES = {
    "numpy": "import numpy; str(numpy.arange(3.0) @ numpy.arange(3.0))",
    "pandas": "import pandas; str(pandas.DataFrame({'a': [1, 2], 'b': [0.5, 1.5], 'c': ['x', 'y']}).describe())",
    "matplotlib": "import matplotlib; matplotlib.use('agg')",
    "traceback": "import traceback; traceback.format_exception(ValueError('x'))",
}

_uses: list[CodeType] = []  # of what is preloaded
_usual_environment: dict[str, str] = {}


def warm_up(settings: dict[str, Any]) -> dict[str, Any]:
    """Become, in a template, what a plain interpreter is after its start; load `settings["preload"]`, and use it once.

    Returns the modules that could not be loaded, with the reasons. `home` is the guest's home: the site module looks
    for packages of the user there, and must not find the caller's. `env` is what most runs are given.
    """
    _usual_environment.update(settings["env"])
    os.environ["HOME"] = settings["home"]
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, "1"))  # numpy's libraries would start threads
    oneshot.prepare()
    oneshot.built_in_paths = len(sys.path)
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
    oneshot.compile_source(b"1\n", "<warm up>", oneshot.FILE_INPUT, 0)
    os.environ.clear()
    sys.path_importer_cache.clear()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # what loading said is no guest's output
    oneshot.telling = telling
    oneshot.warming = sys.modules[__name__]
    oneshot.of_template.update(sys.modules)
    oneshot.libraries_of_template = oneshot.count_libraries() if "ctypes" in sys.modules else 0
    return {"failed": failed}


def rehearse() -> None:
    """Go through a run of nothing while nothing waits: what it touches is then this process's own, and at hand.

    Standard input is a file and the others are pipes, as they will be, so the streams made here serve the run too;
    so do the environment, which is most often the usual one, the import path, and random numbers of one's own.
    """
    oneshot.take_over(_usual_environment)
    oneshot.paths_ahead = oneshot.visible_paths()
    oneshot.reseed()
    for use in _uses:
        try:
            exec(use, {})
        except Exception:  # it worked in the template; a run that uses it will say itself what is wrong here
            _uses.clear()
            break
    source = b"import sys\nprint(len(sys.path), file=sys.stdout)"
    body, last = oneshot.compile_at_last_line(source, "<rehearsal>") or ("", "")
    namespace: dict[str, Any] = {}
    exec(body, namespace)
    eval(last, namespace)
    oneshot.flush()
    oneshot.main_module("")
    del sys.modules["__main__"]
    import _frozen_importlib_external

    _frozen_importlib_external.PathFinder.find_spec("cloche_rehearses")
    gc.collect()
    gc.freeze()
