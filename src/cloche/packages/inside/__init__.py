"""Programs that are sent as text into sandboxes for packages: download, build and unpack. Standard library only.

No module imports them. What they print is read by `packages/frames.py`, which trusts none of it.
"""
