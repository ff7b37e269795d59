"""The Linux mechanism: one file per kernel feature. Imported by the helper as the top-level package `jail`.

Modules that the helper loads avoid `typing`, `dataclasses`, `ctypes` and friends: each of them costs milliseconds
in every cold run.
"""

archive: object = None  # in a helper, the finder of our modules: what a guest must not keep
