"""Stand-in of a vLLM server, as far as TRL generates by it, over a plain worker of wtransfer."""

import secrets
from contextlib import ExitStack, closing, contextmanager
from types import SimpleNamespace

import torch
import wtransfer
from accelerate import Accelerator
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from wtransfer.testing.fleet import committing


def weights(value):
    return {"weight": torch.full((4, 3), float(value)), "bias": torch.full((4,), float(value))}


class Policy(torch.nn.Linear):
    """A policy all of whose weights are one number."""

    def __init__(self, value):
        super().__init__(3, 4)
        self.load_state_dict(weights(value))


class Server:
    """Generates one token for each prompt, the number that its weights are; 0 when it has started.

    Args:
        listen: Address of its worker.
    """

    def __init__(self, listen=None):
        self.listen = listen or f"unix:@{secrets.token_hex(8)}"
        self.before = self.after = iter(())
        """Called one by one, before and after an answer."""
        self.tag = None
        """Name of the weights in spans; None: that of the weights."""
        self.answers = []
        self.start()

    def start(self, *, commits=True, **more):
        self.weights = weights(0) | more
        self._running = ExitStack()
        self.session = self._running.enter_context(closing(wtransfer.WorkerSession(self.weights)))
        self._running.enter_context(wtransfer.WorkerServer(self.session, listen=self.listen))
        self._commits = False
        if commits:
            self._commit()

    def _commit(self):
        if not self._commits:
            self._commits = True
            self._running.enter_context(committing(self.session))

    def close(self):
        self._running.close()

    def restart(self, **more):
        self.close()
        self.start(**more)

    def restart_in_request(self, **more):
        """Restart; the answer comes before any update."""
        self.restart(commits=False, **more)

    def post(self, url, json):
        """Answer as vLLM's routes, by ``requests.Session.post``."""
        next(self.before, lambda: None)()
        token = int(self.weights["weight"][0, 0])
        choice = {"token_ids": [token], "prompt_token_ids": [0], "logprobs": None}
        if url.endswith("/inference/v1/generate"):
            tag = self.tag or f"{self.session.version}@{self.session.fingerprint}"
            choice["weight_versions"] = [{"start": 0, "end": 1, "version": tag}]
        self.answers.append(token)
        self._commit()
        next(self.after, lambda: None)()
        answer = {"choices": [choice for _ in json.get("prompt", [None])]}
        return SimpleNamespace(status_code=200, json=lambda: answer)


class Client(VLLMClient):
    """TRL's client, of a server that has no further route."""

    def __init__(self, base_url, **_):
        self.base_url = base_url
        self.model = "policy"
        self.communicator = None

    def get_server_info(self):
        return {"weight_transfer_config": {"backend": "shm"}}

    def image_features(self, images):
        return [None for _ in images]


@contextmanager
def generation_by(server, model):
    """TRL's generation by a server, on each rank of the trainer; only the first has the server."""
    vllm_generation.VLLMClient = lambda base_url, **more: Client(server.listen, **more)
    generation = VLLMGeneration(
        model, Accelerator(cpu=True), None, mode="server", server_base_url=server and server.listen
    )
    if server is None:
        yield generation
        return
    generation.vllm_client.session = server
    with closing(generation.vllm_client.communicator):
        yield generation


def generate(generation, images=None):
    """Return the token of one prompt; with images by the route that has spans."""
    _, ((token,),), _, _ = generation.generate([[0]], images, num_generations=1)
    return token
