"""The guest's side: what runs inside the sandbox, with the guest's rights. Standard library only, and little of it.

In: settings, environment and descriptors, from `jail/guest.py` or from pid 1 of a container, with two records of
`oneshot`: `Preloaded`, what a fork server did ahead, and `Privileges`, what the process that starts a program can do
for it. Out: what `python script` would print, and values and pictures as frames on a pipe, which the caller checks:
they are what a guest claims.
`oneshot` runs one script; `result_value` sends the value of its last expression; `preload` is what fork server or
container load ahead. `session` runs the cells of a live session (`session.js` and `session.sh` those of Node and Bash);
`session_fork` clones it. `magics` finds and rewrites lines that are no Python, `line_magics` and `cell_magics` are
what `%name` and `%%name` do (`%time` and `%timeit` of a line stand in `cell_magics`), `command_line` runs `!cmd`.
`rich` makes MIME bundles, displays and figures, `pretty` the text of values; `ipython` is `get_ipython()` and the stub
modules, `ipython_display` their classes; `notebook_libraries` leads plotly and others to `display`.

To be kept: relative imports alone; Python 3.11, since containers get these files as text; what a script needs only at
its end is loaded then (`result_value`, also without this package; `rich`). `pretty` and `oneshot` leave our own frames
out of tracebacks by their file names. Magics, formats and texts may be changed without asking.
"""
