"""What trainer and workers may say, and how mistakes are named."""

import base64

import pytest
from wtransfer.config import ParallelConfig, WeightTransferConfig
from wtransfer.errors import GroupError

from wtransfer_nccl.engine import NCCLWeightTransferEngine
from wtransfer_nccl.infos import NCCLTrainerInitInfo, NCCLWeightTransferUpdateInfo

UNIQUE_ID = base64.b64encode(bytes(range(128))).decode()
MEETING = {"master_address": "127.0.0.1", "master_port": 29500}
RANKS = {"rank_offset": 1, "world_size": 2}


@pytest.fixture
def engine():
    made = NCCLWeightTransferEngine(WeightTransferConfig(), ParallelConfig())
    yield made
    made.shutdown()


def test_the_fields_of_the_field_are_taken(engine):
    info = engine.parse_init_info(
        {
            **MEETING,
            **RANKS,
            "packed": True,
            "packed_buffer_size_bytes": 10,
            "packed_num_buffers": 2,
        }
    )
    assert (info.master_address, info.master_port) == ("127.0.0.1", 29500)
    assert (info.rank_offset, info.world_size, info.packed_buffer_size_bytes) == (1, 2, 10)
    assert engine.parse_init_info({"nccl_unique_id_b64": UNIQUE_ID, **RANKS}).master_port == 0


@pytest.mark.parametrize(
    ("meeting", "why"),
    [
        ({}, "exactly one rendezvous: `master_address` and `master_port` .got '' and 0."),
        ({"master_address": "h"}, "got 'h' and 0"),
        ({"master_port": 1}, "got '' and 1"),
        ({**MEETING, "nccl_unique_id_b64": UNIQUE_ID}, "exactly one rendezvous: got `nccl_unique"),
        ({"master_port": 1, "nccl_unique_id_b64": UNIQUE_ID}, "exactly one rendezvous: got `nccl"),
        ({"nccl_unique_id_b64": "_-" + UNIQUE_ID[2:]}, "not standard base64"),
        ({"nccl_unique_id_b64": UNIQUE_ID[:-4]}, "has 126 bytes, an ncclUniqueId has 128"),
    ],
)
def test_exactly_one_rendezvous_is_given(engine, meeting, why):
    expected = f"^Invalid init_info for NCCLWeightTransferEngine: .*{why}"
    with pytest.raises(ValueError, match=expected):
        engine.parse_init_info({**meeting, **RANKS})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"world_size": 1}, "`rank_offset` is 1 and `world_size` 1"),
        ({"rank_offset": 0}, "`rank_offset` is 0, expected a whole number > 0"),
        ({"rank_offset": True}, "`rank_offset` is True, expected a whole number > 0"),
        ({"world_size": 2.0}, "`world_size` is 2.0, expected a whole number > 0"),
        ({"packed_buffer_size_bytes": 1.5}, "`packed_buffer_size_bytes` is 1.5"),
        ({"packed": False}, "packed is false"),
        ({"packed_buffer_size_bytes": 0}, "`packed_buffer_size_bytes` is 0"),
        ({"timeout_s": "600"}, "`timeout_s` is '600', expected seconds > 0"),
        ({"communicator": "mpi"}, "communicator is 'mpi', expected one of"),
        ({"atomic": "disk"}, "atomic is 'disk', expected one of"),
    ],
)
def test_invalid_worker_init_info_is_refused(engine, changes, why):
    with pytest.raises(ValueError, match=why):
        engine.parse_init_info({**MEETING, **RANKS, **changes})


def test_a_unique_id_cannot_be_joined_by(engine):
    info = engine.parse_init_info({"nccl_unique_id_b64": UNIQUE_ID, **RANKS})
    with pytest.raises(GroupError, match="ProcessGroupNCCL, which makes its unique id itself"):
        engine.init_transfer_engine(info)


def test_a_trainer_of_another_make_is_recognised(engine):
    info = engine.parse_init_info({**MEETING, **RANKS})
    with pytest.raises(GroupError, match=r"127\.0\.0\.1:29500 names no `rendezvous`"):
        engine.init_transfer_engine(info)


def test_a_bucket_has_the_time_that_torch_gives_to_nccl_if_nothing_is_said(engine):
    assert NCCLTrainerInitInfo().timeout_s == 600.0
    assert engine.parse_init_info({**MEETING, **RANKS}).timeout_s == 600.0
    assert engine.parse_init_info({**MEETING, **RANKS, "timeout_s": 7.5}).timeout_s == 7.5


@pytest.mark.parametrize("odd", ["dtype_names", "shapes"])
def test_lists_of_unequal_length_are_named(odd):
    lists = {"names": ["a", "b"], "dtype_names": ["float32"] * 2, "shapes": [[1], [2]]}
    lists[odd] = lists[odd][:1]
    with pytest.raises(ValueError, match=f"`{odd}` has 1 entries, `names` has 2"):
        NCCLWeightTransferUpdateInfo(**lists)


def test_a_trainer_may_use_either_name_of_its_address():
    info = NCCLTrainerInitInfo(master_address="10.0.0.1", master_port="29500")
    assert (info.host, info.port) == ("10.0.0.1", 29500)
    info = NCCLTrainerInitInfo(host="10.0.0.1", port="29500", packed_num_buffers="3")
    assert (info.host, info.port, info.packed_num_buffers) == ("10.0.0.1", 29500, 3)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"host": "a", "master_address": "b"}, "`host` or `master_address`"),
        ({"port": 1, "master_port": 2}, "`port` or `master_port`"),
        ({"nccl_unique_id_b64": UNIQUE_ID}, "ProcessGroupNCCL, which makes its unique id itself"),
        ({"nccl_unique_id_b64": "x", "port": 1}, "not standard base64"),
        ({"timeout_s": "soon"}, "timeout_s is 'soon', expected seconds > 0"),
        ({"packed_num_buffers": 1}, "packed_num_buffers is 1, expected 2 or more"),
        ({"packed": "false"}, "packed is false"),
        ({"communicator": "mpi"}, "communicator is 'mpi'"),
        ({"atomic": "disk"}, "atomic is 'disk', expected one of"),
    ],
)
def test_invalid_trainer_init_info_is_refused(options, why):
    with pytest.raises(ValueError, match=why):
        NCCLTrainerInitInfo(**options)


def test_an_update_of_the_seed_era_says_whether_it_is_packed(engine):
    told = {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2]]}
    assert engine.parse_update_info(told).packed is False
    assert engine.parse_update_info({**told, "packed": True}).packed is True
