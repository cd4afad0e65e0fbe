import pytest

from wtransfer_vllm.messages import Invitation, is_foreign, read_invitation


def test_invitation_is_read_and_its_token_not_shown():
    info = {"wtransfer": {"address": "unix:@x", "token": "t", "instance": "i"}}
    assert read_invitation(info) == Invitation("unix:@x", "t", instance="i")
    assert "t'" not in repr(read_invitation(info))


@pytest.mark.parametrize(
    "info",
    [
        {},
        None,
        [],
        {"wtransfer": "unix:@x"},
        {"wtransfer": {"token": "t"}},
        {"wtransfer": {"address": 3}},
        {"wtransfer": {"address": "unix:@x", "token": 3}},
        {"master_address": "127.0.0.1", "master_port": 1},
    ],
    ids=repr,
)
def test_malformed_invitation_is_refused(info):
    with pytest.raises(ValueError, match="wtransfer"):
        read_invitation(info)


@pytest.mark.parametrize(
    ("update_info", "expected"),
    [
        (None, False),
        ({}, False),
        ({"is_checkpoint_format": True}, False),
        ([{}, {}], False),
        ({"names": []}, True),
        ([{}, {"names": []}], True),
    ],
)
def test_update_that_carries_anything_is_foreign(update_info, expected):
    assert is_foreign(update_info) is expected
