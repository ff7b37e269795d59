"""The guest's side: code that runs inside the sandbox, with the guest's rights. It uses little of the standard library.

In: settings, environment and descriptors, from `jail/guest.py` or from pid 1 of a container, with two records of
`oneshot`: `Preloaded`, the work that a fork server did ahead, and `Privileges`, services of the process that starts a
program. Out: the output of `python script`, and values and pictures as frames on a pipe, which the caller checks: they
are a guest's claims.

- `oneshot` runs one script; `result_value` sends the value of its last expression; `preload` is loaded ahead by fork
  server or container.
- `session` runs the cells of a live session (`session.js`, `session.sh`, `session.java` and `session.R` those of other
  languages, `session_types.js` makes JavaScript of TypeScript); `session_fork` clones it. `notebook` and `charts` are
  for cells that answer as in a notebook.
- `host_functions` is the module `cloche_host`, the caller's functions (`.cjs` and `.sh` for Node and Bash).
- `graded_call` and `graded_ends` call functions of a graded program; they are sent as text.
- `magics` finds and rewrites lines that are no Python, `line_magics` and `cell_magics` implement `%name` and `%%name`
  (`%time` and `%timeit` of a line are in `cell_magics`), `command_line` runs `!cmd`.
- `rich` makes MIME bundles, displays and figures, `pretty` the text of values; `ipython` is `get_ipython()` and the
  stub modules, `ipython_display` their classes; `notebook_libraries` redirects plotly and others to `display`.
- `stand_ins` are modules for a sandbox without /dev/shm.

To be kept: relative imports alone; Python 3.11, since containers get these files as text; modules that a script needs
only at its end are loaded then (`result_value`, also without this package; `rich`). `pretty` and `oneshot` remove our
own frames from tracebacks by their file names. Magics, formats and texts may change freely.
"""
