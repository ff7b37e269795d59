"""The parts of IPython that programs for notebooks expect: `get_ipython()`, and an importable `IPython.display`.

If the real IPython is installed, its `display` is redirected to ours as soon as it is loaded. If not, a finder at the
end of `sys.meta_path` makes stub modules; other attributes of them do not exist.

`AfterLoading` runs an action right after a module was loaded: now, later, or never. It is on `sys.meta_path`, finds the
same spec as the other finders, and has its loader call back.
"""

from __future__ import annotations

import sys

from . import command_line, ipython_display, notebook_libraries, rich
from .command_line import UsageError
from .pretty import report

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

    from .magics import Magics
    from .rich import Display, Shown


class AfterLoading:
    """A finder that finds no module by itself: names of modules, and the action for each."""

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
    """Make this one loader run the action once, after the module."""
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
        pass  # a loader that cannot be changed; its module stays as it is


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


# matplotlib asks an IPython that is loaded for its version, and is content with any since 8.24.
_VERSION = (9, 0, 0)
_STAND_INS = {
    "IPython": True,
    "IPython.display": False,
    "IPython.core": True,
    "IPython.core.display": False,
    "IPython.core.display_functions": False,
    "IPython.core.getipython": False,
    "IPython.core.magic": False,
    "matplotlib_inline": True,
    "matplotlib_inline.backend_inline": False,
}  # and whether it is a package
_MIME_DISPLAYS = {
    "display_html": "text/html",
    "display_markdown": "text/markdown",
    "display_latex": "text/latex",
    "display_json": "application/json",
    "display_javascript": "application/javascript",
    "display_svg": "image/svg+xml",
    "display_png": "image/png",
    "display_jpeg": "image/jpeg",
    "display_pdf": "application/pdf",
    "display_pretty": "text/plain",
}


def install(display: Display, namespace: dict[str, Any]) -> None:
    """Put `display` and `get_ipython` into a namespace, and make ready for matplotlib and IPython."""
    shell = display.shell = Shell(namespace, display)
    namespace["display"] = display.display
    namespace["get_ipython"] = shell.get_ipython
    when_loaded({
        "matplotlib": rich.choose_backend,
        "matplotlib.pyplot": lambda pyplot: rich.replace_show(pyplot, display.show_figures),
        "inspect": notebook_libraries.find_classes,
        **routes(display, shell),
    })  # fmt: skip
    sys.meta_path.append(StandIns(display, shell))  # the last: where nothing else is found


def lead_script() -> tuple[Display, Shown]:
    """Capture the displays of a script's libraries; return their `display`, and its collected outputs."""
    shown = rich.Shown()
    display = rich.Display(shown.emit, shown.clear)
    when_loaded(routes(display, None))
    return display, shown


class Events:
    """Functions that want to be called when something happens; only `post_execute` and `post_run_cell` ever do."""

    def __init__(self) -> None:
        self.callbacks: dict[str, list[Callable[..., Any]]] = {}

    def register(self, event: str, function: Callable[..., Any]) -> None:
        registered = self.callbacks.setdefault(event, [])
        if function not in registered:
            registered.append(function)

    def unregister(self, event: str, function: Callable[..., Any]) -> None:
        registered = self.callbacks.get(event, [])
        if function not in registered:
            raise ValueError(f"{function!r} is not registered for {event}")
        registered.remove(function)

    def trigger(self, event: str, *arguments: Any) -> None:
        for function in list(self.callbacks.get(event, ())):
            try:
                function(*arguments)
            except Exception as error:
                report(error)


class DisplayPublisher:
    """`get_ipython().display_pub`."""

    def __init__(self, display: Display) -> None:
        self.publish, self.clear_output = display.publish_display_data, display.clear_output


class Shell:
    """The result of `get_ipython()`: the part of IPython's shell that programs call. `magics` is set by `Magics`."""

    def __init__(self, namespace: dict[str, Any], display: Display) -> None:
        self.user_ns = self.user_global_ns = namespace
        self.display_pub = DisplayPublisher(display)
        self.events = Events()
        self.config: dict[str, Any] = {}
        self.magics: Magics | None = None

    def get_ipython(self) -> Shell:
        """Return the shell of this session."""
        return self

    def _magics(self) -> Magics:
        if self.magics is None:
            raise UsageError("this session has no magics")
        return self.magics

    def _scope(self) -> dict[str, Any]:
        """Return the variables of the code that called our caller."""
        frame = sys._getframe(2)
        return {**frame.f_globals, **frame.f_locals}

    def system(self, cmd: str) -> None:
        """Run a command of the shell; `{expression}` and `$name` are replaced by their values."""
        command_line.system(command_line.expand(cmd, self._scope()), self.user_ns)

    system_raw = system_piped = system

    def getoutput(self, cmd: str, split: bool = True) -> command_line.SList | str:
        """Run a shell command and return its output, as lines or as one text."""
        lines = command_line.getoutput(command_line.expand(cmd, self._scope()), self.user_ns)
        return lines if split else lines.n

    def run_line_magic(self, magic_name: str, line: str, _stack_depth: int = 1) -> Any:
        """Run `%magic_name line` and return its value."""
        return self._magics().run_line(magic_name, line, self._scope())

    def run_cell_magic(self, magic_name: str, line: str, cell: str) -> Any:
        """Run `%%magic_name line` over the lines of `cell` and return its value."""
        return self._magics().run_cell(magic_name, line, cell, self._scope())

    def magic(self, arg_s: str) -> Any:
        """Run `%arg_s`."""
        name, _, line = arg_s.lstrip("% ").partition(" ")
        return self._magics().run_line(name, line.strip(), self._scope())

    def run_cell(self, raw_cell: str, **ignored: Any) -> Any:
        """Run a text as a cell, and return the value of its last expression."""
        del ignored
        return self._magics().host.run_cell(raw_cell)

    def register_magic_function(
        self, func: Callable[..., Any], magic_kind: str = "line", magic_name: str | None = None
    ) -> None:
        """Make a function a magic of this session."""
        self._magics().add(magic_kind, magic_name or func.__name__, func)

    def push(self, variables: dict[str, Any], interactive: bool = True) -> None:
        """Put variables into the namespace."""
        del interactive
        self.user_ns.update(variables)

    def ev(self, expr: str) -> Any:
        """Return the value of an expression in the namespace."""
        return eval(expr, self.user_ns)

    def ex(self, cmd: str) -> None:
        """Execute statements in the namespace."""
        exec(cmd, self.user_ns)


def _display_functions(display: Display) -> dict[str, Any]:
    return {
        "display": display.display,
        "publish_display_data": display.publish_display_data,
        "update_display": display.update_display,
        "clear_output": display.clear_output,
    }


def _set_matplotlib_formats(*formats: str, **print_options: Any) -> None:
    """Choose the formats of figures, and options for drawing them."""
    rich.set_formats(formats)
    rich.OPTIONS.print_options.update(print_options)


def routes(display: Display, shell: Shell | None) -> dict[str, Callable[[Any], None]]:
    """Return the actions for libraries and the real IPython: redirect their displays and questions to ours."""
    functions = {**_display_functions(display), "set_matplotlib_formats": _set_matplotlib_formats}
    lead_display = _replacement(functions)
    shells = {} if shell is None else {"IPython.core.getipython": _replacement({"get_ipython": shell.get_ipython})}
    return {
        **notebook_libraries.actions(display),
        **shells,
        "IPython.core.display_functions": lead_display,
        "IPython.core.display": lead_display,
        "matplotlib_inline.backend_inline": _replacement({"set_matplotlib_formats": _set_matplotlib_formats}),
    }


def _replacement(functions: dict[str, Any]) -> Callable[[Any], None]:
    def replace(module: Any) -> None:
        """Put ours in the place of a module's functions, also where others of the package imported them already."""
        package = module.__name__.partition(".")[0]
        old = {name: vars(module)[name] for name in functions if name in vars(module)}
        submodules = [loaded for name, loaded in list(sys.modules.items()) if name.partition(".")[0] == package]
        for module_or_part in [module, *submodules]:
            for name, function in old.items():
                if getattr(module_or_part, "__dict__", {}).get(name) is function:
                    setattr(module_or_part, name, functions[name])

    return replace


class StandIns:
    """A finder and loader of modules that replace IPython if no other finder has its name."""

    def __init__(self, display: Display, shell: Shell) -> None:
        self.display, self.shell = display, shell

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of our own module, unless it would lie in a package that is real."""
        del path, target
        if name not in _STAND_INS:
            return None
        parent = sys.modules.get(name.rpartition(".")[0])
        if parent is not None and getattr(parent.__spec__, "loader", None) is not self:
            return None
        specification: Any = type(sys.__spec__)
        return specification(name, self, origin="stand-in", is_package=_STAND_INS[name])

    def create_module(self, spec: Any) -> None:
        """Let the import system make the module."""
        del spec

    def exec_module(self, module: ModuleType) -> None:
        """Fill a module: `IPython` has few names, all others have everything that can be displayed."""
        names: dict[str, Any] = {
            "get_ipython": self.shell.get_ipython,
            "set_matplotlib_formats": _set_matplotlib_formats,
        }
        if module.__name__ == "IPython":
            names = {"get_ipython": self.shell.get_ipython, "version_info": _VERSION}
        elif module.__name__ == "IPython.core.magic":
            names = self._registrations()
        elif module.__name__.startswith("IPython."):
            names |= {
                **_display_functions(self.display),
                **self._mime_displays(),
                **ipython_display.media_classes(),
                **ipython_display.stub_classes(self.display.display),
            }
            names["DisplayHandle"] = self.display.handle
            names["__all__"] = [name for name in names if name != "get_ipython"]
        vars(module).update(names)
        module.__getattr__ = _missing(module.__name__)  # type: ignore[method-assign]
        if module.__name__ == "IPython":
            __import__(f"{module.__name__}.display")  # programs write `import IPython; IPython.display.HTML(...)`

    def _registrations(self) -> dict[str, Any]:
        return {f"register_{kind}_magic": self._registration(kind) for kind in ("line", "cell", "line_cell")}

    def _registration(self, kind: str) -> Callable[[Any], Any]:
        def register(registered: Any) -> Any:
            """Make a function a magic, under its own name or the one that is given."""

            def add(function: Callable[..., Any]) -> Callable[..., Any]:
                self.shell.register_magic_function(function, kind, None if callable(registered) else registered)
                return function

            return add(registered) if callable(registered) else add

        return register

    def _mime_displays(self) -> dict[str, Any]:
        return {name: self._display_as(mime) for name, mime in _MIME_DISPLAYS.items()}

    def _display_as(self, mime: str) -> Callable[..., None]:
        def display_as(*objects: Any, raw: bool = False, metadata: dict[str, Any] | None = None) -> None:
            """Show objects, or with `raw` their content itself, in one format only."""
            bundles = [{mime: content} for content in objects] if raw else objects
            about = {mime: metadata} if metadata else None
            self.display.display(*bundles, raw=raw, metadata=about, include=None if raw else [mime])

        return display_as


def _missing(module: str) -> Callable[[str], Any]:
    def __getattr__(name: str) -> Any:  # noqa: N807 - it becomes the module's
        raise AttributeError(
            f"module {module!r} has no attribute {name!r}: IPython is not installed here, and this stand-in has only "
            "display functions, display classes and get_ipython"
        )

    return __getattr__
