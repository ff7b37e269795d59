"""Let a model repair a program that fails, and see what it changed.

Run it with `python examples/autofix.py`. The model below is scripted; in your program it is `AutoFix()`, which asks the
endpoint of your configuration, or a function that asks whomever you like.
"""

import cloche
from cloche.autofix import AutoFix

BROKEN = "scores = {'ann': 3, 'bob': 5}\nprint(max(scores, key=scores.gett))\n"
ANSWERS = iter(
    [
        "The method is called `get`:\n```python\nscores = {'ann': 3, 'bob': 5}\nprint(max(score, key=score.get))\n```",
        "And `scores` has an s:\n```python\nscores = {'ann': 3, 'bob': 5}\nprint(max(scores, key=scores.get))\n```",
    ]
)


def model(prompt: str) -> str:
    """Answer from the script, whatever is asked."""
    print("asked:", prompt.partition("\n\nCode:")[0].splitlines()[-1])
    return next(ANSWERS)


result = cloche.run(BROKEN, autofix=AutoFix(model))
print("it prints:", result.stdout.strip())
if result.fix is not None:
    print(result.fix.message)
    print(result.fix.diff)
