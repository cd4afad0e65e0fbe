"""A trainer in a process of its own: publishes version after version."""

from __future__ import annotations

import os
import resource

import flow_stage

from wtransfer.errors import CommitError
from wtransfer.transport.channel import Listener
from wtransfer.transport.framing import FrameReader
from wtransfer.weight_sync.messages import CODEC, Commit
from wtransfer.weight_sync.trainer.coordinator import Coordinator
from wtransfer.weight_sync.trainer.digesting import DigestingSource
from wtransfer.weight_sync.trainer.publisher import Publisher
from wtransfer.weight_sync.trainer.workers import Worker

PHASES_OF_ROUND = {"over": "idle"}


class WitnessedPhase:
    """Stands for `Coordinator.phase`, which it keeps and shows to the witness."""

    def __get__(self, round_, cls=None):
        return self if round_ is None else vars(round_)["phase"]

    def __set__(self, round_, phase):
        begins = "phase" not in vars(round_)
        vars(round_)["phase"] = phase
        if begins:
            # In the constructor, where others wait for a lock: no place to be held at.
            flow_stage.witness.note(phase)
            return
        flow_stage.witness.enter(PHASES_OF_ROUND.get(phase, phase))


def watch_rounds():
    """Show phases to the witness, and the time between the first commit and the second."""
    Coordinator.phase = WitnessedPhase()
    init_workers, send = Coordinator.init_workers, Worker.send_frame

    def init_and_tell(self, init_info):
        flow_stage.witness.enter("init")
        init_workers(self, init_info)

    def send_and_tell(self, frame):
        send(self, frame)
        (message,) = FrameReader(CODEC, "the witness").feed(frame)
        if isinstance(message, Commit):
            flow_stage.witness.enter("between")

    iter_buckets = DigestingSource.iter_buckets

    def iter_buckets_and_tell(self, nbytes, allocate):
        for number, bucket in enumerate(iter_buckets(self, nbytes, allocate)):
            yield bucket
            if number == 1:
                # The engine has sent off the second one.
                flow_stage.witness.enter("midst")

    DigestingSource.iter_buckets = iter_buckets_and_tell
    Coordinator.init_workers = init_and_tell
    Worker.send_frame = send_and_tell


class TrainerPuppet(flow_stage.Puppet):
    """Publishes when ordered."""

    def __init__(
        self,
        address,
        witness_path,
        *,
        num_tensors,
        numel,
        engine="shm",
        pace_s=0.0,
        protocol_step=0,
        **options,
    ):
        super().__init__(address, witness_path, pace_s)
        flow_stage.register()
        Listener.__init__.__kwdefaults__["protocol"] += protocol_step
        watch_rounds()
        self.model = flow_stage.Weights(num_tensors, numel)
        self.publisher = Publisher(self.model, engine=flow_stage.ENGINES[engine], **options)
        self.round = None

    # -- orders

    def where(self):
        return {"address": self.publisher.address, "token": self.publisher.token}

    def wait(self, n, within_s=20.0):
        self.publisher.wait_for_workers(n, within_s)

    def invite(self, hosts):
        self.publisher.invite(*hosts)

    def publish(self, number):
        """Publish a version from this process's main thread, and wait for its end."""
        self.model.fill(number)
        return self._report(self.publisher.publish, f"v{number}")

    def begin(self, number):
        self.model.fill(number)
        self.round = self.publisher.publish(f"v{number}", wait=False)
        return self.round.round_id

    def result(self, within_s=30.0):
        return self._report(self.round.result, within_s)

    def abort(self, times=1):
        for _ in range(times):
            self.round.abort()

    def acks(self):
        """Return how many workers of the present round have said what they made of its commit."""
        return sum(rank.ack is not None for rank in self.round._coordinator.state.ranks())

    def refusal(self):
        return self.publisher.refusal and flow_stage.describe(self.publisher.refusal)

    def workers(self):
        return [
            {name: getattr(worker, name) for name in ("worker", "version", "fingerprint", "state")}
            for worker in self.publisher.workers()
        ]

    def peak_nbytes(self):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def in_fork(self):
        """Return what each use of the publisher does in a forked child."""
        publisher, round_ = self.publisher, self.round
        uses = {
            "publish": lambda: publisher.publish("from the child"),
            "wait_for_workers": lambda: publisher.wait_for_workers(1, 60),
            "workers": publisher.workers,
            "close": publisher.close,
        }
        if round_ is not None:
            uses |= {"packed": round_.packed, "result": round_.result, "abort": round_.abort}
        return {name: flow_stage.in_fork(use) for name, use in uses.items()}

    def linger(self):
        return flow_stage.linger()

    def close(self):
        self.publisher.close()

    def _report(self, call, *arguments):
        """Return what a call reports, also where no worker has applied the update."""
        try:
            report = call(*arguments)
        except CommitError as error:
            if error.report is None:
                raise
            report = error.report
        return {
            "ok": report.ok,
            "outcome": report.outcome,
            "fingerprint": report.fingerprint,
            "text": str(report),
            "seconds": report.seconds,
            "workers": {
                each.worker: {
                    "host": each.host,
                    "outcome": each.outcome,
                    "version": each.version,
                    "fingerprint": each.fingerprint,
                    "error": each.error and flow_stage.describe(each.error),
                }
                for each in report.workers
            },
        }


def main(*args, **options):
    """Be a trainer."""
    os.environ.pop("WTRANSFER_TOKEN", None)
    TrainerPuppet(*args, **options).serve()
