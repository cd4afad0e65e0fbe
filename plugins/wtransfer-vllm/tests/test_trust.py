"""Publishers that an engine core trusts: by its environment's token, or as part of its program."""

import json
import os
import subprocess
import sys

import pytest
import wtransfer
from wtransfer.errors import AuthenticationError

from wtransfer_vllm.messages import Invitation
from wtransfer_vllm.trust import token_for

CHILD = """
import json, os, sys
from wtransfer.errors import AuthenticationError
from wtransfer_vllm.messages import Invitation
from wtransfer_vllm.trust import token_for
try:
    print(token_for(Invitation(*json.loads(sys.argv[1])), os.environ))
except AuthenticationError as error:
    print(error)
"""


@pytest.fixture
def unset(monkeypatch):
    """No token in the environment."""
    monkeypatch.delenv("WTRANSFER_TOKEN")
    monkeypatch.delenv("WTRANSFER_TOKEN_FILE", raising=False)


@pytest.fixture
def publisher():
    with wtransfer.Publisher({}, token="its own") as made:
        yield made


def in_child(address, *, through=()):
    """Return what an engine core in a child process makes of an invitation."""
    command = [*through, sys.executable, "-c", CHILD, json.dumps([address, "its own"])]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()


@pytest.mark.parametrize("given", [None, "the secret", ""])
def test_token_of_the_environment_is_the_one_that_is_proven(monkeypatch, given):
    monkeypatch.setenv("WTRANSFER_TOKEN", "the secret")
    assert token_for(Invitation("unix:@x", given), os.environ) == "the secret"


@pytest.mark.parametrize("given", ["the secre", "the secret ", "\udcff", "another"], ids=repr)
def test_token_of_an_invitation_is_compared_and_never_used(monkeypatch, publisher, given):
    monkeypatch.setenv("WTRANSFER_TOKEN", "the secret")
    # Nor that of this very process: one rule where there is a token.
    for address in ("unix:@x", publisher.address):
        with pytest.raises(AuthenticationError, match="WTRANSFER_TOKEN must be the same in both"):
            token_for(Invitation(address, given), os.environ)


def test_token_of_a_file_counts_as_well(monkeypatch, unset, tmp_path):
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text("the secret\n")
    monkeypatch.setenv("WTRANSFER_TOKEN_FILE", str(path))
    assert token_for(Invitation("unix:@x"), os.environ) == "the secret"


def test_without_one_a_publisher_of_the_same_program_is_trusted(unset, publisher):
    assert token_for(Invitation(publisher.address, "its own"), os.environ) == "its own"
    assert in_child(publisher.address) == "its own"


def test_without_one_no_other_publisher_is_trusted(unset, publisher):
    # Between them and this process stands a shell.
    answer = in_child(publisher.address, through=("sh", "-c", '"$@"; true', "sh"))
    assert "set WTRANSFER_TOKEN to one secret in both environments" in answer
    for address in ("unix:@wt-test-nobody", "unix:/nowhere/at/all", "no address", ""):
        with pytest.raises(AuthenticationError, match="set WTRANSFER_TOKEN to one secret"):
            token_for(Invitation(address, "its own"), os.environ)
    with pytest.raises(AuthenticationError):
        token_for(Invitation(publisher.address), os.environ)


def test_process_that_the_kernel_does_not_name_is_not_the_one_that_started_this(
    unset, publisher, monkeypatch
):
    # In a container without a process of its own before this one, both are 0.
    monkeypatch.setattr("os.getppid", lambda: 0)
    monkeypatch.setattr("wtransfer_vllm.trust.peer_credentials", lambda _: (0, os.getuid()))
    with pytest.raises(AuthenticationError):
        token_for(Invitation(publisher.address, "its own"), os.environ)


def test_without_one_no_address_of_tcp_is_trusted(unset):
    with (
        wtransfer.Publisher({}, token="its own", listen="tcp:127.0.0.1:0") as publisher,
        pytest.raises(AuthenticationError),
    ):
        token_for(Invitation(publisher.address, "its own"), os.environ)
