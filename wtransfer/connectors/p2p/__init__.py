"""KV cache from a prefill instance (P) to a decode instance (D): what both connectors share.

`SharedMemoryConnector` and `ProcessGroupConnector` differ in how bytes travel; each adds a server
and a client of its own (``connectors/shm.py``, ``connectors/process_group.py``).

The life of a request, with the scheduler's side and the worker's side of each instance:

1.  P scheduler: the request says ``do_remote_decode``. Each step's metadata names the blocks that
    the step fills.
2.  P worker: once the step counts, copies them to its staging buffer, where they are committed
    under their keys and leased to the request. The cache is not held for D. Blocks for which there
    is no room are taken back, and not handed over.
3.  P scheduler: when the request ends, returns the parameters with which D finds the blocks
    (`protocol.TransferParams`). From here on the lease expires after ``lease_s``.
4.  D scheduler: offers the blocks to its host and plans the load.
5.  D worker: connects to the P worker of its rank, compares layouts, looks keys up, compares header
    and digest of each block, and copies it into the cache.
6.  D worker: releases the request on P. P also releases it when the connection is lost.

Every failure is a miss: D computes the blocks.
"""
