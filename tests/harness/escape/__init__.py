"""What attempts to get out of a sandbox are run with; the attempts themselves are in tests/escape.

`attempts` says what one is and how it is judged, `targets` what is planted on the host, `runners` and `cells` where an
attempt is run (outside, in a sandbox, as a cell of a session), `batch` how many are run in one run, `checks` what the
host looks at besides the output, `controls` holds the proofs that attempts work outside. `hostile` is text for a
session's guest. `egress` is for attempts past a network's policy, which have a world instead of canaries. The others
are programs that run as they stand: `driver`, `holder`, `prelude`, `batch_program`, `egress_program`.
"""
