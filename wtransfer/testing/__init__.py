"""The proving kit for authors: conformance suites, fleets in one process, fault injection.

`wtransfer.testing.engine` holds the tests that every engine has to pass, `wtransfer.testing.spec`
those of offloading specs, and `wtransfer.testing.policy` those of eviction policies.
`wtransfer.testing.faults` makes an engine fail where a test wants it to, and
`wtransfer.testing.fleet` runs a publisher and its workers in one process. It needs pytest
(``pip install wtransfer[test]``).
"""
