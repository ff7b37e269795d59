"""Skills: folders with a `SKILL.md`, what they may, and their runs.

In: a folder that somebody else wrote. Out: a skill as a value (`skill`), its faults, a run under its policy (`run`).
`manifest` parses, which is pure; `loader` finds and reads files.

To be kept: no link is followed, all is bounded, and a skill gets no more than its user grants.
"""
