"""The caller's side of the jail: compile the steps, start the helper, find out what the host allows.

In: a policy and limits as plain values. Out: steps as data (`plan`), mounts, filters, limits; a started helper
(`launch`); what the kernel gives (`probe`).

To be kept: nothing here is in the helper's archive; it may import from `jail`, never the other way. The order of
steps in `plan` is the wall: lower layers of it are changed only with the attempts in tests/escape.
"""
