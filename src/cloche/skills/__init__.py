"""Skills: folders with a `SKILL.md`, which are untrusted; they are read, checked and run.

In: a folder, or a name on the search path. Out: a `Skill`, its faults, and the result of a run.

`skill` holds the values; `manifest` parses SKILL.md and `cloche-skill.yaml` (pure); `loader` finds folders and reads
their files by descriptor; `run` decides a skill's grants (limits, network, tools) and runs its script.

To be kept: loading runs no code and follows no link; everything is bounded; a skill never gets more than its user
allows, and a refusal names the setting that refuses it. The wording of faults may be changed without asking.
"""
