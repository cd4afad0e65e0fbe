"""Requests of the HTTP client, every kind of response, and endpoints that do not respond."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time

import pytest

uvicorn = pytest.importorskip("uvicorn")
from starlette.applications import Starlette  # noqa: E402
from starlette.responses import JSONResponse, PlainTextResponse, Response  # noqa: E402
from starlette.routing import Route  # noqa: E402

from wtransfer.errors import (  # noqa: E402
    AddressError,
    AuthenticationError,
    LimitError,
    PeerLostError,
    PluginNotInstalledError,
    ProtocolError,
    RemoteError,
    SchemaError,
    StallError,
)
from wtransfer.weight_sync.http import client as http_client  # noqa: E402
from wtransfer.weight_sync.http.client import HttpClient, parse_url  # noqa: E402

TOKEN = "the-secret"


class Host:
    """A real HTTP server with one route for everything: it notes requests and answers as told."""

    def __init__(self, address):
        self.requests = []
        self.answer = JSONResponse({})
        app = Starlette(routes=[Route("/{path:path}", self._serve, methods=["GET", "POST"])])
        self.socket = socket.socket(socket.AF_UNIX if address else socket.AF_INET)
        name = address and address.removeprefix("unix:").replace("@", "\0", 1)
        self.socket.bind(name or ("127.0.0.1", 0))
        config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self.socket]}, name="host"
        )
        self._thread.start()
        while not self._server.started:
            time.sleep(0.002)

    @property
    def port(self):
        return self.socket.getsockname()[1]

    async def _serve(self, request):
        body = await request.body()
        self.requests.append(
            (
                request.method,
                request.url.path,
                dict(request.query_params),
                json.loads(body) if body else None,
            )
        )
        self.authorization = request.headers.get("authorization")
        return self.answer

    def close(self):
        self._server.should_exit = True
        self._thread.join(5)
        self.socket.close()


@pytest.fixture
def start_host():
    with contextlib.ExitStack() as stack:

        def start(address=None):
            host = Host(address)
            stack.callback(host.close)
            return host

        yield start


@pytest.fixture
def host(start_host):
    return start_host()


@pytest.fixture
def client(host):
    return HttpClient(f"http://127.0.0.1:{host.port}", TOKEN, timeout_s=5)


@pytest.fixture(autouse=True)
def no_token_around(monkeypatch):
    monkeypatch.delenv("WTRANSFER_TOKEN", raising=False)
    monkeypatch.delenv("WTRANSFER_TOKEN_FILE", raising=False)


@contextlib.contextmanager
def raw_host(behave):
    """Listen, and call `behave` with the first connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    behave(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"tcp:127.0.0.1:{listener.getsockname()[1]}"
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)
        assert not thread.is_alive()


# -- requests


def test_every_call_has_vllms_route_and_body(client, host):
    client.init_weight_transfer_engine({"a": 1})
    client.start_weight_update()
    client.finish_weight_update()
    client.finish_weight_update("step-7")
    client.weight_info()
    client.weight_info(digests=True)
    client.leave("unix:@there")
    leave = {"wtransfer": {"address": "unix:@there", "leave": True}}
    assert host.requests == [
        ("POST", "/init_weight_transfer_engine", {}, {"init_info": {"a": 1}}),
        ("POST", "/start_weight_update", {}, None),
        ("POST", "/finish_weight_update", {}, None),
        ("POST", "/finish_weight_update", {}, {"weight_version": "step-7"}),
        ("GET", "/weight_info", {}, None),
        ("GET", "/weight_info", {"digests": "true"}, None),
        ("POST", "/init_weight_transfer_engine", {}, {"init_info": leave}),
    ]
    assert host.authorization == f"Bearer {TOKEN}"


@pytest.mark.parametrize(
    ("answer", "size"),
    [
        (JSONResponse({"world_size": 7}), 7),
        (JSONResponse({"world_size": "7"}), None),
        (JSONResponse([7]), None),
        (PlainTextResponse("Not Found", 404), None),
    ],
)
def test_world_size_is_none_where_the_endpoint_does_not_tell(client, host, answer, size):
    host.answer = answer
    assert client.get_world_size() == size
    assert host.requests == [("GET", "/get_world_size", {"include_dp": "true"}, None)]


@pytest.mark.parametrize("form", ["unix", "path", "tcp", "http", "userinfo", "prefix"])
def test_every_form_of_url_reaches_the_endpoint(start_host, tmp_path, form):
    name = f"unix:{tmp_path}/socket" if form == "path" else f"unix:@wt-{secrets.token_hex(4)}"
    local = form in ("unix", "path")
    host = start_host(name if local else None)
    url = {
        "unix": name,
        "path": name,
        "tcp": "tcp:127.0.0.1:{}",
        "http": "http://127.0.0.1:{}/",
        "userinfo": "http://wtransfer:in%2Furl@127.0.0.1:{}",
        "prefix": "http://127.0.0.1:{}/models/a",
    }[form]
    client = HttpClient(url.format(None if local else host.port), TOKEN)
    assert client.is_local
    client.start_weight_update()
    route = "/models/a/start_weight_update" if form == "prefix" else "/start_weight_update"
    assert [request[1] for request in host.requests] == [route]
    secret = "in/url" if form == "userinfo" else TOKEN
    assert host.authorization == f"Bearer {secret}"


def test_token_is_that_of_the_environment_or_none(host, monkeypatch):
    url = f"http://127.0.0.1:{host.port}"
    HttpClient(url).start_weight_update()
    assert host.authorization is None
    monkeypatch.setenv("WTRANSFER_TOKEN", "around")
    HttpClient(url).start_weight_update()
    assert host.authorization == "Bearer around"


def test_proxies_of_the_environment_are_not_used(client, host, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    client.start_weight_update()
    assert len(host.requests) == 1


def test_redirect_is_not_followed(client, host, start_host):
    other = start_host()
    location = {"Location": f"http://127.0.0.1:{other.port}/start_weight_update"}
    host.answer = Response(status_code=307, headers=location)
    with pytest.raises(RemoteError, match="with 307"):
        client.start_weight_update()
    assert other.requests == []


# -- URLs


@pytest.mark.parametrize(
    "url",
    [
        "nowhere",
        "ftp://host",
        "http://",
        "http://host:port",
        "http://host:99999",
        "http://host?x=1",
        "unix:relative",
        "unix:@",
        "tcp:",
        "http://[::1",
    ],
)
def test_invalid_url_is_refused_with_the_forms_that_exist(url):
    with pytest.raises(AddressError, match=r"expected|none of them NUL"):
        parse_url(url)


@pytest.mark.parametrize(
    "url",
    ["http://u:s3cret@host:x", "ftp://u:s3cret@host", "http://u:s3cret/y@host", "tcp:s3cret@h:x"],
)
def test_no_error_shows_a_token_of_a_url(url):
    with pytest.raises(AddressError) as caught:
        parse_url(url)
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("unix:@a", True),
        ("http://localhost:1", True),
        ("http://[::1]:1", True),
        ("tcp:127.0.0.9:1", True),
        ("http://10.1.2.3", False),
        ("https://10.1.2.3:1", False),
    ],
)
def test_client_knows_whether_its_endpoint_is_on_this_host(url, local):
    assert HttpClient(url).is_local == local


# -- answers that are errors


def test_error_of_ours_comes_back_as_its_class(client, host):
    error = {
        "type": "SchemaError",
        "message": "it does not fit",
        "worker": "w0",
        "mismatches": ["a: wanted"],
        "colour": "red",
    }
    host.answer = JSONResponse({"error": error}, 400)
    with pytest.raises(SchemaError) as caught:
        client.start_weight_update()
    assert str(caught.value) == f"it does not fit [worker w0 at {client.name}]"
    assert caught.value.mismatches == ["a: wanted"]
    assert not hasattr(caught.value, "colour")


@pytest.mark.parametrize(
    ("answer", "status", "text"),
    [
        (
            {"error": {"message": "no engine", "type": "BadRequestError"}},
            400,
            "BadRequestError: no",
        ),
        ({"error": {"message": "no type"}}, 500, "no type"),
        ({"error": "only text"}, 500, "only text"),
        ({"detail": "Not allowed"}, 500, "Not allowed"),
        ({"detail": [{"loc": ["body"], "msg": "missing"}]}, 500, "missing"),
        (["a list"], 500, "a list"),
        ("boom " * 10_000, 500, "with 500: boom boom"),
        ("Not Found", 404, "VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_the_text_of_other_servers_is_kept_and_cut(client, host, answer, status, text):
    response = PlainTextResponse if isinstance(answer, str) else JSONResponse
    host.answer = response(answer, status)
    with pytest.raises(RemoteError) as caught:
        client.start_weight_update()
    assert f"{client.name} answered POST /start_weight_update with {status}: " in str(caught.value)
    assert text in str(caught.value)
    assert len(str(caught.value)) < 3000


@pytest.mark.parametrize("answer", ["<html>hello", "[" * 100_000])
def test_response_that_is_not_json_is_shown(client, host, answer):
    host.answer = PlainTextResponse(answer)
    with pytest.raises(ProtocolError) as caught:
        client.weight_info()
    assert f"status 200 and no JSON: '{answer[:10]}" in str(caught.value)


@pytest.mark.parametrize("token", ["wrong", None])
def test_wrong_token_says_where_to_put_the_right_one(host, token):
    client = HttpClient(f"http://127.0.0.1:{host.port}", token)
    host.answer = PlainTextResponse("no", 401)
    with pytest.raises(AuthenticationError, match="--token-file or WTRANSFER_TOKEN") as caught:
        client.start_weight_update()
    assert ("refuses the token" in str(caught.value)) == (token is not None)
    assert "wrong" not in str(caught.value)


@pytest.mark.parametrize("token", ["two\nlines", "end ", "\0"])
def test_token_that_http_cannot_carry_is_not_shown(token):
    with pytest.raises(AuthenticationError, match="control characters") as caught:
        HttpClient("tcp:127.0.0.1:9", token).start_weight_update()
    assert token not in str(caught.value)


def test_huge_response_is_cut_off(client, host, monkeypatch):
    monkeypatch.setattr(http_client, "MAX_RESPONSE_NBYTES", 1000)
    host.answer = PlainTextResponse("x" * 100_000)
    with pytest.raises(LimitError, match="more than 1000 bytes"):
        client.weight_info()


# -- hosts that do not answer


def test_unreachable_endpoint_is_named_with_what_to_do():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    client = HttpClient(f"http://u:s3cret@127.0.0.1:{port}")
    with pytest.raises(
        PeerLostError, match=r"cannot reach http://127.*wtransfer worker.*openai\.api_server"
    ) as caught:
        client.weight_info()
    assert "s3cret" not in str(caught.value)


STRANGER = """
import socket, sys
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind("\\0" + sys.argv[1])
    listener.listen()
    print("listening", flush=True)
    for _ in ("probe", "request"):
        with listener.accept()[0] as accepted:
            accepted.settimeout(10)
            print(len(accepted.recv(100)), flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_users_listener_at_an_abstract_name_is_not_given_the_token():
    name = f"wt-test-{secrets.token_hex(8)}"
    command = ["/usr/bin/env", "-i", "python3", "-c", STRANGER, name]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, user=65534, cwd="/"
    ) as process:
        assert process.stdout.readline().strip() == "listening"
        with pytest.raises(AuthenticationError, match=r"belongs to user 65534.*run this as that"):
            HttpClient(f"unix:@{name}", TOKEN).weight_info()
        assert [line.strip() for line in process.stdout] == ["0", "0"]


@pytest.mark.parametrize("url", ["unix:@wt-test-absent", "unix:/nowhere/worker.sock"])
def test_socket_without_a_listener_is_named_and_not_left_open(url):
    with pytest.raises(PeerLostError, match=f"cannot reach {url} for GET /weight_info"):
        HttpClient(url).weight_info()


def test_endpoint_that_closes_the_connection_is_lost():
    with (
        raw_host(lambda connection: connection.recv(4096)) as url,
        pytest.raises(PeerLostError, match="cannot reach"),
    ):
        HttpClient(url).weight_info()


@pytest.mark.parametrize("start", [None, b"", b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n"])
def test_endpoint_that_is_silent_or_answers_byte_by_byte_is_given_up(start):
    done = threading.Event()

    def drip(connection):
        if start is None:
            done.wait(30)
            return
        connection.sendall(start)
        while not done.wait(0.05):
            connection.sendall(b"H")

    with raw_host(drip) as url:
        begun = time.monotonic()
        with pytest.raises(StallError, match=r"did not answer GET /weight_info within 0\.4 s"):
            HttpClient(url, timeout_s=0.4).weight_info()
        assert time.monotonic() - begun < 10
        done.set()


def test_without_httpx_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(PluginNotInstalledError, match=r'pip install "wtransfer\[server\]"'):
        HttpClient("unix:@a").weight_info()
