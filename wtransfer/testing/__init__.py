"""Proving kit for authors of backends: conformance kits, fakes, fault injection.

A kit of each kind (`engine`, `connector`, `spec`, `tier`, `policy`) holds the tests that every
backend of that kind has to pass; where its smoke test fails, it skips the others. `check_engine` of
`kit` and others run it from Python, and
``pytest --pyargs wtransfer.testing --wtransfer-engine NAME``
(or ``-connector``, ``-spec``, ``-tier``) runs that of an installed backend. `fakes` has the
smallest backend of each kind, to read before you write one. `faults` makes an engine fail at a
chosen tensor, `fleet` runs a publisher and its workers in one process, `mini_engine` serves tokens
with any connector, `communicator` is a process group between threads, and `leftovers` finds
resources that a process did not release. The kits need pytest (``pip install wtransfer[test]``).
"""
