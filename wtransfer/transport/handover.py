"""Lend shared segments to other processes of the same user on the same host, by descriptor.

How a segment travels:

1. Lender: listens on an abstract Unix socket; address and secret reach the borrower another way.
2. Lender: `Lender.offer` names a segment by number.
3. Borrower: connects, checks that the same user listens there, sends secret and number.
4. Lender: checks user and secret, counts a lease, answers with size and descriptor.
5. Borrower: maps it privately and keeps the connection for as long as the mapping lives.
6. Lender: sees the connection end, and counts the lease no longer.

**The connection is the lease.** There is no message that ends one: the kernel closes the borrower's
end when the mapping is let go (a finalizer), when the process ends, whichever way, and in a forked
child not before the child, which holds a copy of the mapping, lets go of its copy as well. So a
lease never ends while somebody could still read the segment through it, nothing needs to be sent
from a finalizer (which may run in any thread, inside the garbage collector), and a killed borrower
leaves no lease behind.
"""

from __future__ import annotations

from wtransfer.transport.borrower import Borrower, Mapping, Shared
from wtransfer.transport.lender import PROTOCOL, Lender

__all__ = ["PROTOCOL", "Borrower", "Lender", "Mapping", "Shared"]
