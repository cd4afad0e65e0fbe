"""A streamed request, read while it runs."""

from __future__ import annotations

import itertools
import json
import threading
import time

import httpx

FIRST = 5
"""Tokens after which a request counts as running."""
WAIT_S = 60.0


class Stream:
    """A request to a server whose tokens are noted as they come.

    It runs when the constructor returns.

    Args:
        url: The server's.
        prompt: Text to begin with.
        max_tokens: Tokens after which it ends, whatever they are.
        **more: Further fields of the request.
    """

    def __init__(self, url, prompt, max_tokens, **more):
        self.at = []
        self.ended_by = None
        self._failure = None
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        self._thread = threading.Thread(target=self._run, args=(url, body | more))
        self._thread.start()
        self.wait_for(min(FIRST, max_tokens))

    def wait_for(self, num_tokens):
        """Wait until so many tokens have come.

        Raises:
            Exception: What reading failed with, if that was before.
            AssertionError: It has ended, or takes too long.
        """
        limit = time.monotonic() + WAIT_S
        while len(self.at) < num_tokens:
            if not self._thread.is_alive():
                # All that it has read is here now.
                self.end()
                assert len(self.at) >= num_tokens, f"{len(self.at)} tokens, {self.ended_by!r}"
            assert time.monotonic() < limit, f"{len(self.at)} tokens in {WAIT_S:g} s"
            time.sleep(0.001)

    def end(self):
        """Wait until it has ended; return when each token came.

        Raises:
            Exception: What reading failed with.
        """
        self._thread.join(WAIT_S)
        if self._failure is not None:
            raise self._failure
        assert not self._thread.is_alive(), f"{len(self.at)} tokens, and no end in {WAIT_S:g} s"
        return self.at

    def gaps(self, since=0.0, until=float("inf")):
        """Return the seconds between tokens of which one came in the time named.

        Those that came together have none between them.
        """
        pairs = itertools.pairwise(sorted(set(self.at)))
        return [after - before for before, after in pairs if after > since and before < until]

    def _run(self, url, body):
        try:
            self._read(url, body)
        except Exception as error:  # a thread's own would be lost
            self._failure = error

    def _read(self, url, body):
        request = httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=WAIT_S)
        with request as answer:
            assert answer.is_success, answer.read().decode()
            for event in events(answer):
                if "error" in event:
                    raise AssertionError(f"the server ended the stream: {event}")
                (choice,) = event["choices"]
                self.ended_by = choice["finish_reason"]
                # A server that is behind sends several at once.
                self.at += [time.monotonic()] * len(choice["token_ids"])


def events(answer):
    """Yield the events of a stream.

    They end at line feeds only. httpx's own ``iter_lines`` also ends a line at U+0085, U+2028 and
    U+2029, which JSON need not escape and vLLM does not: a random model comes to write them.
    """
    rest = b""
    for chunk in answer.iter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))
