"""Proving kit for authors of backends: conformance kits, fakes, fault injection.

A kit of each kind (`engine`, `connector`, `spec`, `policy`) holds the tests that every backend of
that kind has to pass. `fakes` has the smallest backend of each kind, to read before you write one.
`faults` makes an engine fail where a test wants it to, `fleet` runs a publisher and its workers in
one process, `communicator` is a process group between threads, and `leftovers` finds what a process
did not release. It needs pytest (``pip install wtransfer[test]``).
"""
