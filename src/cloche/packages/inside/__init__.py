"""Programs that are sent as text into sandboxes for packages: download, build and unpack. Standard library only.

No module imports them. `packages/frames.py` reads their output, and checks all of it.
"""
