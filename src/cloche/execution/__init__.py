"""From keywords to a run: settings, the choice of a backend, the queue, open sandboxes.

In: code or a command with its files, and the keywords of `SandboxOptions`. Out: a `Result`, or an error before anything
has run.

- `prepare`: settles settings, rules and backend, once for as long as they hold.
- `selection`: which backend: named, chosen for `auto`, or a fallback for trusted code. `registry`: backends by name;
  the only importer of concrete ones.
- `run`: one run in a throwaway sandbox, and what each run needs: request, callbacks, spilled output, files out, fixers.
- `sandbox`: `AsyncSandbox` and `AsyncSession`, which live for several runs. `history`: what a session has run.
- `held`: what is open without a block.
- `live`, `processes`, `paths`, `ports`: what `AsyncSandbox` can do with `live=True`. `folders`: folders in and out.
- `host_folder`: a folder of the host as workspace. `open_folder`: what it is before it is shown. `commits`: what is
  written to it. `git_inside`: git in the sandbox.
- `inputs`: files and arguments as callers write them. `concurrency`: how many runs work at once. `doctor`: what this
  host can enforce, measured.

To be kept: every front end goes through `prepare` and `run.run_in`, so that rules and audit hold wherever a run comes
from; nothing runs on less than was asked for. How a backend is looked for may be changed without asking.
"""
