"""From prefill to decode: one puts blocks on a shelf, the other fetches them from there.

What the connectors of this kind have in common. How bytes get from one to the other is what they
differ in: `mapped` maps the shelf of a process on the same host, `grouped` sends over a process
group.

The life of a request, P where its prompt is computed, D where it goes on, S and W their two sides:

1.  P S: a request says ``do_remote_decode``. Every step names the blocks that it fills.
2.  P W: copies them layer by layer to the shelf while the next layers compute. From the end of the
    step on they stand there by name, leased to the request; the cache is not held for D.
3.  P S: at the end of the request, tells D where to ask (`parameters`), and that the lease ends in
    so many seconds.
4.  D S: counts the blocks that it can have, and lets each W load while other requests go on.
5.  D W: dials P's worker of its own rank, compares layouts, asks for names, gets slots, copies,
    and compares what it has copied with what the slots say of themselves.
6.  D W: says that it is done; P's leases end. So do they when D's connection ends.

Whatever goes wrong there is a miss: D computes the blocks.
"""
