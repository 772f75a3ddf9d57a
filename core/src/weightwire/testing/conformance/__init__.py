"""The conformance kit: what every transport has to do, as checks that run in real processes.

`subject` says what is tested, `catalogue` lists the checks by group, `suite` makes pytest tests of them, `command` a
table for `weightwire check`. A check is a function of a `Stage`, which lends it processes; it raises `Nonconforming`,
in words, or returns. Only `suite` needs pytest.
"""
