"""Have what is printed to the run's own output written line by line; then do what the module does that this one hides.

It is sent into a sandbox as text: every interpreter that starts there finds it by PYTHONPATH, whatever its version, and
its programs find neither it nor its folder. `CLOCHE_OUTPUT` has device and inode of a run's output and errors.
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
sys.path[:] = [_one for _one in sys.path if _one != _folder]
_self = sys.modules.pop(__name__)  # held: a module of Python 2 that goes takes its names along
__import__(__name__)  # where there is none, `site` expects the error
