"""Tier ``valkey``: a block is a string in a Valkey or Redis server, or in a cluster of them.

Every call is one attempt: a server that is down, slow, full or read-only is an exception, and the
next call connects anew where that is needed. Nothing is connected before the first call.

Values are not copied on their way: a command refers to the caller's memory, and a reply of the
expected length is received into it. Over a cluster the client receives a reply first.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Annotated, Any, ClassVar
from urllib.parse import urlsplit

import msgspec
from valkey import Valkey, ValkeyCluster
from valkey.connection import (
    ConnectionPool,
    DefaultParser,
    PythonRespSerializer,
    SSLConnection,
    UnixDomainSocketConnection,
)
from valkey.exceptions import ConnectionError as ServerLostError
from valkey.exceptions import ValkeyClusterException
from wtransfer import Tier
from wtransfer.errors import OffloadingOptionError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_IN_URL = frozenset({"host", "port", "path", "username", "password", "db"})
_COPIED = 4096  # bytes up to which an argument is copied into the command before it
_YEARS_S = 100 * 365 * 86_400.0


class ValkeyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options in ``kv_connector_extra_config``."""

    url: str
    """``redis://[user:password@]host[:port][/database]``, ``rediss://`` for TLS, or
    ``unix:///path``; of a cluster, any node."""
    cluster: bool = False
    """True if the URL is that of a cluster."""
    expire_s: Annotated[float, msgspec.Meta(ge=0.001, le=_YEARS_S)] | None = None
    """Seconds after which the server drops a block; by default its memory alone decides."""
    key_prefix: str = "wtransfer:"
    """Prefix of the server's keys."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 2.0
    """Longest wait for the server to connect, to take a value or to answer, in seconds."""

    def __post_init__(self) -> None:
        try:
            self.key_prefix.encode()
        except UnicodeError as error:
            raise ValueError(f"key_prefix: {error}") from error

    def __repr__(self) -> str:
        # The URL may contain a password.
        return f"{type(self).__name__}(...)"


class ValkeyTier(Tier):
    """Keeps blocks in a server.

    Args:
        options: The options.

    Raises:
        OffloadingOptionError: The URL cannot be used, or not for a cluster.
    """

    example_options: ClassVar[Mapping[str, Any]] = {"url": "redis://127.0.0.1:6379"}
    options_cls = ValkeyOptions
    writes_after_get = False

    def __init__(self, options: ValkeyOptions) -> None:
        pool = _connection_pool(options)
        self._prefix = options.key_prefix.encode()
        self._server = _Cluster(options.url, pool) if options.cluster else _Server(pool)
        self._expiry = () if options.expire_s is None else ("PX", int(options.expire_s * 1000))

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Ask for all keys at once."""
        return [found == 1 for found in self._run([("EXISTS", self._name(key)) for key in keys])]

    def put(self, key: bytes, data: memoryview) -> None:
        """Set a value."""
        self.put_many([(key, data)])

    def get(self, key: bytes, into: memoryview) -> bool:
        """Receive a value of exactly this length."""
        return self.get_many([(key, into)])[0]

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove keys; the server frees their memory in the background."""
        self._run([("UNLINK", self._name(key)) for key in keys])

    def put_many(self, items: Sequence[tuple[bytes, memoryview]]) -> None:
        """Set values without a wait between them."""
        self._run([("SET", self._name(key), data, *self._expiry) for key, data in items])

    def get_many(self, items: Sequence[tuple[bytes, memoryview]]) -> list[bool]:
        """Receive values without a wait between them."""
        return self._server.get([(self._name(key), into) for key, into in items])

    def close(self) -> None:
        """Close all connections; a second call does nothing."""
        self._server.close()

    def _name(self, key: bytes) -> bytes:
        return self._prefix + key

    def _run(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        replies = self._server.run(commands)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies


class _Server:
    """One server; a batch of commands is sent before its replies are read."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._client = Valkey.from_pool(pool)

    def run(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        replies: list[Any] = pipeline.execute(raise_on_error=False)
        return replies

    def get(self, items: list[tuple[bytes, memoryview]]) -> list[bool]:
        connection = self._pool.get_connection("GET")
        try:
            commands = [("GET", name) for name, _ in items]
            connection.send_packed_command(connection.pack_commands(commands))
            return [connection._parser.read_into(into) for _, into in items]  # noqa: SLF001
        except BaseException:
            # There may be replies left to read.
            connection.disconnect()
            raise
        finally:
            self._pool.release(connection)

    def close(self) -> None:
        self._client.close()


class _Cluster:
    """A cluster; the client finds the server of each key, and follows keys that move."""

    def __init__(self, url: str, pool: ConnectionPool) -> None:
        self._url, self._pool = url, pool
        self._lock = threading.Lock()
        self._client: Any = None
        self._closed = False

    def run(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        # One at a time: after a failed batch the client repeats each of its commands.
        return [self._call(*command) for command in commands]

    def get(self, items: list[tuple[bytes, memoryview]]) -> list[bool]:
        return [Tier.fill(into, self._call("GET", name)) for name, into in items]

    def close(self) -> None:
        with self._lock:
            client, self._client, self._closed = self._client, None, True
        if client is not None:
            client.close()

    def _call(self, *command: Any) -> Any:
        client = self._client or self._connect()
        try:
            return client.execute_command(*command)
        except ValkeyClusterException:
            # No known node can be reached: begin again with the one of the URL.
            with self._lock:
                if self._client is client:
                    self._client = None
            client.close()
            raise

    def _connect(self) -> Any:
        """Make a client; threads that come here at once all use the first one's."""
        client = ValkeyCluster(
            url=self._url,
            cluster_error_retry_attempts=0,
            connection_pool_class=self._make_pool,
        )
        with self._lock:
            if self._client is None and not self._closed:
                self._client = client
            kept = self._client
        if kept is not client:
            client.close()
        if kept is None:
            raise ServerLostError("The tier is closed.")
        return kept

    def _make_pool(self, **own: Any) -> ConnectionPool:
        """Make the pool of one node: the client's settings, and the tier's that it drops."""
        settings = {**own, **self._pool.connection_kwargs, "host": own["host"], "port": own["port"]}
        return ConnectionPool(**{**settings, "connection_class": self._pool.connection_class})


class _Parser(DefaultParser):
    """The client's parser, which can also receive a value into memory of the caller."""

    def read_into(self, into: memoryview) -> bool:
        """Receive the reply to ``GET``; return whether it was a value of this length."""
        expected, head = b"$%d\r\n" % into.nbytes, b""
        if not self._reader.has_data():
            while head != expected and expected.startswith(head):
                head += self._received(self._sock.recv(len(expected) - len(head)))
            if head == expected:
                done = 0
                while done < into.nbytes:
                    done += self._received(self._sock.recv_into(into[done:]))
                end = 2
                while end:
                    end -= len(self._received(self._sock.recv(end)))
                return True
            self._reader.feed(head)
        # Nothing, an error, another length, or a part of it was read with the reply before.
        reply = self.read_response()
        if isinstance(reply, Exception):
            raise reply
        return Tier.fill(into, reply)

    @staticmethod
    def _received(what: Any) -> Any:
        if not what:
            raise ServerLostError("The server closed the connection.")
        return what


def _connection_pool(options: ValkeyOptions) -> ConnectionPool:
    """Make a pool without a connection.

    Raises:
        OffloadingOptionError: The URL cannot be used, or not for a cluster.
    """
    try:
        parts = urlsplit(options.url)
        # A password with a slash that is not quoted would be taken for a path.
        if parts.scheme != "unix" and "@" in parts.path + parts.query + parts.fragment:
            raise ValueError
        pool = ConnectionPool.from_url(options.url)
        settings = pool.connection_kwargs
        is_unix = issubclass(pool.connection_class, UnixDomainSocketConnection)
        if is_unix and not settings.get("path"):
            raise ValueError
        if issubclass(pool.connection_class, SSLConnection):
            is_verified = settings.get("ssl_cert_reqs") != "none"
            settings.setdefault("ssl_check_hostname", is_verified)
        pool.connection_class(**settings)
    except Exception:
        # Without the original error: it may quote a part of the password.
        raise OffloadingOptionError(
            "kv_connector_extra_config: url: expected redis://, rediss:// or unix:// with a host "
            "or path; in a user name or password, /, @, :, ? and # are written as %2F, %40, %3A, "
            "%3F and %23"
        ) from None
    others = sorted(name for name in settings if name not in _IN_URL and name[:4] != "ssl_")
    if others:
        raise OffloadingOptionError(
            f"kv_connector_extra_config: url: its query contains {', '.join(others)}; expected "
            "only db, username, password and ssl_..., all else is an option beside it"
        )
    if options.cluster and (is_unix or settings.get("db")):
        raise OffloadingOptionError(
            "kv_connector_extra_config: cluster: a cluster is reached by redis:// or rediss://, "
            "and has one database only"
        )
    encode = pool.get_encoder().encode
    settings.update(
        socket_timeout=options.timeout_s,
        socket_connect_timeout=options.timeout_s,
        parser_class=_Parser,
        # The client's other packer, its default, copies every value.
        command_packer=PythonRespSerializer(_COPIED, encode),
    )
    return pool
