"""Start Cloche below this folder with the Python of another image; `copying.py` put it there.

This file alone is read by any Python 3, so that an error can name the version of an old one.
"""

import os
import runpy
import sys

NEEDED = ("_cffi_backend", "cryptography.x509", "pydantic_core")  # with compiled parts, for some versions of Python


def main() -> None:
    """Run the `cloche` command, or say in one line why it cannot."""
    if sys.version_info < (3, 11):
        sys.exit("the python3 of this image is Python %d.%d, and a node needs 3.11 or later" % sys.version_info[:2])
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    for name in NEEDED:
        try:
            __import__(name)
        except ImportError as error:
            sys.exit(
                "the python3 of this image is Python %d.%d, and Cloche's image has nothing compiled for it: %s; build "
                "Cloche's image with PYTHONS" % (*sys.version_info[:2], error)
            )
    runpy.run_module("cloche", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
