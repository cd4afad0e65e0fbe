"""What is committed is what computes: models that compute with more than their parameters.

Every case goes the real way. A worker's model computes once with its first weights, takes a commit
of others, then one of the first again, then one that fails; after each it computes what a fresh
model does that has loaded the same state.
"""

from __future__ import annotations

import functools
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from wtransfer.errors import CommitError, SchemaError
from wtransfer.weight_sync.storages import memory_address
from wtransfer.weight_sync.worker.session import WorkerSession
from wtransfer.weight_sync.worker.target import SMALL_NBYTES, ModuleTarget

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings(
        "ignore:.*weight_norm:FutureWarning",
        "ignore:.*torch.ao.quantization",
        "ignore:torch.quantize_per_tensor",
        "ignore:.*torch.jit",
    ),
]

SIZE = 72
"""Of a layer whose weight is large enough to be adopted."""
assert SIZE * SIZE * 4 > SMALL_NBYTES

X = torch.randn(8, SIZE, generator=torch.Generator().manual_seed(0))


def linear():
    return nn.Linear(SIZE, SIZE)


def layers():
    return nn.Sequential(linear(), nn.ReLU(), linear())


def computed(model):
    with torch.no_grad():
        return model(X)


def build(make, seed):
    torch.manual_seed(seed)
    return make().eval()


def copied(state):
    return {name: each.clone() for name, each in state.items()}


class Failing(ModuleTarget):
    """A module whose loading raises when it has taken all, once it is told to."""

    fails = False

    def apply(self, tensors):
        super().apply(tensors)
        if self.fails:
            self.fails = False
            raise RuntimeError("the model says no")


class Trip:
    """A worker whose model has computed with its first weights, and a trainer with others."""

    def __init__(self, fleet, report_of, commit, make, serve=lambda model: model, **options):
        self.make, self.serve, self.report_of = make, serve, report_of
        self.trainer, worker = build(make, 1), build(make, 2)
        self.states = {"other": copied(self.trainer.state_dict())}
        self.states["first"] = copied(worker.state_dict())
        self.expected = {name: computed(self.fresh(name)) for name in self.states}
        assert not torch.equal(*self.expected.values())
        self.model = serve(worker)
        assert torch.equal(computed(self.model), self.expected["first"])
        self.target = Failing(self.model, commit)
        self.fleet = fleet(self.trainer)
        self.session = self.fleet.join(self.target, **options).session

    def fresh(self, name):
        model = build(self.make, 3)
        model.load_state_dict(self.states[name])
        return self.serve(model)

    def publish(self, name):
        self.trainer.load_state_dict(self.states[name])
        assert self.fleet.publish(name).ok

    def fail(self, name, because):
        self.trainer.load_state_dict(self.states[name])
        round_ = self.fleet.publisher.publish(name, wait=False)
        with pytest.raises(CommitError, match=because) as caught:
            self.session.commit_pending(5)
        assert caught.value.restored
        report = self.report_of(round_.result, 5)
        assert [worker.outcome for worker in report.workers] == ["restored"]

    def refuse(self, name):
        self.target.fails = True
        self.fail(name, "the model says no")

    def check(self, name):
        assert torch.equal(computed(self.model), self.expected[name])

    def run(self):
        self.publish("other")
        self.check("other")
        self.publish("first")
        self.check("first")
        self.refuse("other")
        self.check("first")


@pytest.fixture
def make_trip(fleet, report_of):
    """Maker of a worker and its trainer; takes what `Trip` takes from its third argument on."""
    return functools.partial(Trip, fleet, report_of)


# -- what torch computes weights from


class Product(nn.Module):
    """A weight that is computed from several."""

    def forward(self, left, right):
        return left @ right

    def right_inverse(self, weight):
        return weight.clone(), torch.eye(SIZE)


def product():
    layer = linear()
    parametrize.register_parametrization(layer, "weight", Product())
    return layer


def chained():
    return parametrizations.spectral_norm(parametrizations.weight_norm(linear()))


def pruned():
    layer = linear()
    prune.l1_unstructured(layer, "weight", 0.5)
    return prune.random_unstructured(layer, "weight", 0.3)


def normed_twice():
    layer = parametrizations.weight_norm(linear())
    return nn.Sequential(layer, layer)


class Renamed(nn.Linear):
    """Has another name for its weight in its state, without a copy."""

    def __init__(self):
        super().__init__(SIZE, SIZE)
        self.register_state_dict_post_hook(self.rename)
        self.register_load_state_dict_pre_hook(self.rename_back)

    @staticmethod
    def rename(_module, state, prefix, _metadata):
        state[prefix + "kernel"] = state.pop(prefix + "weight").t()

    @staticmethod
    def rename_back(_module, state, prefix, *_):
        state[prefix + "weight"] = state.pop(prefix + "kernel").t()


class Recurrent(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x[None])[0]


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(SIZE, 4, batch_first=True)
        encoder = nn.TransformerEncoderLayer(SIZE, 4, SIZE, batch_first=True)
        self.encoder = nn.TransformerEncoder(encoder, 2)

    def forward(self, x):
        x = x[None]
        return self.encoder(self.attention(x, x, x)[0])


def normed_recurrent():
    return Recurrent(nn.utils.weight_norm(nn.LSTM(SIZE, SIZE), "weight_hh_l0"))


# -- names of one memory


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, SIZE)
        self.twin = nn.Embedding(8, SIZE)
        self.up = nn.Linear(SIZE, 8, bias=False)
        self.first, self.second = linear(), linear()
        self.up.weight = self.embed.weight
        self.twin.weight.data = self.embed.weight.data
        self.second.weight.data = self.first.weight.data

    def forward(self, x):
        numbers = torch.arange(8)
        return self.up(self.first(self.second(x))) @ (self.embed(numbers) + self.twin(numbers))


class Fused(nn.Module):
    """Views of one tensor, which may itself have a name or none."""

    def __init__(self, named):
        super().__init__()
        whole = torch.randn(3 * SIZE, SIZE)
        self.whole = nn.Parameter(whole) if named else whole
        for number, name in enumerate("qkv"):
            part = whole[number * SIZE : (number + 1) * SIZE]
            self.register_parameter(name, nn.Parameter(part))
        self.register_buffer("window", whole[SIZE - 9 : SIZE + 9])
        self.register_parameter("turned", nn.Parameter(self.k.data.t()))

    def forward(self, x):
        parts = x @ self.q + x @ self.k + x @ self.v + x @ self.turned
        return parts + (x @ self.whole.t()).sum() + (x @ self.window.t()).sum()


class Rotary(nn.Module):
    """Has a non-persistent buffer that does not depend on weights."""

    def __init__(self):
        super().__init__()
        self.layer = linear()
        self.register_buffer("inv_freq", torch.arange(SIZE) / SIZE, persistent=False)

    def forward(self, x):
        return self.layer(x * self.inv_freq)


COMPUTED = {
    "weight norm": lambda: parametrizations.weight_norm(linear()),
    "orthogonal": lambda: parametrizations.orthogonal(linear()),
    "spectral norm": lambda: parametrizations.spectral_norm(linear()),
    "product": product,
    "chained": chained,
    "normed twice": normed_twice,
    "old weight norm": lambda: nn.utils.weight_norm(linear()),
    "old spectral norm": lambda: nn.utils.spectral_norm(linear()),
    "pruned": pruned,
    "renamed": Renamed,
    "batch norm": lambda: nn.Sequential(linear(), nn.BatchNorm1d(SIZE)),
    "lstm": lambda: Recurrent(nn.LSTM(SIZE, SIZE)),
    "gru": lambda: Recurrent(nn.GRU(SIZE, SIZE)),
    "normed lstm": normed_recurrent,
    "attention": Attending,
    "tied": Tied,
    "fused, all named": lambda: Fused(named=True),
    "fused, parts named": lambda: Fused(named=False),
    "rotary": Rotary,
}


@pytest.mark.parametrize("case", COMPUTED)
def test_weights_that_are_computed_or_share_memory_follow(make_trip, commit, case):
    make_trip(commit, COMPUTED[case]).run()


def test_weights_cached_by_parametrize_are_computed_anew(make_trip, commit):
    trip = make_trip(commit, COMPUTED["weight norm"])
    with parametrize.cached():
        trip.check("first")
        trip.run()


# -- views that the state does not name


class Viewing(nn.Module):
    """Computes with what it made of its weight.

    Args:
        hold: Weight -> what the module keeps.
        look: What is kept -> a tensor.
    """

    def __init__(self, hold, look):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE))
        self.hold, self.look = hold, look
        self.held = hold(self.weight)

    def forward(self, x):
        if self.held is None:
            self.held = self.hold(self.weight)
        return x @ self.look(self.held)


def closure(weight):
    turned = weight.data.t()
    return lambda: turned


def unregistered_layer(weight):
    layer = nn.Linear(SIZE, SIZE, bias=False)
    layer.weight.data = weight.data.t()
    return [layer]


def viewing(hold, look):
    return lambda: Viewing(hold, look)


HELD = {
    "attribute": (lambda w: w.t(), lambda held: held),
    "data": (lambda w: w.data, lambda held: held),
    "detached": (lambda w: w.detach()[:], lambda held: held),
    "parameter in list": (lambda w: [w], lambda held: held[0]),
    "list": (lambda w: [w.data.t()], lambda held: held[0]),
    "nested": (lambda w: ({"w": [w.data.t()]},), lambda held: held[0]["w"][0]),
    "namespace": (lambda w: types.SimpleNamespace(w=w.data.t()), lambda held: held.w),
    "closure": (closure, lambda held: held()),
    "partial": (lambda w: functools.partial(torch.add, w.data.t(), 0), lambda held: held()),
    "numpy": (lambda w: w.detach().numpy(), torch.from_numpy),
    "unregistered layer": (unregistered_layer, lambda held: held[0].weight.t()),
}


@pytest.mark.parametrize("case", HELD)
def test_views_follow_wherever_they_are_held(make_trip, commit, case):
    make_trip(commit, viewing(*HELD[case])).run()


@pytest.mark.parametrize("case", ["attribute", "closure"])
def test_views_made_of_adopted_memory_follow_and_the_way_back_is_whole(make_trip, commit, case):
    trip = make_trip(commit, viewing(*HELD[case]))
    trip.model.held = None
    trip.publish("other")
    assert (memory_address(trip.model.weight) in trip.target._adopted) is (commit == "adopt")
    trip.check("other")
    # There is a view from here on, so these are written in place, and the version beside them.
    trip.refuse("first")
    trip.check("other")
    trip.publish("first")
    trip.check("first")
    trip.refuse("other")
    trip.check("first")


def test_nonpersistent_buffer_that_views_a_weight_follows(make_trip, commit):
    def make():
        layer = nn.Linear(SIZE, SIZE, bias=False)
        layer.register_buffer("turned", layer.weight.data.t(), persistent=False)
        layer.forward = lambda x: x @ layer.turned
        return layer

    make_trip(commit, make).run()


def test_state_of_a_module_that_computes_follows_as_a_mapping(fleet, commit):
    trainer, model = build(layers, 1), build(layers, 2)
    made = fleet(trainer)
    made.join(model.state_dict(), commit=commit)
    assert made.publish("v1").ok
    assert torch.equal(computed(model), computed(trainer))


def test_parameter_that_nothing_else_holds_is_adopted_by_every_commit(make_trip):
    trip = make_trip("adopt", linear)
    for name in ("other", "first", "other"):
        before = trip.model.weight.data_ptr()
        trip.publish(name)
        assert trip.model.weight.data_ptr() != before
        trip.check(name)


# -- what is derived from weights


class Deriving(nn.Linear):
    """Keeps a copy of its weight in another form, and makes it anew when a state is loaded."""

    def __init__(self):
        super().__init__(SIZE, SIZE)
        self.derive()
        self.register_load_state_dict_post_hook(lambda layer, _: layer.derive())

    def derive(self):
        self.derived = self.weight.detach().t().contiguous()

    def forward(self, x):
        return x @ self.derived


def test_hooks_of_loading_derive_from_what_is_committed_and_restored(make_trip, commit):
    make_trip(commit, Deriving).run()


def test_hook_of_loading_that_raises_fails_the_commit_and_the_old_version_is_back(
    make_trip, commit
):
    trip = make_trip(commit, Deriving)
    errors = [RuntimeError("cannot derive")]

    def fail_once(_layer, _keys):
        if errors:
            raise errors.pop()

    trip.model.register_load_state_dict_post_hook(fail_once)
    trip.fail("other", "cannot derive")
    trip.check("first")


# -- compiled


def script(model):
    return torch.jit.script(model)


def trace(model):
    return torch.jit.trace(model, X)


def script_part(model):
    model[0] = torch.jit.script(model[0])
    return model


def export(model):
    return torch.export.export(model, (X,)).module()


class Wrapping(nn.Module):
    """Has its layers beside: `forward` is replaced."""

    def __init__(self):
        super().__init__()
        self.__dict__["inner"] = inner = layers()
        for name, each in inner.named_parameters():
            self.register_parameter(name.replace(".", "_"), each)

    def forward(self, x):
        return self.inner(x)


def call_with_held_parameters(model):
    held = {name: each.detach() for name, each in model.inner.named_parameters()}
    model.forward = lambda x: torch.func.functional_call(model.inner, held, (x,))
    return model


TRACED = {
    "script": (layers, script),
    "trace": (layers, trace),
    "script part": (layers, script_part),
    "fx": (layers, torch.fx.symbolic_trace),
    "export": (layers, export),
    "functional": (Wrapping, call_with_held_parameters),
}


@pytest.mark.parametrize("case", TRACED)
def test_traced_modules_compute_with_what_is_committed(make_trip, commit, case):
    make_trip(commit, *TRACED[case]).run()


def compiled_in_place(model):
    model.compile()
    return model


def compiled_part(model):
    model[0] = torch.compile(model[0])
    return model


def compiled_forward(model):
    model.forward = torch.compile(model.forward)
    return model


COMPILED = {
    "module": torch.compile,
    "in place": compiled_in_place,
    "part": compiled_part,
    "forward": compiled_forward,
    "reduce-overhead": functools.partial(torch.compile, mode="reduce-overhead"),
    "freezing, as an option": functools.partial(torch.compile, options={"freezing": True}),
}
QUICK = {"in place"}


@pytest.fixture
def compiler():
    """Let torch compile in this process, and keep nothing of it."""
    from torch._inductor import config

    torch._dynamo.reset()
    with config.patch(compile_threads=1):
        yield config
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in COMPILED],
)
@pytest.mark.usefixtures("compiler")
def test_compiled_modules_compute_with_what_is_committed(make_trip, commit, case):
    make_trip(commit, layers, COMPILED[case]).run()


def test_weights_folded_into_compiled_code_are_refused_at_the_session_and_at_a_commit(
    make_trip, commit, compiler
):
    trip = make_trip(commit, layers)
    with compiler.patch(freezing=True):
        with pytest.raises(SchemaError, match=r"_inductor\.config\.freezing is set: compiled code"):
            WorkerSession(layers(), commit=commit)
        trip.fail("other", r"_inductor\.config\.freezing is set")
    trip.check("first")


@pytest.fixture(scope="module")
def group():
    """Process group of one rank; gloo keeps a loop and its descriptors for the process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_wrapper_for_data_parallel_training_is_looked_through(make_trip, commit):
    make_trip(commit, layers, nn.parallel.DistributedDataParallel).run()


# -- what no update reaches


class WithExtra(nn.Linear):
    """Computes with a number that is no tensor of its state."""

    def __init__(self, as_tensor):
        super().__init__(SIZE, SIZE)
        self.as_tensor = as_tensor

    def get_extra_state(self):
        return torch.ones(1) if self.as_tensor else {"scale": 1.0}

    def set_extra_state(self, state):
        pass


class Copying(nn.Linear):
    """Has a copy of its weight in its state."""

    def __init__(self):
        super().__init__(SIZE, SIZE)
        self.register_state_dict_post_hook(self.convert)

    @staticmethod
    def convert(_module, state, prefix, _metadata):
        state[prefix + "weight"] = state[prefix + "weight"].t().contiguous()


def partly_quantised():
    return torch.ao.quantization.quantize_dynamic(nn.Sequential(linear()), {nn.Linear}).append(
        linear()
    )


def mkldnn():
    from torch.utils.mkldnn import to_mkldnn

    return to_mkldnn(linear())


UNREACHED = {
    "extra state": (lambda: WithExtra(as_tensor=False), "_extra_state: a dict, and only tensors"),
    "extra tensor": (lambda: WithExtra(as_tensor=True), "_extra_state: a copy that state_dict"),
    "copying hook": (Copying, "weight: a copy that state_dict"),
    "quantised": (partly_quantised, r"0\._packed_params\._packed_params: a tuple, and only"),
    "lazy": (lambda: nn.LazyLinear(SIZE), r"weight: not initialized yet"),
    "mkldnn": (mkldnn, "weight: of layout torch._mkldnn"),
}


@pytest.mark.parametrize("case", UNREACHED)
def test_module_with_state_that_no_update_reaches_is_refused(commit, case):
    make, reason = UNREACHED[case]
    with pytest.raises(SchemaError, match=rf"\n  {reason}"):
        WorkerSession(make().eval(), commit=commit)


def test_extra_state_is_no_obstacle_where_what_shall_be_written_is_named(fleet):
    model = WithExtra(as_tensor=False)
    trainer = build(linear, 1)
    made = fleet(trainer)
    made.join(dict(model.named_parameters()))
    assert made.publish("v1").ok
    assert torch.equal(computed(model), computed(trainer))


def freeze_part(model):
    model[0] = torch.jit.freeze(torch.jit.script(model[0]))
    return model


OTHER_NAMES = {
    "frozen": lambda model: torch.jit.freeze(torch.jit.script(model)),
    "frozen part": freeze_part,
}


@pytest.mark.parametrize("case", OTHER_NAMES)
def test_weights_that_lost_their_names_are_refused_before_any_byte_moves(fleet, commit, case):
    made = fleet(build(layers, 1))
    model = OTHER_NAMES[case](build(layers, 2))
    before = computed(model)
    made.join(model, commit=commit)
    with pytest.raises(SchemaError, match=r"0\.weight: wanted nothing"):
        made.publish("v1")
    assert torch.equal(computed(model), before)


def test_model_that_was_converted_computes_with_what_it_casts_or_refuses(fleet, commit):
    trainer, expected = build(layers, 1), build(layers, 1).half()
    made = fleet(trainer)
    refusing = made.join(build(layers, 2), commit=commit)
    assert made.publish("v1").ok
    refusing.model.half()
    with pytest.raises(SchemaError, match="wanted float16"):
        made.publish("v2")
    made.leave(refusing)
    casting = made.join(build(layers, 2).half(), commit=commit, cast=True)
    assert made.publish("v3").ok
    with torch.no_grad():
        assert torch.equal(casting.model(X.half()), expected(X.half()))
