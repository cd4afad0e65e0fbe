"""``bench weights``: rounds of a publisher and its workers, beside a plain copy and other ways.

Each row is measured by the function ``measure_...`` of its name; below them stand the functions
that the processes of their cases run.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import distributed as dist
from torch import nn
from torch._C._distributed_c10d import _broadcast_coalesced

from wtransfer import Publisher, WorkerSession
from wtransfer.bench.harness import (
    BESIDE_NBYTES,
    CASE_S,
    MIB,
    Goal,
    Outcome,
    Result,
    Row,
    Spread,
    format_nbytes,
)
from wtransfer.checkpoint.source import CheckpointSource
from wtransfer.deadline import Deadline
from wtransfer.engines.interface import TrainerInitInfo, TrainerWeightTransferEngine
from wtransfer.errors import (
    ChecksumError,
    IncompleteUpdateError,
    StallError,
    WTransferError,
)
from wtransfer.transport.channel import Dialer
from wtransfer.weight_sync.messages import (
    CODEC,
    Accept,
    Ack,
    Commit,
    Data,
    Hello,
    Init,
    Plan,
    Prepare,
    Ready,
    Received,
    Vote,
)
from wtransfer.weight_sync.trainer.source import StateDictSource

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping, Sequence

    import msgspec

    from wtransfer.bench.harness import Runner, Setup
    from wtransfer.transport.channel import Connection
    from wtransfer.weight_sync.report import Report

Tensors = dict[str, torch.Tensor]

# Each of the first two rounds touches one of the two segments for the first time.
_WARM_UP_ROUNDS = 2
_JOIN_S = 60.0
_SMALL_NBYTES = 4096
_FEW_TENSORS = 200
_PLAYED_WORKERS = 50
# Larger buckets are fresh memory each time, and take twice as long.
_BUCKET_NBYTES = 16 * MIB
# Larger updates take as many copies, and the kernel long to count them.
MAX_WATCHED_NBYTES = 256 * MIB
# Long enough to be hit in its middle, short enough to be over soon, whatever was asked for.
KILLED_NBYTES = 256 * MIB


class TensorSet(NamedTuple):
    """A set of bfloat16 tensors; equal sets have equal shapes in every process."""

    kind: str
    """``llama``: shapes of a Llama, as many layers as it takes. ``equal``: of one size."""
    nbytes: int
    """Bytes asked for; of each tensor where they are equal."""
    number: int = 1
    """How many, where they are equal."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name -> shape."""
        if self.kind == "equal":
            return {f"tensor.{at}": (self.nbytes // 2,) for at in range(self.number)}
        # Below a GiB a smaller model, or two layers would fill it.
        width, inner = (4096, 14_336) if self.nbytes >= 1 << 30 else (1024, 3584)
        shapes: dict[str, tuple[int, ...]] = {"embed": (16_032, width)}
        layer: dict[str, tuple[int, ...]] = {
            **dict.fromkeys("qo", (width, width)),
            **dict.fromkeys("kv", (width // 4, width)),
            **dict.fromkeys(("gate", "up"), (inner, width)),
            "down": (width, inner),
            "norm": (width,),
        }
        numbers = itertools.count()
        while _nbytes_of(shapes) < self.nbytes:
            number = next(numbers)
            shapes |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
        return shapes

    def total_nbytes(self) -> int:
        """Return the bytes of all tensors."""
        return _nbytes_of(self.shapes())


def _nbytes_of(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return 2 * sum(map(math.prod, shapes.values()))


@dataclass(frozen=True)
class Settings:
    """Sizes and numbers; the defaults are those that the goals are for."""

    engine: str = "shm"
    """Engine that is measured. Engines other than shm have fewer rows."""
    nbytes: int = 2048 * MIB
    """Bytes of one update, at least: whole layers are added until it is reached."""
    workers: tuple[int, ...] = (1, 4)
    """Numbers of workers. Rounds are measured with the first; `packed` compares the greatest."""
    num_rounds: int = 7
    """Rounds that count."""
    num_small: int = 20_000
    """How many small tensors."""
    num_kills: int = 11
    """How many workers are killed."""

    @classmethod
    def quick(cls) -> Settings:
        """Return small sizes, with which every row is filled and no number means much."""
        return cls(nbytes=64 * MIB, workers=(1, 2), num_rounds=3, num_small=1000, num_kills=3)

    @property
    def needed_nbytes(self) -> int:
        """Memory that the largest case takes.

        The trainer has its weights and two segments. Workers that adopt have no memory of their
        own, since theirs is never written to. Those that copy, or are broadcast to, have one copy;
        and until a commit is settled the last one.
        """
        large = max(self.nbytes, self.num_small * _SMALL_NBYTES)
        watched = min(self.nbytes, MAX_WATCHED_NBYTES)
        return BESIDE_NBYTES + max(
            (3 + 2 * self.workers[0]) * large, (3 + max(self.workers)) * watched
        )

    @property
    def llama(self) -> TensorSet:
        """What most rows move."""
        return TensorSet("llama", self.nbytes)


# -- rows ------------------------------------------------------------------------------------------


def rows(settings: Settings) -> Iterator[Row]:
    """Yield the rows that make sense with these settings, in order."""
    engine, most = settings.engine, max(settings.workers)

    def row(name: str, what: str, measure: Callable[..., Result], *arguments: Any) -> Row:
        return Row(name, what, partial(measure, settings, *arguments))

    for commit in ("adopt", "copy"):
        yield row(
            commit,
            f"{engine}: (2 x memcpy) / (publish to committed), commit by "
            f"{'adopting' if commit == 'adopt' else 'copying'}, verified",
            measure_adopt_and_copy,
            commit,
        )
    for commit in ("adopt", "copy"):
        yield row(
            f"{commit}-cpu",
            f"{engine}: CPU seconds of trainer and workers, {commit} / those of memcpy",
            measure_adopt_cpu_and_copy_cpu,
            commit,
        )
    for name, way in OTHER_WAYS.items():
        what = f"({way.what}) / ({engine}: publish to committed, verified)"
        yield row(name, what, measure_gloo_and_checkpoint, way)
    yield row(
        "small",
        f"{engine}: microseconds for each of many small tensors, above one tensor of the same "
        "bytes",
        measure_small,
    )
    # The goals of these are those of shared memory only.
    if engine != "shm":
        return
    yield row(
        "control",
        f"trainer's CPU, or bytes sent, for one more worker in a round, whichever grows more: with "
        f"{settings.num_small} tensors / with {_FEW_TENSORS}",
        measure_control,
    )
    for name, what in (("push", "as `wtransfer push` does"), ("push-again", "by the same process")):
        yield row(
            name,
            f"shm: (publish of a checkpoint in memory, {what}) / (`cp` of its file to /dev/shm)",
            measure_push,
            name,
        )
    if most > settings.workers[0]:
        what = f"shm: time until the trainer may train on, {most} workers / the usual"
        yield row("packed", what, measure_packed)
    yield row(
        "memory",
        "shm: staging memory on the host, in copies of one update, however many workers adopt",
        measure_memory,
    )
    yield row(
        "gap",
        "longest gap between two served tokens: during the transfer / in a quiet time as long",
        measure_gap,
    )
    yield row("pause", "serving stands still for a commit by adopting", measure_pause)
    yield row(
        "death",
        "SIGKILL of a worker in the middle of a round, to the publisher's error that names it",
        measure_death,
    )


def measure_adopt_and_copy(settings: Settings, commit: str, runner: Runner) -> Result:
    rounds = run_rounds(runner, settings, commit=commit)
    goal = Goal(">=", {"adopt": 1.4, "copy": 0.85}[commit])
    return Result(
        Spread.of(2 * rounds.copy_s / seconds for seconds in rounds.seconds),
        goal=goal if settings.engine == "shm" else None,
        beside={
            "update_nbytes": rounds.nbytes,
            "round_s": median(rounds.seconds),
            "memcpy_s": rounds.copy_s,
        },
        stages=rounds.stages(),
    )


def measure_adopt_cpu_and_copy_cpu(settings: Settings, commit: str, runner: Runner) -> Result:
    rounds = run_rounds(runner, settings, commit=commit)
    trainer = [each["cpu_s"] for each in rounds.trainer]
    both = [sum(each) for each in zip(trainer, rounds.workers_cpu_s, strict=True)]
    gib = rounds.nbytes / (1 << 30)
    return Result(
        # A copy on one thread waits for nothing: its seconds are CPU seconds.
        Spread.of(seconds / rounds.copy_s for seconds in both),
        goal=Goal("<=", 3.0) if settings.engine == "shm" and commit == "adopt" else None,
        beside={
            "cpu_s_per_gib": median(both) / gib,
            "trainer_cpu_s_per_gib": median(trainer) / gib,
            "workers_cpu_s_per_gib": median(rounds.workers_cpu_s) / gib,
            "memcpy_cpu_s_per_gib": rounds.copy_s / gib,
        },
    )


def measure_gloo_and_checkpoint(settings: Settings, way: OtherWay, runner: Runner) -> Result:
    theirs = run_other_way(runner, settings, way, settings.llama, settings.num_rounds)
    ours_s = median(run_rounds(runner, settings).seconds)
    return Result(
        Spread.of(seconds / ours_s for seconds in theirs),
        "times",
        way.goals.get(settings.engine),
        {"other_s": median(theirs), "ours_s": ours_s},
    )


def measure_small(settings: Settings, runner: Runner) -> Result:
    number = settings.num_small
    tensors = TensorSet("equal", _SMALL_NBYTES, number)
    many = run_rounds(runner, settings, tensors)
    one = TensorSet("equal", number * _SMALL_NBYTES)
    one_s = median(run_rounds(runner, settings, one).seconds)
    beside = {"number": float(number), "one_s": one_s, "many_s": median(many.seconds)}
    for name in ("gloo", "gloo-buckets"):
        # One by one they take seconds, and hardly vary: two rounds will do.
        seconds = run_other_way(runner, settings, OTHER_WAYS[name], tensors, 2)
        beside[f"{name}_each_us"] = median(seconds) / number * 1e6
    each_us = Spread.of((seconds - one_s) / number * 1e6 for seconds in many.seconds)
    return Result(each_us, "us", Goal("<=", 10.0), beside, many.stages())


def measure_control(settings: Settings, runner: Runner) -> Result:
    few = run_control(runner, settings, _FEW_TENSORS)
    many = run_control(runner, settings, settings.num_small)
    return Result(
        Spread.of([max(many.cpu_s / few.cpu_s, many.nbytes / few.nbytes)]),
        goal=Goal("<=", 1.5),
        beside={
            "workers": float(_PLAYED_WORKERS),
            **{
                f"{name}_{what}": value
                for name, found in (("few", few), ("many", many))
                for what, value in (
                    ("nbytes", found.nbytes),
                    ("cpu_us", 1e6 * found.cpu_s),
                    ("one_worker_cpu_us", 1e6 * found.one_worker_cpu_s),
                )
            },
        },
        note="workers are played, which answer and hold nothing; CPU is the difference between "
        f"rounds of {_PLAYED_WORKERS} and of one, by the number of the others",
    )


def measure_push(settings: Settings, row: str, runner: Runner) -> Result:
    found = runner.run(
        "push, adopt, workers: 1",
        *(push, take_pushes, 1),
        tensors=settings.llama,
        num_rounds=settings.num_rounds,
    ).trainer
    copy_s = median(found["copy_s"])
    return Result(
        Spread.of(seconds / copy_s for seconds in found[row]),
        goal=Goal("<=", {"push": 1.6, "push-again": 1.3}[row]),
        beside={"round_s": median(found[row]), "cp_s": copy_s},
    )


def measure_packed(settings: Settings, runner: Runner) -> Result:
    few, most = run_rounds(runner, settings), max(settings.workers)
    many = run_rounds(runner, settings, num_workers=most)
    return Result(
        Spread.of(seconds / median(few.packed_s) for seconds in many.packed_s),
        goal=Goal("<=", 1.1),
        beside={
            "workers": most,
            "packed_s": median(many.packed_s),
            "usual_packed_s": median(few.packed_s),
        },
        stages=many.stages(),
    )


def measure_memory(settings: Settings, runner: Runner) -> Result:
    """Count memory beside the weights of the trainer and those that all workers have in use.

    It is a difference between two sizes of update: processes have memory beside the weights, and
    how much of that the kernel shares among them changes all the time.
    """
    num_workers = max(settings.workers)
    most = max(2, min(settings.nbytes, MAX_WATCHED_NBYTES) // MIB)
    nbytes = (most - most // 2) * MIB
    small, large = (
        runner.run(
            f"memory of {format_nbytes(number * MIB)}, workers: {num_workers}",
            *(publish_watched, join, num_workers),
            tensors=TensorSet("equal", MIB, number),
            num_rounds=settings.num_rounds,
        ).trainer
        for number in (most // 2, most)
    )
    note = (
        "two segments are shared: one holds the last update, which all workers that adopt have in "
        "use together, the other stages the next"
    )
    # Messages and page tables grow with the weights, too: by less than a twentieth.
    staging = Spread.of((each - median(small)) / nbytes - 2 for each in large)
    beside = {"workers": float(num_workers)}
    return Result(staging, "copies", Goal("<=", 1.05), beside, note=note)


def measure_gap(settings: Settings, runner: Runner) -> Result:
    gaps, usual_s = run_serving(runner, settings)
    quiet_s = median(each.quiet_s for each in gaps)
    return Result(
        Spread.of(each.transfer_s / quiet_s for each in gaps),
        goal=Goal("<=", 2.0),
        beside={
            "usual_gap_s": usual_s,
            "longest_quiet_s": quiet_s,
            "longest_in_transfer_s": median(each.transfer_s for each in gaps),
            "around_commit_s": median(each.around_commit_s for each in gaps),
        },
    )


def measure_pause(settings: Settings, runner: Runner) -> Result:
    gaps, usual_s = run_serving(runner, settings)
    beside = {
        "update_nbytes": settings.llama.total_nbytes(),
        "usual_gap_s": usual_s,
        "around_commit_s": median(each.around_commit_s for each in gaps),
    }
    return Result(Spread.of(each.commit_s * 1e3 for each in gaps), "ms", Goal("<=", 5.0), beside)


def measure_death(settings: Settings, runner: Runner) -> Result:
    tensors = TensorSet("llama", KILLED_NBYTES)
    found = runner.run(
        "killed workers",
        *(publish_and_kill, join, 1),
        replace_killed=True,
        tensors=tensors,
        num_kills=settings.num_kills,
    ).trainer
    if not found["noticed_s"]:
        raise StallError("every round was over before its worker could be killed")
    return Result(
        Spread.of(seconds * 1e3 for seconds in found["noticed_s"]),
        "ms",
        Goal("<=", 50.0),
        {"kills": len(found["noticed_s"]), "undisturbed_round_s": found["round_s"]},
        limit=1000.0,
    )


# -- cases of several rows -------------------------------------------------------------------------


class Rounds:
    """Rounds that count, and a plain copy of as many bytes.

    Args:
        outcome: What the functions `publish` and `join` have returned.
    """

    def __init__(self, outcome: Outcome) -> None:
        self.trainer: list[dict[str, Any]] = outcome.trainer["rounds"]
        self.copy_s: float = outcome.trainer["copy_s"]
        self.nbytes: int = self.trainer[0]["nbytes"]
        self.seconds = [each["seconds"]["total"] for each in self.trainer]
        self.packed_s = [each["packed_s"] for each in self.trainer]
        # Of each worker the CPU clock at the end of each commit; rounds that do not count first.
        clocks = [clock[-len(self.trainer) - 1 :] for clock in outcome.workers]
        each = [[stop - start for start, stop in pairwise(clock)] for clock in clocks]
        self.workers_cpu_s = list(map(sum, zip(*each, strict=True)))

    def stages(self) -> dict[str, float]:
        """Return the median seconds of every phase of the trainer and stage of the workers."""
        first, all_workers = self.trainer[0], [w for each in self.trainer for w in each["workers"]]
        phases = {f"{n}_s": median(r["seconds"][n] for r in self.trainer) for n in first["seconds"]}
        workers = {f"worker_{n}_s": median(w[n] for w in all_workers) for n in first["workers"][0]}
        return phases | workers


def run_rounds(
    runner: Runner,
    settings: Settings,
    tensors: TensorSet | None = None,
    *,
    commit: str = "adopt",
    num_workers: int | None = None,
) -> Rounds:
    """Run rounds of the engine; by default of a Llama to the usual number of workers."""
    tensors, number = tensors or settings.llama, num_workers or settings.workers[0]
    return Rounds(
        runner.run(
            f"{settings.engine}, {tensors.kind}, {commit}, workers: {number}",
            *(publish, join, number),
            tensors=tensors,
            engine=settings.engine,
            commit=commit,
            num_rounds=settings.num_rounds,
        )
    )


def run_other_way(
    runner: Runner, settings: Settings, way: OtherWay, tensors: TensorSet, num_rounds: int
) -> list[float]:
    """Return the seconds of each round of another way to send."""
    number = settings.workers[0]
    name = f"{way.what}, {tensors.kind}, workers: {number}"
    case = (way.function, way.function, number)
    found: list[float] = runner.run(name, *case, tensors=tensors, num_rounds=num_rounds).trainer
    return found


class Control(NamedTuple):
    """Work of the trainer for one worker in one round, beside the bytes of its engine."""

    cpu_s: float
    """CPU seconds for each worker but the first."""
    one_worker_cpu_s: float
    """CPU seconds of a round with one worker, without those in which the source is read."""
    nbytes: int
    """Bytes that a worker is sent."""


def run_control(runner: Runner, settings: Settings, num_tensors: int) -> Control:
    """Run rounds of so many small tensors with one played worker, and with many."""
    # They are short.
    num_rounds = 4 * settings.num_rounds
    one, all_ = (
        runner.run(
            f"control, tensors: {num_tensors}, workers: {num_played}",
            *(publish_nothing, play_workers, 1),
            tensors=TensorSet("equal", 64, num_tensors),
            num_rounds=num_rounds,
            num_played=num_played,
        )
        for num_played in (1, _PLAYED_WORKERS)
    )
    # Other work of the machine only adds to CPU seconds.
    one_worker_cpu_s, cpu_s = min(one.trainer), min(all_.trainer)
    return Control(
        (cpu_s - one_worker_cpu_s) / (_PLAYED_WORKERS - 1),
        one_worker_cpu_s,
        max(max(sizes[-num_rounds:]) for sizes in all_.workers[0]),
    )


class Gaps(NamedTuple):
    """The longest waits for a token around one round, in seconds."""

    quiet_s: float
    """In a time as long as the transfer, just before the round, in which nothing happened."""
    transfer_s: float
    """From publish to the commit."""
    around_commit_s: float
    """From the last token before the commit to the first one after it."""
    commit_s: float
    """Of the commit itself."""


def run_serving(runner: Runner, settings: Settings) -> tuple[list[Gaps], float]:
    """Return the gaps around each round, and the usual one."""
    outcome = runner.run(
        "serving, adopt, workers: 1",
        *(publish_between_pauses, serve, 1),
        tensors=settings.llama,
        num_rounds=settings.num_rounds,
    )
    tokens, commits = outcome.workers[0]["tokens"], outcome.workers[0]["commits"]
    # From one token to the next, and whether a commit began meanwhile.
    waits = [
        (start, stop, any(start <= began < stop for began, _ in commits.values()))
        for start, stop in pairwise(tokens)
    ]

    def longest(since: float, until: float) -> float:
        """Return the longest wait with a part in a time; 0 if a commit fills all of it."""
        others = [(start, stop) for start, stop, has_commit in waits if not has_commit]
        parts = (stop - start for start, stop in others if start < until and stop > since)
        return max(parts, default=0.0)

    gaps = []
    for round_ in outcome.trainer:
        began, ended = commits[round_["version"]]
        quiet_from = round_["quiet_from"]
        gaps.append(
            Gaps(
                quiet_s=longest(quiet_from, quiet_from + began - round_["began"]),
                transfer_s=longest(round_["began"], began),
                around_commit_s=max(
                    stop - start for start, stop, _ in waits if start <= began < stop
                ),
                commit_s=ended - began,
            )
        )
    return gaps, median(stop - start for start, stop, _ in waits)


# -- what the processes run ------------------------------------------------------------------------


def make(tensors: Sequence[Any]) -> Tensors:
    """Return the tensors of a set, all 0; memory that was not written to is not taken yet."""
    shapes = TensorSet(*tensors).shapes()
    return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}


def _value(number: int) -> int:
    # Whole numbers up to 256 are exact in bfloat16.
    return 1 + number % 200


def renew(weights: Mapping[str, torch.Tensor], number: int) -> None:
    """Give every element another value than it had in the round before."""
    for tensor in weights.values():
        tensor.fill_(_value(number))


def are_of(weights: Mapping[str, torch.Tensor], number: int) -> bool:
    """Whether first and last element of every tensor have the value of a round."""
    value = _value(number)
    flat = [tensor.view(-1) for tensor in weights.values()]
    return all(float(each[0]) == value == float(each[-1]) for each in flat)


def memcpy_seconds(nbytes: int) -> float:
    """Return the seconds of the fastest of three plain copies, on one thread of torch."""
    # Both are written to here, so that no page is touched for the first time while it is measured.
    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.zeros(nbytes, dtype=torch.uint8).fill_(2)

    def copy() -> float:
        began = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - began

    return min(copy() for _ in range(3))


def publish(
    setup: Setup, tensors: Sequence[Any], engine: str, num_rounds: int, **_others: Any
) -> dict[str, Any]:
    """Publish round after round between two plain copies; return those that count."""
    weights, nbytes = make(tensors), TensorSet(*tensors).total_nbytes()
    rounds: list[dict[str, Any]] = []
    fingerprints = set()
    with Publisher(weights, engine=engine, listen=setup.address, token=setup.token) as publisher:
        publisher.wait_for_workers(setup.num_workers, _JOIN_S)
        copy_s = memcpy_seconds(nbytes)
        for number in range(_WARM_UP_ROUNDS + num_rounds):
            renew(weights, number)
            began_s = time.process_time()
            report = publish_one(publisher, number)
            cpu_s = time.process_time() - began_s
            fingerprints.add(report.fingerprint)
            rounds.append(
                {
                    "nbytes": report.nbytes,
                    "seconds": report.seconds,
                    "packed_s": report.packed_s,
                    "workers": [each.seconds for each in report.workers],
                    "cpu_s": cpu_s,
                }
            )
    if len(fingerprints) != len(rounds):
        raise ChecksumError("two rounds of the bench have one fingerprint; each must bring others")
    # The memory of the segments is free again.
    return {"rounds": rounds[_WARM_UP_ROUNDS:], "copy_s": min(copy_s, memcpy_seconds(nbytes))}


def publish_one(publisher: Publisher, number: int) -> Report:
    """Publish the weights as they are; return a report with a good receipt of every worker.

    Raises:
        CommitError: A worker does not have them.
    """
    return publisher.publish(f"round-{number}").raise_unless_ok()


def join(
    setup: Setup, tensors: Sequence[Any], commit: Any = "adopt", **_others: Any
) -> list[float]:
    """Commit every update until the publisher is gone; return the CPU clock after each commit."""
    with _session(make(tensors), setup, commit) as session:
        return [
            time.process_time() for _ in _while_published(session) if session.commit_pending(0.1)
        ]


class SilentTrainer(TrainerWeightTransferEngine[TrainerInitInfo]):
    """Has every tensor digested, and sends none."""

    init_info_cls = TrainerInitInfo
    source_s: ClassVar[float] = 0.0
    """CPU seconds of this process so far in which the source was read: metadata and digests."""
    _sent_at_s = 0.0

    def send_weights(self) -> None:
        """Let every worker receive nothing, once."""
        assert self.source is not None
        for _ in self.source.iter_full():
            pass
        # All that this thread has done since, before the round's plan and in it.
        SilentTrainer.source_s += time.thread_time() - self._sent_at_s
        self.client.update_weights({})
        self._sent_at_s = time.thread_time()


def publish_nothing(
    setup: Setup, tensors: Sequence[Any], num_rounds: int, num_played: int
) -> list[float]:
    """Publish to played workers; return the CPU seconds of each round beside reading the source."""
    weights = make(tensors)
    seconds = []
    with Publisher(
        weights, trainer=SilentTrainer, listen=setup.address, token=setup.token
    ) as publisher:
        publisher.wait_for_workers(num_played, _JOIN_S)
        for number in range(_WARM_UP_ROUNDS + num_rounds):
            renew(weights, number)
            began_s = time.process_time() - SilentTrainer.source_s
            publish_one(publisher, number)
            seconds.append(time.process_time() - SilentTrainer.source_s - began_s)
    return seconds[_WARM_UP_ROUNDS:]


class PlayedWorker:
    """Answers a publisher at once, and holds nothing.

    The work of many sessions on one host would make a round long, and the trainer's CPU that of a
    long round, in which everything reports its progress.
    """

    def __init__(self, setup: Setup, name: str) -> None:
        self.sizes: list[int] = []
        """Bytes that it was sent in each round."""
        self.gone = threading.Event()
        """Set when the publisher is."""
        self._version = self._fingerprint = ""
        hello = Hello(name, name, 0, 1, None, f"local:{name}", "fresh")
        self.dialer = Dialer(
            CODEC,
            address=setup.address,
            token=setup.token,
            on_open=lambda connection: connection.send(hello),
            on_message=self._on_message,
            on_close=lambda _connection, _error: self.gone.set(),
        )

    def _on_message(self, connection: Connection, message: msgspec.Struct) -> None:
        if isinstance(message, Plan):
            self.sizes.append(0)
        if self.sizes:
            self.sizes[-1] += len(CODEC.encode(message))
        answer = self._answer_to(message)
        if answer is not None:
            connection.send(answer)

    def _answer_to(self, message: msgspec.Struct) -> msgspec.Struct | None:
        match message:
            case Init():
                return Ready(message.epoch)
            case Plan():
                self._version = message.version
                return Accept(message.round_id, [])
            case Data():
                return Received(message.round_id, message.seq)
            case Prepare():
                self._fingerprint = message.fingerprint
                return Vote(message.round_id, message.fingerprint, 0, {})
            case Commit():
                held = (self._version, self._fingerprint)
                return Ack(message.round_id, "committed", *held, "serving", {})
        return None


def play_workers(setup: Setup, num_played: int, **_others: Any) -> list[list[int]]:
    """Play workers until the publisher is gone; return the bytes that each was sent, by round."""
    workers = [PlayedWorker(setup, f"played-{number}") for number in range(num_played)]
    for worker in workers:
        worker.gone.wait(CASE_S)
        worker.dialer.close()
    return [worker.sizes for worker in workers]


_PUSHES = 3
"""Updates of one publisher: each of the first two takes a segment that was never touched."""


def push(setup: Setup, tensors: Sequence[Any], num_rounds: int) -> dict[str, list[float]]:
    """Publish a checkpoint by a publisher of its own in every round; copy its file in turn.

    Returns:
        Row -> seconds of its rounds; and of the copies, as ``copy_s``.
    """
    path, copied = Path(setup.folder, "model.safetensors"), Path(setup.folder, "copied")
    save_file(make(tensors), path)
    seconds: dict[str, list[float]] = {"push": [], "push-again": [], "copy_s": []}
    for number in range(num_rounds):
        began = time.monotonic()
        subprocess.run(["cp", path, copied], check=True)  # noqa: S603, S607  # what it is held against
        seconds["copy_s"].append(time.monotonic() - began)
        copied.unlink()
        source = CheckpointSource(path)
        with Publisher(source, listen=setup.address, token=setup.token) as publisher:
            publisher.wait_for_workers(1, _JOIN_S)
            for again in range(_PUSHES):
                with path.open("r+b") as file:  # no two updates are one
                    file.seek(-1, os.SEEK_END)
                    file.write(bytes([1 + (_PUSHES * number + again) % 100]))
                report = publish_one(publisher, _PUSHES * number + again)
                row = {0: "push", _PUSHES - 1: "push-again"}.get(again)
                if row is not None:
                    seconds[row].append(report.seconds["total"])
    return seconds


def take_pushes(setup: Setup, tensors: Sequence[Any], num_rounds: int) -> None:
    """Commit every update, of one publisher after another."""
    with _session(make(tensors), setup) as session:
        deadline = Deadline(CASE_S)
        for _ in range(_PUSHES * num_rounds):
            while not session.commit_pending(0.1):
                deadline.check("the bench's next publisher")


def _session(model: Any, setup: Setup, commit: Any = "adopt") -> WorkerSession:
    # Named by its process, which the trainer may measure or kill.
    name = str(os.getpid())
    return WorkerSession(model, join=setup.address, token=setup.token, commit=commit, name=name)


def _while_published(session: WorkerSession) -> Iterator[None]:
    """Yield until the publisher has been there and is gone."""
    deadline = Deadline(_JOIN_S)
    while not session.status().connected:
        deadline.check("the bench's publisher")
        yield
    while session.status().connected:
        yield


class WatchedSource(StateDictSource):
    """Weights whose round stands still when all were handed over and none is committed.

    A round takes most memory then. It stands still since the kernel counts process after process:
    if pages come and go between two of them, the sum means nothing.
    """

    def __init__(self, weights: Tensors) -> None:
        super().__init__(weights)
        self.pids: list[int] = []
        self.seen: list[int] = []
        """Bytes of all processes in each round, as the kernel counts them: what is shared, once."""

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super().iter_full()
        # Workers are behind by what was announced last: until three looks in a row are alike.
        deadline, looks = Deadline(20.0), [self._look()]
        while len(looks) < 3 or max(looks[-3:]) - min(looks[-3:]) > 0.005 * looks[-1]:  # noqa: PLR2004
            deadline.check("memory that stays as it is")
            time.sleep(0.1)
            looks.append(self._look())
        self.seen.append(looks[-1])

    def _look(self) -> int:
        return 1024 * sum(
            int(line.split()[1])
            for pid in self.pids
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines()
            if line.startswith("Pss:")
        )


def publish_watched(setup: Setup, tensors: Sequence[Any], num_rounds: int) -> list[int]:
    """Return how much memory all processes together had in each round that counts."""
    weights = make(tensors)
    source = WatchedSource(weights)
    with Publisher(source, listen=setup.address, token=setup.token) as publisher:
        publisher.wait_for_workers(setup.num_workers, _JOIN_S)
        source.pids = [os.getpid(), *(int(each.worker) for each in publisher.workers())]
        for number in range(_WARM_UP_ROUNDS + num_rounds):
            renew(weights, number)
            publish_one(publisher, number)
    return source.seen[_WARM_UP_ROUNDS:]


class ServedModel(nn.Module):
    """A small transformer that computes tokens, and much that has to be moved beside it."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 1, 256, dropout=0.0, batch_first=True)
        self.transformer = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        moved = {name.replace(".", "_"): tensor for name, tensor in make(tensors).items()}
        self.moved = nn.ParameterDict(moved)
        self.requires_grad_(requires_grad=False)
        self.eval()

    @torch.inference_mode()
    def compute_token(self, window: torch.Tensor) -> torch.Tensor:
        """Return the window moved on by one token, computed from all of it."""
        return torch.cat((window[:, 1:], self.transformer(window)[:, -1:]), dim=1)


def serve(setup: Setup, tensors: Sequence[Any], **_others: Any) -> dict[str, Any]:
    """Compute token after token; return when each was finished, and each commit's begin and end."""
    model = ServedModel(tensors)
    window = torch.randn(1, 64, 64, generator=torch.Generator().manual_seed(1))
    tokens: list[float] = []
    commits: dict[str | None, tuple[float, float]] = {}
    with _session(model, setup) as session:
        for _ in _while_published(session):
            window = model.compute_token(window)
            tokens.append(time.monotonic())
            if session.commit_pending():
                commits[session.version] = tokens[-1], time.monotonic()
        # There is a token after the last commit, too.
        model.compute_token(window)
        tokens.append(time.monotonic())
    return {"tokens": tokens, "commits": commits}


def publish_between_pauses(
    setup: Setup, tensors: Sequence[Any], num_rounds: int
) -> list[dict[str, Any]]:
    """Publish with a quiet time before each round that is as long as the round before."""
    model = ServedModel(tensors)
    found: list[dict[str, Any]] = []
    pause_s = 0.3
    with Publisher(model, listen=setup.address, token=setup.token) as publisher:
        publisher.wait_for_workers(setup.num_workers, _JOIN_S)
        for number in range(_WARM_UP_ROUNDS + num_rounds):
            renew(dict(model.named_parameters()), number)
            quiet_from = time.monotonic()
            time.sleep(pause_s)
            began = time.monotonic()
            report = publish_one(publisher, number)
            pause_s = max(0.3, report.seconds["total"])
            found.append({"version": report.version, "quiet_from": quiet_from, "began": began})
    return found[_WARM_UP_ROUNDS:]


def publish_and_kill(setup: Setup, tensors: Sequence[Any], num_kills: int) -> dict[str, Any]:
    """Return the seconds from each SIGKILL of a worker to the error that names it."""
    weights = make(tensors)
    noticed_s: list[float] = []
    killed: set[str] = set()
    with Publisher(weights, listen=setup.address, token=setup.token) as publisher:
        publisher.wait_for_workers(1, _JOIN_S)
        usual_s = math.inf
        for number in range(3):
            renew(weights, number)
            usual_s = min(usual_s, publish_one(publisher, number).seconds["total"])
        # Rounds that were over before the worker was killed do not count.
        for number in range(3, 3 + 4 * num_kills):
            if len(noticed_s) == num_kills:
                break
            worker = _only_worker(publisher, killed)
            killed.add(worker)
            renew(weights, number)
            round_ = publisher.publish(f"round-{number}", wait=False)
            # Kills are spread over the round, up to where its commit may begin.
            time.sleep(0.8 * usual_s * (len(noticed_s) + 0.5) / num_kills)
            killed_at = time.monotonic()
            os.kill(int(worker), signal.SIGKILL)
            try:
                round_.result()
            except WTransferError as error:
                if error.worker == worker:
                    noticed_s.append(time.monotonic() - killed_at)
    return {"noticed_s": noticed_s, "round_s": usual_s}


def _only_worker(publisher: Publisher, killed: Container[str]) -> str:
    """Wait until there is one worker, alive and up to date: nothing else is under way."""
    deadline = Deadline(_JOIN_S)
    # A killed worker may be listed still, and its process id be another's by now.
    while True:
        found = publisher.workers()
        names = [each.worker for each in found if each.fingerprint == publisher.fingerprint]
        if len(found) == len(names) == 1 and names[0] not in killed:
            return names[0]
        deadline.check("a new worker of the bench")
        time.sleep(0.005)


# -- other ways to send: no proof of receipt, no way back ------------------------------------------


class OtherWay(NamedTuple):
    """A way to send that our rounds are compared with."""

    function: Callable[..., list[float]]
    """What every process runs."""
    what: str
    """In words."""
    goals: dict[str, Goal]
    """How many times faster a round should be, by engine."""


def broadcast_tensors(setup: Setup, tensors: Sequence[Any], num_rounds: int) -> list[float]:
    """Broadcast every tensor by itself, one after another, as most trainers do it."""

    def send(weights: Tensors) -> None:
        for tensor in weights.values():
            dist.broadcast(tensor.view(-1).view(torch.uint8), 0)

    return time_rounds(send, setup, tensors, num_rounds)


def broadcast_buckets(setup: Setup, tensors: Sequence[Any], num_rounds: int) -> list[float]:
    """Broadcast buckets as `DistributedDataParallel` does: one is filled while another travels."""

    def send(weights: Tensors) -> None:
        assert dist.group.WORLD is not None
        _broadcast_coalesced(dist.group.WORLD, list(weights.values()), _BUCKET_NBYTES, 0)

    return time_rounds(send, setup, tensors, num_rounds)


def save_and_load(setup: Setup, tensors: Sequence[Any], num_rounds: int) -> list[float]:
    """Save all tensors to a file in memory, and load them into those of the workers."""
    path = Path(setup.folder, "model.safetensors")

    def send(weights: Tensors) -> None:
        if setup.rank == 0:
            save_file(weights, path)
        dist.barrier()
        if setup.rank:
            for name, tensor in load_file(path).items():
                weights[name].copy_(tensor)

    return time_rounds(send, setup, tensors, num_rounds)


def time_rounds(
    send: Callable[[Tensors], None], setup: Setup, tensors: Sequence[Any], num_rounds: int
) -> list[float]:
    """Send all tensors again and again; return the seconds of the rounds that count.

    Args:
        send: One round, in every process; has brought all bytes when it returns.
        setup: Of this process.
        tensors: What is sent.
        num_rounds: Rounds that count.

    Raises:
        IncompleteUpdateError: A worker does not have what was sent.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{setup.folder}/store",
        rank=setup.rank,
        world_size=1 + setup.num_workers,
        timeout=timedelta(seconds=60),
    )
    weights = make(tensors)
    # Written once, so that no round pays for fresh memory of the model.
    renew(weights, -1)
    seconds = []
    for number in range(1 + num_rounds):
        if setup.rank == 0:
            renew(weights, number)
        dist.barrier()
        began = time.monotonic()
        send(weights)
        dist.barrier()
        seconds.append(time.monotonic() - began)
        num_bad = torch.tensor([0 if are_of(weights, number) else 1])
        dist.all_reduce(num_bad)
        if int(num_bad):
            raise IncompleteUpdateError(f"round {number} of the bench did not bring every tensor")
    dist.destroy_process_group()
    return seconds[1:]


OTHER_WAYS = {
    "gloo": OtherWay(
        broadcast_tensors, "gloo broadcast, tensor by tensor", {"shm": Goal(">=", 5.0)}
    ),
    "gloo-buckets": OtherWay(
        broadcast_buckets,
        "gloo broadcast, 16 MiB buckets",
        {"shm": Goal(">=", 5.0), "gloo": Goal(">=", 0.9)},
    ),
    "checkpoint": OtherWay(
        save_and_load, "safetensors file in /dev/shm, saved and loaded", {"shm": Goal(">=", 20.0)}
    ),
}
