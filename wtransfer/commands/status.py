"""``wtransfer status``: which worker of a fleet holds which version."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from wtransfer.calls import map_concurrently
from wtransfer.commands.shared import (
    EndSignal,
    end_signals,
    given_token,
    table,
    token_file_option,
)
from wtransfer.errors import AddressError, AuthenticationError, ProtocolError
from wtransfer.transport.address import parse_address
from wtransfer.weight_sync.http.client import HttpClient, parse_url
from wtransfer.weight_sync.report import printable
from wtransfer.weight_version import EMPTY_LABEL, FINGERPRINT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wtransfer.weight_sync.messages import FleetStatus

DIFFERS = 1
"""Exit code: the versions differ, a worker is empty, or one is not ready."""
UNREACHABLE = 3
"""Exit code: a publisher or host did not answer."""

_REDRAW_S = 1.0
_CLEAR = "\x1b[H\x1b[J"
_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60))
_COLUMNS = ("worker", "instance", "rank", "host", "version", "fingerprint", "state", "since")


@click.command()
@click.option("--join", metavar="ADDRESS", help="A publisher: shows every worker that has joined.")
@click.option(
    "--to",
    "hosts",
    multiple=True,
    metavar="URL",
    help="A worker or a serving engine, as for push. Repeat for more.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, nothing else.")
@click.option("--watch", is_flag=True, help="Look again every second, until ended.")
@click.option(
    "--ready",
    metavar="FINGERPRINT",
    help="Print only what does not serve these weights: a probe for one worker or many.",
)
@token_file_option
@click.option(
    "--deadline",
    "deadline_s",
    type=click.FloatRange(min=0, min_open=True),
    default=5.0,
    metavar="SECONDS",
    show_default=True,
    help="Longest time for an answer.",
)
def status(
    *,
    join: str | None,
    hosts: tuple[str, ...],
    as_json: bool,
    watch: bool,
    ready: str | None,
    token_file: str | None,
    deadline_s: float,
) -> None:
    """Show which worker holds which version, and the round under way. It changes nothing.

    A publisher knows every worker that has joined; a worker knows itself; a server of vLLM knows
    its label. The token comes from --token-file or WTRANSFER_TOKEN. The exit code is 0 if all hold
    one version, 1 if versions differ or a worker is empty, 3 if all that answered agree and a
    publisher or host did not answer, 2 on a usage error. With --ready, which asks workers by --to
    alone, it is 0 only if all serve the fingerprint.
    """
    if join is None and not hosts:
        raise click.UsageError("give a publisher (--join ADDRESS), workers (--to URL), or both")
    if watch and (as_json or ready is not None):
        raise click.UsageError("--watch is for people: omit it, --json and --ready look once")
    if ready is not None and join is not None:
        raise click.UsageError("a publisher does not know of pauses; ask the workers by --to")
    if ready is not None and not FINGERPRINT.fullmatch(ready):
        raise click.UsageError(
            f"--ready {ready!r:.80} is no fingerprint: expected 32 hexadecimal digits, as the "
            "report of a push has them"
        )
    try:
        token = given_token(token_file)
        for each in hosts:
            parse_url(each)
        if join is not None:
            parse_address(join)
    except (AddressError, AuthenticationError) as error:
        raise click.UsageError(str(error)) from error
    if join is not None and token is None:
        raise click.UsageError("--join needs the token: give --token-file, or set WTRANSFER_TOKEN")
    ask = functools.partial(_look, join, hosts, token, deadline_s)
    try:
        with end_signals():
            fleet = ask()
            if watch:
                with contextlib.suppress(EndSignal):
                    while True:
                        _draw(fleet)
                        time.sleep(_REDRAW_S)
                        fleet = ask()
            elif as_json:
                click.echo(json.dumps(fleet.document(ready), indent=2))
            else:
                for line in fleet.lines() if ready is None else ():
                    click.echo(line)
                for line in fleet.problems(ready):
                    click.echo(line, err=True)
    except EndSignal as signal:
        sys.exit(signal.exit_code)
    sys.exit(fleet.code(ready))


class _Worker(NamedTuple):
    """A worker, by its own answer or its publisher's."""

    worker: str
    version: str | None
    instance: str | None = None
    rank: int | None = None
    host: str | None = None
    fingerprint: str | None = None
    state: str | None = None
    """None: a serving engine that tells its label alone."""
    since_s: float | None = None
    paused: str | None = None
    phase: str | None = None
    """Phase of the round under way; None: it takes no part in one."""
    nbytes: int | None = None
    staged_nbytes: int | None = None
    last_error: str | None = None

    def is_ready(self, fingerprint: str) -> bool:
        held = self.fingerprint == fingerprint and self.paused is None
        return held and self.state not in (None, "empty", "lost")


@dataclass
class _Fleet:
    """What was answered, and by which hosts nothing was."""

    address: str | None = None
    publisher: FleetStatus | None = None
    workers: list[_Worker] = field(default_factory=list)
    unreachable: dict[str, str] = field(default_factory=dict)

    @property
    def versions(self) -> set[tuple[str, str | None]]:
        """Label and fingerprint of every version that a worker holds, or the publisher has."""
        # Weights that no update has brought have a name of their process alone.
        held = [(each.version, each.fingerprint) for each in self.workers]
        if self.publisher is not None and self.publisher.version is not None:
            held.append((self.publisher.version, self.publisher.fingerprint))
        return {(version or "", fingerprint if version else None) for version, fingerprint in held}

    @property
    def differs(self) -> bool:
        """True if not all hold the same; a serving engine's label is compared with labels."""
        labels = {label for label, _ in self.versions}
        return len(labels) > 1 or len({each for _, each in self.versions if each is not None}) > 1

    def code(self, ready: str | None) -> int:
        if ready is not None:
            wrong = [each for each in self.workers if not each.is_ready(ready)]
        else:
            wrong = [each for each in self.workers if each.state == "empty"]
        if wrong or (ready is None and self.differs):
            return DIFFERS
        return UNREACHABLE if self.unreachable else 0

    def document(self, ready: str | None) -> dict[str, Any]:
        publisher = self.publisher
        return {
            "ok": self.code(ready) == 0,
            "code": self.code(ready),
            "publisher": self.address,
            "version": publisher and publisher.version,
            "fingerprint": publisher and publisher.fingerprint,
            "round": publisher and msgspec.to_builtins(publisher.round),
            "last_error": publisher and publisher.last_error,
            "workers": [each._asdict() for each in self.workers],
            "lost": [asdict(each) for each in publisher.lost] if publisher else [],
            "unreachable": self.unreachable,
        }

    def lines(self) -> Iterator[str]:
        publisher = self.publisher
        if publisher is not None:
            held = f"{publisher.version!r} {publisher.fingerprint}"
            held = held if publisher.version else "no version yet"
            yield printable(f"{_publisher_at(self.address)}: {held}")
            if (now := publisher.round) is not None:
                what = "catch-up" if now.is_catch_up else "round"
                yield printable(
                    f"{what} {now.round_id} of {now.version!r}: {now.phase}, "
                    f"{now.nbytes / 1e6:.1f} MB, since {_age(now.age_s)}, last progress "
                    f"{_age(now.idle_s)} ago"
                )
            if publisher.last_error is not None:
                yield printable(f"last round: {publisher.last_error}")
            yield ""
        if self.workers:
            is_under_way = any(each.phase is not None for each in self.workers)
            more = ("round",) if is_under_way else ()
            rows = [(*_COLUMNS, *more), *(_cells(each)[: 8 + len(more)] for each in self.workers)]
            yield from table(rows, len(rows[0]))
        for each in self.workers:
            if each.last_error is not None:
                yield printable(f"{each.worker}: last error: {each.last_error}")
        for lost in publisher.lost if publisher else ():
            yield printable(
                f"{lost.worker}: gone since {_age(lost.since_s)}, with {lost.version!r}: "
                f"{lost.last_error}"
            )

    def problems(self, ready: str | None) -> Iterator[str]:
        for host, why in self.unreachable.items():
            hint = "; a worker is asked by --to" if host == _publisher_at(self.address) else ""
            yield printable(f"{host}  not reached: {why}{hint}")
        if ready is not None:
            for each in self.workers:
                if not each.is_ready(ready):
                    yield printable(
                        f"{each.worker}  not ready: {each.state or 'state unknown'}, holds "
                        f"{each.fingerprint or repr(each.version)}"
                        + (f", paused ({each.paused})" if each.paused else "")
                    )
        elif self.differs:
            yield f"{len(self.versions)} versions are held"


def _publisher_at(address: str | None) -> str:
    return f"publisher {address}"


def _look(join: str | None, hosts: tuple[str, ...], token: str | None, deadline_s: float) -> _Fleet:
    """Ask the publisher and all hosts at once."""
    from wtransfer.weight_sync.observer import observe

    calls: dict[str, Any] = {}
    for host in hosts:
        client = HttpClient(host, token, timeout_s=deadline_s)
        calls[client.name] = client.weight_info
    if join is not None:
        calls[_publisher_at(join)] = functools.partial(observe, join, token or "", deadline_s)
    answers, failed = map_concurrently(calls, 2 * deadline_s + 1)
    fleet = _Fleet(address=join, unreachable={name: str(each) for name, each in failed.items()})
    for name, answer in answers.items():
        if name == _publisher_at(join):
            fleet.publisher = answer
            continue
        try:
            fleet.workers.append(_own_answer(name, answer))
        except (ProtocolError, msgspec.ValidationError) as error:
            fleet.unreachable[name] = f"{name} is no worker of wtransfer: {error}"
    if (publisher := fleet.publisher) is not None:
        fleet.unreachable |= publisher.absent
        phase = None if publisher.round is None else publisher.round.phase
        total = None if publisher.round is None else publisher.round.nbytes
        own = {(each.worker, each.instance) for each in fleet.workers}
        for each in publisher.workers:
            if (each.worker, each.instance) in own:
                # By its own answer, which is first hand.
                continue
            takes_part = each.nbytes is not None
            fleet.workers.append(
                _Worker(
                    worker=each.worker,
                    version=each.version,
                    instance=each.instance,
                    rank=each.rank,
                    host=each.host,
                    fingerprint=each.fingerprint,
                    state=each.state,
                    since_s=each.since_s,
                    phase=phase if takes_part else None,
                    nbytes=total if takes_part else None,
                    staged_nbytes=each.nbytes,
                    last_error=each.last_error,
                )
            )
    return fleet


class _Update(msgspec.Struct):
    phase: str
    nbytes: int
    staged_nbytes: int


class _Answer(msgspec.Struct):
    """A host's ``/weight_info``: of ``wtransfer worker`` all of it, of vLLM the label."""

    weight_version: str | None
    worker: str | None = None
    instance: str | None = None
    rank: int | None = None
    fingerprint: str | None = None
    state: str | None = None
    since_s: float | None = None
    paused: str | None = None
    update: _Update | None = None
    last_error: str | None = None


def _own_answer(name: str, answer: object) -> _Worker:
    told = msgspec.convert(answer, _Answer)
    update, is_empty = told.update, told.weight_version == EMPTY_LABEL
    return _Worker(
        worker=told.worker or name,
        version=None if is_empty else told.weight_version,
        instance=told.instance,
        rank=told.rank,
        host=name,
        fingerprint=told.fingerprint,
        state=told.state or ("empty" if is_empty else None),
        since_s=told.since_s,
        paused=told.paused,
        phase=None if update is None else update.phase,
        nbytes=None if update is None else update.nbytes,
        staged_nbytes=None if update is None else update.staged_nbytes,
        last_error=told.last_error,
    )


def _cells(each: _Worker) -> tuple[str, ...]:
    moved = ""
    if each.phase is not None:
        amount = f"{(each.staged_nbytes or 0) / 1e6:.1f} of {(each.nbytes or 0) / 1e6:.1f} MB"
        moved = f"{each.phase} {amount}"
    texts = (
        each.worker,
        each.instance,
        None if each.rank is None else str(each.rank),
        each.host,
        each.version,
        each.fingerprint,
        f"{each.state}, paused" if each.paused else each.state,
        None if each.since_s is None else _age(each.since_s),
        moved,
    )
    return tuple(printable(text or "-") for text in texts)


def _age(seconds: float) -> str:
    for unit, size in _UNITS:
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s"


def _draw(fleet: _Fleet) -> None:
    clock = time.strftime("%H:%M:%S")
    lines = [clock, *fleet.lines(), *fleet.problems(None)]
    click.echo((_CLEAR if sys.stdout.isatty() else "") + "\n".join(lines))
