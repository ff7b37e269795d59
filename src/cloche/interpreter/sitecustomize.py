"""Write the run's own output line by line, do the work of the module that this one hides, and find layers of packages.

It is sent into a sandbox as text: every interpreter that starts there, of any version, finds it by PYTHONPATH, and its
programs find neither it nor its folder. `CLOCHE_OUTPUT` has device and inode of a run's output and errors.

`CLOCHE_LAYERS` has the folders of layers. They come after the interpreter's own modules and before packages that are
there, as in a virtual environment, and once `sitecustomize` and `usercustomize` are over: those of a layer never run.
"""

import os
import sys

try:
    _about = os.fstat(1)
    if str(_about.st_dev) + ":" + str(_about.st_ino) in os.environ.get("CLOCHE_OUTPUT", "").split():
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
except (AttributeError, OSError, ValueError):
    pass  # there is no output, or it is no stream that can be told

_folder = os.path.dirname(__file__)
sys.path[:] = [_path for _path in sys.path if _path != _folder]
if os.path.exists(_folder + "/without_shm.py") and sys.hexversion >= 0x3080000:  # at level `confined`
    with open(_folder + "/without_shm.py") as _file:
        _names = {"__name__": "without_shm"}
        exec(_file.read(), _names)
        _names["lead"](_folder)  # type: ignore[operator]
_self = sys.modules.pop(__name__)  # held: a module of Python 2 that goes takes its names along
try:
    __import__(__name__)  # where there is none, `site` expects the error
finally:
    _layers = [_path for _path in os.environ.get("CLOCHE_LAYERS", "").split(os.pathsep) if _path]
    if _layers:
        import site as _site

        if _site.ENABLE_USER_SITE:  # then `site` would do this next
            _site.execusercustomize()
            _site.execusercustomize = bool  # type: ignore[assignment]
        _own = os.path.dirname(os.__file__)
        sys.path[:] = [_path for _path in sys.path if _path not in _layers]
        _indices = [0] + [
            _n + 1 for _n, _path in enumerate(sys.path) if _path in (_own, os.path.join(_own, "lib-dynload"))
        ]
        sys.path[_indices[-1] : _indices[-1]] = _layers
