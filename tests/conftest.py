"""What holds for every test."""

from __future__ import annotations

import signal

# A runner that was started in the background hands down an ignored SIGINT, and so would every
# process that a test starts and interrupts. With a handler here, they begin with the default.
signal.signal(signal.SIGINT, signal.default_int_handler)
