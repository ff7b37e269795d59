"""From keywords to a run: settings, the choice of a backend, the queue, open sandboxes.

Input: code or a command with its files, and the keywords of `SandboxOptions`. Output: a `Result`, or an error before
anything has run.

- `prepare`: resolves settings, rules and backend, and caches them while the settings are unchanged.
- `selection`: chooses a backend: the named one, the best for `auto`, or a fallback for trusted code. `registry`:
  backends by name; the only importer of concrete ones.
- `run`: one run in a throwaway sandbox, and the parts of each run: request, callbacks, spilled output, files out,
  fixers.
- `batch`: many programs, one result each. `batch_file`: from a file of programs to a file of results; `batch_rows`: its
  rows, `batch_store`: its files.
- `grading`: a program against cases, each a run.
- `sandbox`: `AsyncSandbox` and `AsyncSession`, which live for several runs. `history`: the cells of a session.
- `held`: sandboxes that are opened without a `with` block.
- `live`, `processes`, `paths`, `ports`: the operations of `AsyncSandbox` with `live=True`. `folders`: folders in and
  out.
- `host_folder`: a folder of the host as workspace. `open_folder`: checks before it is shown. `commits`: writes changes
  to it. `git_inside`: git in the sandbox.
- `inputs`: files and arguments as callers write them. `concurrency`: the limit on concurrent runs. `doctor`: measures
  what this host can enforce.

Invariants: every front end goes through `prepare` and `run.run_in`, so that rules and audit apply to every run, and no
run gets less isolation than requested. How a backend is found may change freely.
"""
