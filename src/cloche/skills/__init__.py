"""Skills: folders with a `SKILL.md` that somebody else wrote; they are read, checked and run.

In: a folder, or a name on the search path. Out: a `Skill`, its faults, and the result of a run.
`skill` holds the values; `manifest` parses SKILL.md and `cloche-skill.yaml` (pure); `loader` finds folders and reads
their files by descriptor; `run` decides what a skill is granted (limits, network, tools) and runs its script.

To be kept: loading runs no code and follows no link; everything is bounded; a skill never gets more than its user
allows, and a refusal says which setting refuses it. Wording of faults may be changed without asking.
"""
