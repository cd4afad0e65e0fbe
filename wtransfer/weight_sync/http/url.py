"""Where a worker's HTTP server is, as users write it.

=======================  =======================================================================
``http://host:port``     as browsers have it; ``http://wtransfer:TOKEN@host:port`` with its token
``tcp:host:port``        the same without a token, as other addresses of wtransfer are written
``unix:@name``           abstract Unix socket
``unix:/path``           Unix socket in a folder
=======================  =======================================================================
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from wtransfer.errors import AddressError
from wtransfer.transport.address import parse_address

_PORTS = {"http": 80, "https": 443}
_SECRET = re.compile(r"(?<=://).*@|(?<=^tcp:).*@")


@dataclass(frozen=True)
class HostUrl:
    """A parsed URL."""

    name: str
    """The URL as it may be shown: without its token."""
    base_url: str
    """What requests start with."""
    socket: str | None = None
    """Unix socket to connect to; abstract names start with a NUL."""
    place: str = ""
    """The same as an address of `wtransfer.transport.address`."""
    token: str | None = field(default=None, repr=False)
    """Token that stood in the URL."""

    @property
    def is_local(self) -> bool:
        """Whether the worker is on this host; looks its name up, which may block.

        Raises:
            AddressError: The host's name is not known.
        """
        return self.socket is not None or parse_address(self.place).is_local


def parse_host_url(text: str) -> HostUrl:
    """Read a URL.

    Raises:
        AddressError: It is none of the forms above.
    """
    scheme, _, rest = text.partition(":")
    if scheme == "unix":
        target = parse_address(text).target
        assert isinstance(target, str)
        return HostUrl(text, "http://localhost", target, place=text)
    if scheme == "tcp":
        return _parse_http(text, f"http://{rest}")
    if scheme in _PORTS:
        return _parse_http(text, text)
    raise _invalid(text, "it has another form")


def _parse_http(text: str, url: str) -> HostUrl:
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS[parts.scheme]
    except ValueError:
        # Without its cause, whose text repeats parts of the URL, and so perhaps of a token.
        raise _invalid(text, "host or port cannot be read") from None
    if not parts.hostname or parts.query or parts.fragment:
        raise _invalid(text, "it names no host, or has a query")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    base_url = f"{parts.scheme}://{host}:{port}{parts.path.rstrip('/')}"
    return HostUrl(
        name=base_url if text is url else f"tcp:{host}:{port}",
        base_url=base_url,
        place=f"tcp:{host}:{port}",
        token=unquote(parts.password or parts.username or "") or None,
    )


def _invalid(text: str, why: str) -> AddressError:
    return AddressError(
        f"{_SECRET.sub('***@', text)!r} is no worker's URL ({why}); expected 'http://host:port', "
        "'tcp:host:port', 'unix:@name' or 'unix:/path'"
    )
