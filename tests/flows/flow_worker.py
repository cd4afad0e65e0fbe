"""A worker in a process of its own: serves a model, commits between two steps."""

from __future__ import annotations

import contextlib
import json
import os
import time

import flow_stage

from wtransfer.errors import CommitError
from wtransfer.transport.channel import Dialer
from wtransfer.transport.handshake import WorkerHandshake
from wtransfer.weight_sync.worker.session import WorkerSession
from wtransfer.weight_sync.worker.target import ModuleTarget


class SlowTarget(ModuleTarget):
    """Applies in two halves, with the phase "commit" between them."""

    num_failures = 0

    def apply(self, tensors):
        pairs = list(tensors.items())
        half = len(pairs) // 2
        super().apply(dict(pairs[:half]))
        flow_stage.witness.enter("commit")
        if self.num_failures:
            self.num_failures -= 1
            raise ValueError("this rank cannot apply")
        super().apply(dict(pairs[half:]))


class WorkerPuppet(flow_stage.Puppet):
    """Commits by itself (`auto`) or when ordered."""

    def __init__(
        self,
        address,
        witness_path,
        *,
        join,
        num_tensors,
        numel,
        commit="adopt",
        auto=True,
        pace_s=0.0,
        protocol_step=0,
        listen=None,
        **options,
    ):
        super().__init__(address, witness_path, pace_s)
        flow_stage.register()
        # The defaults that a build of another protocol would have.
        for each in (Dialer, WorkerHandshake):
            each.__init__.__kwdefaults__["protocol"] += protocol_step
        self.model = flow_stage.Weights(num_tensors, numel)
        self.target = SlowTarget(self.model, commit)
        self.auto = auto
        self.errors = []
        self._last_look = ()
        self._looked_at = 0.0
        self.witness.note("init")
        self.session = WorkerSession(self.target, **options)
        self._watch_commits(self.session._committer.weight_state)
        if listen is None:
            self.server = contextlib.nullcontext()
            self.session.join(join)
        else:  # it is named, and waits to be invited
            from wtransfer.weight_sync.http.server import WorkerServer

            self.server = WorkerServer(self.session, listen=listen, token=options["token"])

    def _watch_commits(self, state):
        """Enter the phase "vote" when the commit has been ordered, before anything follows."""
        commit = state.commit

        def tell_and_commit(round_id):
            self.witness.enter("vote")
            commit(round_id)

        state.commit = tell_and_commit

    def patience_s(self):
        return 0.005 if self.auto else None

    def live(self):
        try:
            applied = self.session.commit_pending(0.01)
        except CommitError as error:
            self.errors.append(flow_stage.describe(error))
            applied = True
        if applied:
            self.witness.enter("idle")
        if applied or time.monotonic() - self._looked_at > 0.1:
            self._look()

    def _look(self):
        """Write down every look at the model that shows something else than the last one."""
        self._looked_at = time.monotonic()
        look = (self.session.version, self.session.fingerprint, self.model.numbers())
        if look != self._last_look:
            self._last_look = look
            print("LOOK", json.dumps(look), flush=True)  # noqa: T201 (outlives a kill)

    # -- orders

    def look(self):
        """Return what the model is and what the session says it is."""
        status = self.session.status()
        return {
            "numbers": self.model.numbers(),
            "version": status.version,
            "fingerprint": status.fingerprint,
            "state": status.state,
            "staging": status.staging,
            "connected": status.connected,
            "errors": self.errors,
            "refusal": status.refusal and flow_stage.describe(status.refusal),
        }

    def until_free(self, within_s):
        """Return the time at which no round has this session any more."""
        end = time.monotonic() + within_s
        while self.session.status().staging is not None:
            if time.monotonic() > end:
                raise TimeoutError(f"still staging {self.look()}")
            time.sleep(0.001)
        return time.monotonic()

    def commit(self, within_s=0.0):
        return self.session.commit_pending(within_s)

    def set(self, **attributes):
        """Set attributes of this puppet, or of its target (`num_failures`)."""
        for name, value in attributes.items():
            setattr(self.target if name == "num_failures" else self, name, value)

    def join(self, address):
        self.session.join(address)

    def in_fork(self):
        """Return what each use of the session does in a forked child."""
        session = self.session
        return {
            "commit_pending": flow_stage.in_fork(lambda: session.commit_pending(60)),
            "discard_pending": flow_stage.in_fork(session.discard_pending),
            "join": flow_stage.in_fork(lambda: session.join("unix:@wtransfer-nobody")),
            "close": flow_stage.in_fork(session.close),
        }

    def linger(self):
        return flow_stage.linger()

    def close(self):
        with self.server:
            self.session.close()


def main(*args, **options):
    """Be a worker."""
    os.environ.pop("WTRANSFER_TOKEN", None)
    WorkerPuppet(*args, **options).serve()
