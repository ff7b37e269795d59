"""Do something to a module right after it was loaded, whenever that is: now, later, or never.

It goes to the import system's list of finders, finds what the others find, and lets their loader call back.
"""

from __future__ import annotations

import sys

from .pretty import report

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class AfterLoading:
    """A finder of nothing by itself: names of modules, and what is to be done to each."""

    def __init__(self, actions: dict[str, Callable[[Any], None]]) -> None:
        self.actions = actions

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find a module as the others do; None for all but ours, which costs an import nothing."""
        action = self.actions.get(name)
        if action is None:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None and finder is not self else None
            if spec is not None:
                _call_back(spec.loader, action)
                return spec
        return None


def _call_back(loader: Any, action: Callable[[Any], None]) -> None:
    """Let this one loader run the action after it has run the module, and be as it was."""
    execute = getattr(loader, "exec_module", None)
    if execute is None:
        return

    def exec_module(module: Any) -> None:
        try:
            execute(module)
        finally:
            vars(loader).pop("exec_module", None)
        _do(action, module)

    try:
        loader.exec_module = exec_module
    except AttributeError:
        pass  # a loader that cannot be told; its module stays as it is


def _do(action: Callable[[Any], None], module: Any) -> None:
    try:
        action(module)
    except Exception as error:
        report(error)  # an unknown version must not make the import fail


def when_loaded(actions: dict[str, Callable[[Any], None]]) -> None:
    """Do each action to its module: at once when it is loaded, else as soon as it is."""
    for name, action in actions.items():
        module = sys.modules.get(name)
        if module is not None:
            _do(action, module)
    sys.meta_path.insert(0, AfterLoading(actions))
