"""A model has one session at a time: what counts as one model, and when the next may have it."""

from __future__ import annotations

import inspect
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from wtransfer.errors import AuthenticationError
from wtransfer.weight_sync.storages import num_holders
from wtransfer.weight_sync.worker.session import WorkerSession
from wtransfer.weight_sync.worker.target import StateDictTarget
from wtransfer.weight_version import process_weights

PATIENCE_S = 10.0
REFUSED = "has a WorkerSession already, made at"


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8, bias=False)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.b.weight


class Target:
    """A user's own: the library does not know where its weights are."""

    def schema(self):
        return None

    def apply(self, tensors):
        self.tensors = tensors

    def capture(self):
        return None


class Stands(Target):
    def __init__(self, model):
        self.vouched_as = model


def parts(module, name):
    return {key: each for key, each in module.named_parameters() if key.startswith(name)}


@pytest.mark.parametrize(
    "again",
    [
        lambda module: module,
        nn.parallel.DataParallel,
        lambda module: module.state_dict(),
        lambda module: dict(module.named_parameters()),
        lambda module: StateDictTarget(dict(module.named_parameters()), commit="copy"),
        lambda module: {"w": module.tied.weight},
        lambda module: {"w": module.a.weight[3, 2:4]},
        lambda module: {"w": torch.from_numpy(module.a.bias.detach().numpy())},
        Stands,
    ],
    ids=[
        "the module",
        "wrapped",
        "its state",
        "its parameters",
        "a target of them",
        "a tied name",
        "a view of a part",
        "memory that numpy holds",
        "a target that stands for it",
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_second_session_of_a_model_is_refused_with_the_place_of_the_first(again, is_first):
    module = Tied()
    models = [module, again(module)] if is_first else [again(module), module]
    line = inspect.currentframe().f_lineno
    with WorkerSession(models[0]) as first:
        with pytest.raises(ValueError, match=REFUSED) as caught:
            WorkerSession(models[1])
        assert f"{REFUSED} {__file__}:{line + 1}: " in str(caught.value)
        assert first.state == "fresh"
    WorkerSession(models[1]).close()


def test_two_mappings_of_one_memory_are_named_by_what_they_share():
    tensor = torch.zeros(4)
    with (
        WorkerSession({"w": tensor, "x": torch.zeros(1)}),
        pytest.raises(ValueError, match=r"'v' of this model, 'w' there, has a WorkerSession"),
    ):
        WorkerSession({"u": torch.zeros(4), "v": tensor})


def test_models_with_equal_weights_and_disjoint_parts_of_one_have_a_session_each():
    flat = torch.zeros(10)
    module, twin = Tied(), Tied()
    twin.load_state_dict(module.state_dict())
    empty = torch.zeros(0)
    models = (
        parts(module, "a."),
        parts(module, "b."),
        twin,
        {"a": flat[:5], "empty": empty},
        {"a": flat[5:], "empty": empty},
        {"a": torch.zeros(3, 4)[:, 1], "none": torch.zeros(0)},
        Target(),
        Target(),
        Stands(None),
        Stands(None),
    )
    sessions = [WorkerSession(each) for each in models]
    for each in sessions:
        each.close()


def test_model_that_has_been_pointed_to_other_memory_is_known(fleet):
    """A large enough one: a commit copies small tensors."""
    source, module = nn.Linear(128, 128), nn.Linear(128, 128)
    made = fleet(source)
    member = made.join(module)
    for version in ("v1", "v2"):
        address = module.weight.data_ptr()
        assert made.publish(version).ok
        if num_holders(module.weight) is not None:  # else this torch only copies
            assert module.weight.data_ptr() != address
        for again in (module, module.state_dict(), dict(module.named_parameters())):
            with pytest.raises(ValueError, match=REFUSED):
                WorkerSession(again)
    del again
    member.session.close()
    WorkerSession(module).close()


def test_refused_session_leaves_the_first_as_it_was(fleet, weights):
    made = fleet(weights)
    member = made.join()
    assert made.publish("v1").ok
    version = process_weights.version()
    with pytest.raises(ValueError, match=REFUSED):
        WorkerSession(member.model, join=made.publisher.address, token=made.publisher.token)
    assert len(made.publisher.workers()) == 1
    assert process_weights.version() == version
    assert made.publish("v2").ok
    assert member.session.version == "v2"


CELL = "session = WorkerSession(model, join=address, token=token)"


def test_cell_that_is_run_twice_is_refused_and_its_first_session_commits_on(fleet, weights):
    """Of a notebook that keeps its model."""
    made = fleet(weights)
    model = {name: torch.zeros_like(each) for name, each in weights.items()}
    names = {"WorkerSession": WorkerSession, "model": model}
    names |= {"address": made.publisher.address, "token": made.publisher.token}
    cell = compile(CELL, "cell-7", "exec")
    exec(cell, names)
    with names["session"] as first:
        with pytest.raises(ValueError, match=f"{REFUSED} cell-7:1"):
            exec(cell, names)
        assert names["session"] is first
        made.publisher.wait_for_workers(1)
        with ThreadPoolExecutor(1) as pool:
            publishing = pool.submit(made.publisher.publish, "step-1")
            first.wait_for("step-1", PATIENCE_S)
            assert publishing.result().ok


def test_model_of_a_session_without_a_reference_has_the_next_one_at_once(fleet, weights, until):
    """And its publisher has heard of the end of the first before it hears of the second."""
    made = fleet(weights)
    model = {name: torch.zeros_like(each) for name, each in weights.items()}
    for number in range(5):
        session = WorkerSession(
            model, join=made.publisher.address, token=made.publisher.token, name=f"w{number}"
        )
        until(lambda number=number: f"w{number}" in {w.worker for w in made.publisher.workers()})
        assert len(made.publisher.workers()) == 1
        del session
    until(lambda: not made.publisher.workers())


def test_session_that_could_not_join_leaves_its_model_to_the_next(weights):
    """Also while its error is kept, as a notebook keeps the last one."""
    with pytest.raises(AuthenticationError) as caught:
        WorkerSession(weights, join="unix:@wt-nobody")
    WorkerSession(weights).close()
    assert caught.value.__traceback__ is not None


def test_session_that_nothing_joined_goes_with_its_last_reference(weights):
    """Also while the error of a second one is kept, which refers to what was behind the first."""
    session = WorkerSession(weights)
    with pytest.raises(ValueError, match=REFUSED) as caught:
        WorkerSession(weights)
    del session
    WorkerSession(weights).close()
    assert caught.value.__traceback__ is not None


def test_one_of_many_threads_has_the_session(weights):
    start, made, refused = threading.Barrier(8), [], []

    def run():
        start.wait(PATIENCE_S)
        try:
            made.append(WorkerSession(weights))
        except ValueError as error:
            refused.append(str(error))

    for _ in range(20):
        threads = [threading.Thread(target=run) for _ in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(PATIENCE_S)
        assert (len(made), len(refused)) == (1, 7)
        assert all(REFUSED in each for each in refused)
        made.pop().close()
        refused.clear()


def test_model_of_another_that_cannot_be_read_any_more_hinders_nobody():
    broken = nn.Linear(2, 2)
    with WorkerSession(broken):
        broken.to("meta")
        WorkerSession(nn.Linear(2, 2)).close()


IN_A_CHILD = """
import os, torch
from wtransfer import WorkerSession

model = torch.nn.Linear(2, 2)
session = WorkerSession(model)
if (child := os.fork()) == 0:
    with WorkerSession(model) as own:
        os._exit(17 if own.state == "fresh" else 1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 17
session.close()
"""


def test_model_that_a_forked_child_has_is_another(run_program):
    program = run_program(IN_A_CHILD)
    assert program.wait(60) == 0, program.err()
