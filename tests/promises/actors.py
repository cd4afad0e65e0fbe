"""What prompts import: weights of one value, a trainer's gate, a worker's steps."""

import threading
import time

import torch

import wtransfer

NUM_TENSORS = 8


def weights(value: float) -> dict[str, torch.Tensor]:
    """Return tensors whose every element has one value, so that a step sees a mixture."""
    return {f"layer.{n}": torch.full((32, 64), float(value)) for n in range(NUM_TENSORS)}


class Gated:
    """A source that waits in the midst of its tensors until its gate is opened."""

    def __init__(self, tensors: dict[str, torch.Tensor], at: int = NUM_TENSORS // 2) -> None:
        self.tensors, self.at = tensors, at
        self.reached, self.gate = threading.Event(), threading.Event()

    @property
    def metadata(self) -> list[wtransfer.ParamMeta]:
        return [
            wtransfer.ParamMeta(name, each.dtype, tuple(each.shape))
            for name, each in self.tensors.items()
        ]

    def iter_full(self):
        for number, pair in enumerate(self.tensors.items()):
            if number == self.at:
                self.reached.set()
                assert self.gate.wait(60)
            yield pair

    iter_local = iter_full


class Serving(threading.Thread):
    """A worker that serves: steps over its weights, and commits between two of them."""

    def __init__(self, session: wtransfer.WorkerSession, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(daemon=True)
        self.session, self.tensors = session, tensors
        self.steps, self.seen, self.torn, self.errors = 0, [], [], []
        self.start()

    def run(self) -> None:
        while True:
            found = {float(end) for each in self.tensors.values() for end in each.aminmax()}
            if len(found) > 1:
                self.torn.append(sorted(found))
            if found.isdisjoint(self.seen[-1:]):
                self.seen += found
            self.steps += 1
            try:
                self.session.commit_pending(0.01)
            except wtransfer.errors.CommitError as error:
                self.errors.append(str(error))

    def state(self) -> tuple:
        """Take two more steps; return all weights seen, all mixtures of two, and the version."""
        before = self.steps
        until(lambda: self.steps > before + 2)
        return self.seen, self.torn, self.session.version


def until(is_so, within_s: float = 30.0) -> bool:
    """Wait for an event that tells nobody."""
    end = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < end, "it has not come"
        time.sleep(0.005)
    return True


class Instance:
    """A serving instance of the kit's mini engine, whose weights a publisher brings."""

    def __init__(self, seed: int, version: str, connector: str, options: dict) -> None:
        from wtransfer.testing.mini_engine.config import EngineConfig, ModelShape
        from wtransfer.testing.mini_engine.engine import make_engine
        from wtransfer.testing.mini_engine.model import PagedTransformer
        from wtransfer.testing.mini_engine.reference import reference_output

        self._make = lambda seed: PagedTransformer(ModelShape(), seed)
        self._reference = reference_output
        self.model = self._make(seed)
        self.publisher = wtransfer.Publisher(self.model)
        config = EngineConfig(connector=connector, options=options, join=self.publisher.address)
        self.engine = make_engine(config)
        self.publisher.wait_for_workers(1)
        self.stepping = threading.Lock()
        self.commit(seed, version)

    def commit(self, seed: int, version: str) -> str:
        """Publish the weights of a seed, beside the steps of the engine; return their identity."""
        self.seed = seed
        self.model.load_state_dict(self._make(seed).state_dict())
        round_ = self.publisher.publish(version, wait=False)
        until(lambda: self.engine.step() or round_.done)
        return round_.result().raise_unless_ok().fingerprint

    def serve(self, prompt: list[int], num_new: int = 6, kv_transfer_params=None) -> dict:
        """Serve a prompt; say whether its tokens are those of these weights alone."""
        before = self.engine.counts["tokens_loaded"]
        request = self.engine.submit(prompt, num_new, kv_transfer_params)
        until(lambda: self.engine.step() or request.is_done)
        return {
            "right": request.output == self._reference(prompt, num_new, self.seed).output,
            "loaded": self.engine.counts["tokens_loaded"] - before,
            "params": request.kv_transfer_params,
        }

    def go_on(self) -> None:
        """Take steps on a thread from now on, for others that fetch what is kept here."""

        def step() -> None:
            while True:
                self.engine.step()
                time.sleep(0.005)

        threading.Thread(target=step, daemon=True).start()
