"""TLS and its certificates. The server of these tests has no TLS: a relay before it has."""

from __future__ import annotations

import contextlib
import select
import socket
import socketserver
import ssl
import threading

import pytest
import trustme
from valkey.exceptions import ValkeyError

LENGTH = 2 << 20


class Relay(socketserver.ThreadingTCPServer):
    """Decrypts what comes to a port of the loopback, and passes it on to a server."""

    daemon_threads = True

    def __init__(self, server, certificate):
        super().__init__(("127.0.0.1", 0), None)
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        certificate.configure_cert(self._context)
        self._path, self.port = str(server.socket), self.server_address[1]
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self._thread.start()

    def finish_request(self, request, client_address):
        # A client that does not trust the certificate goes away here.
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            inner = stack.enter_context(self._context.wrap_socket(request, server_side=True))
            onward = stack.enter_context(socket.socket(socket.AF_UNIX))
            onward.connect(self._path)
            inner.setblocking(False)
            onward.setblocking(False)
            while _pass(inner, onward) and _pass(onward, inner):
                if not inner.pending():
                    select.select([inner, onward], [], [])

    def close(self):
        self.shutdown()
        self._thread.join()
        self.server_close()


def _pass(source, target):
    """Pass on what is there; return whether more may come."""
    try:
        data = source.recv(1 << 16)
    except (BlockingIOError, ssl.SSLWantReadError):
        return True
    target.setblocking(True)
    target.sendall(data)
    target.setblocking(False)
    return bool(data)


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture
def relay(server, authority):
    """Maker of relays with a certificate for one name."""
    with contextlib.ExitStack() as stack:

        def make(name):
            made = Relay(server, authority.issue_cert(name))
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def trusted(authority, tmp_path):
    path = tmp_path / "authority.pem"
    authority.cert_pem.write_to_path(path)
    return f"ssl_ca_certs={path}"


def works(tier):
    value, into = bytes(range(256)) * (LENGTH // 256), bytearray(LENGTH)
    tier.put(b"key", memoryview(value))
    assert tier.contains([b"key", b"other"]) == [True, False]
    assert tier.get(b"key", memoryview(into))
    assert into == value
    assert not tier.get(b"key", memoryview(bytearray(LENGTH - 1)))
    assert not tier.get(b"other", memoryview(bytearray(LENGTH)))


def test_a_certificate_that_is_trusted(relay, trusted, make_tier):
    works(make_tier(f"rediss://127.0.0.1:{relay('127.0.0.1').port}?{trusted}"))


def test_a_certificate_of_an_unknown_authority(relay, make_tier):
    made = relay("127.0.0.1")
    with pytest.raises((ValkeyError, OSError), match="CERTIFICATE_VERIFY_FAILED"):
        works(make_tier(f"rediss://127.0.0.1:{made.port}"))
    works(make_tier(f"rediss://127.0.0.1:{made.port}?ssl_cert_reqs=none"))


def test_a_certificate_of_another_host(relay, trusted, make_tier):
    made = relay("another.example")
    with pytest.raises((ValkeyError, OSError), match="CERTIFICATE_VERIFY_FAILED"):
        works(make_tier(f"rediss://127.0.0.1:{made.port}?{trusted}"))
    works(make_tier(f"rediss://127.0.0.1:{made.port}?{trusted}&ssl_check_hostname=false"))
