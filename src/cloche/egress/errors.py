"""Errors of the readers of a guest's bytes, and of connecting, for input that the policy does not permit."""

from __future__ import annotations


class Refused(Exception):
    """Report that a connection is not passed on; `reason` is a sentence that a model can act on."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason, self.is_noted = reason, False


class Failed(Exception):
    """Report that a connection could not be made that is permitted; `reason` is a sentence."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason
