"""Libraries that show things in notebooks: lead each to `display`, so that it gives one output of bounded size.

plotly and bokeh embed megabytes of script once and refer to it afterwards, or look for a browser; here each output
stands for itself, and names the address of the script. An animation of matplotlib is a player in HTML. And `inspect`
finds the cell that defined a class.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .rich import Display

MOST_FRAMES = 200  # of an animation: each is a picture, drawn when it is shown
MOST_ANIMATION_MB = 4
MOST_CELLS = 1000  # that are looked through for a class


def actions(display: Display) -> dict[str, Callable[[Any], None]]:
    """Return the action for each module after its import."""
    return {
        "plotly.io._renderers": lambda module: lead_plotly(module, display),
        "bokeh.io": lambda _: lead_bokeh(display),
        "matplotlib.animation": show_animations,
        "PIL.ImageShow": lambda module: lead_pillow(module, display),
    }


def lead_plotly(module: Any, display: Display) -> None:
    """Make `display` the renderer of plotly's figures, unless one was chosen; no renderer needs nbformat."""
    base: Any = sys.modules["plotly.io._base_renderers"]
    stand_in: Any = type("nbformat", (), {"__version__": "5.0"})  # plotly asks for nothing but its version
    module.nbformat = module.nbformat or stand_in
    both: tuple[Any, Any] = (module, base)
    for figure in both:
        figure.ipython_display = figure.ipython_display or type("display", (), _display_functions(display))

    def render(_: Any, fig_dict: Any) -> None:
        """Show a figure with a script that is loaded from its address."""
        content = base.PlotlyRenderer().to_mimebundle(fig_dict)
        content |= base.HtmlRenderer(connected=True).to_mimebundle(fig_dict)
        kinds = ", ".join(str(trace.get("type", "scatter")) for trace in fig_dict.get("data", ())[:10])
        display.display({**content, "text/plain": f"<plotly figure: {kinds or 'empty'}>"}, raw=True)

    renderers = module.renderers
    renderers["display"] = type("DisplayRenderer", (base.ExternalRenderer,), {"render": render})()
    if renderers.default in (None, "", "browser", "plotly_mimetype+notebook"):
        renderers.default = "display"


def _display_functions(display: Display) -> dict[str, Any]:
    def display_html(content: str, raw: bool = False) -> None:
        del raw
        display.display({"text/html": content}, raw=True)

    return {"display": staticmethod(display.display), "display_html": staticmethod(display_html)}


def lead_bokeh(display: Display) -> None:
    """Have bokeh's `show` display a document, also without a call of `output_notebook`, unless it goes to a file."""
    notebook = sys.modules["bokeh.io.notebook"]

    def show_document(shown: Any, state: Any, handle: Any = None) -> None:
        del state, handle
        for name in ("bokeh.embed", "bokeh.resources"):
            __import__(name)
        modules: dict[str, Any] = dict(sys.modules)
        html = modules["bokeh.embed"].file_html(shown, modules["bokeh.resources"].CDN, "bokeh")

        display.display({"text/html": html, "text/plain": repr(shown)}, raw=True)

    def refuse_application(*_: Any, **__: Any) -> None:
        raise NotImplementedError("bokeh's applications need a server and a browser that reaches it")

    for kind in ("display", "jupyter"):
        notebook.install_notebook_hook(kind, lambda *_, **__: None, show_document, refuse_application, overwrite=True)
    state = sys.modules["bokeh.io.state"].curstate()
    if state.notebook_type is None and state.file is None:
        state.output_notebook("display")


def lead_pillow(module: Any, display: Display) -> None:
    """Have `Image.show` of Pillow display the image: there is no window."""

    def show_image(_: Any, image: Any, **options: Any) -> int:
        del options
        display.display(image)
        return 1

    module.register(type("DisplayViewer", (module.Viewer,), {"show_image": show_image}), order=0)


def show_animations(module: Any) -> None:
    """Make an animation show itself as a player of its frames, without another choice and if they are not too many."""
    settings = sys.modules["matplotlib"].rcParams
    shown = module.Animation._repr_html_

    def _repr_html_(self: Any) -> Any:
        if settings["animation.html"] != "none":
            return shown(self)
        if (getattr(self, "_save_count", None) or 0) > MOST_FRAMES:
            return None
        with sys.modules["matplotlib"].rc_context({"animation.embed_limit": MOST_ANIMATION_MB}):
            player = self.to_jshtml()
        figure = getattr(self, "_fig", None)
        pyplot = sys.modules.get("matplotlib.pyplot")
        if figure is not None and pyplot is not None:
            pyplot.close(figure)  # it is shown: else its first frame would be one more output
        return player

    module.Animation._repr_html_ = _repr_html_


def find_classes(module: Any) -> None:
    """Let `inspect` find the source of a class of `__main__`, which has no file, in the cell that defined it."""
    find = module.getfile

    def getfile(object: Any) -> Any:  # noqa: A002 - the name is inspect's
        try:
            return find(object)
        except (OSError, TypeError):
            name = _cell_of(object) if isinstance(object, type) and object.__module__ == "__main__" else None
            if name is None:
                raise
            return name

    module.getfile = getfile


def _cell_of(kind: type) -> str | None:
    """Return the name of the cell that defined a class, by its methods, else the last cell that names it."""
    import linecache
    import re

    for member in vars(kind).values():
        code = getattr(getattr(member, "__func__", getattr(member, "fget", member)), "__code__", None)
        is_own = getattr(code, "co_filename", "").startswith("<cell ")
        if is_own and getattr(member, "__qualname__", "").startswith(f"{kind.__qualname__}."):
            return str(code.co_filename)  # type: ignore[union-attr]
    statement = re.compile(rf"^\s*class\s+{re.escape(kind.__name__)}\b", re.MULTILINE)
    cells = [name for name in list(linecache.cache) if name.startswith("<cell ")]
    for name in cells[: -MOST_CELLS - 1 : -1]:
        if statement.search("".join(linecache.getlines(name))):
            return name
    return None
