"""Trainers of the third-party engine that send something else than they should."""

from acme_file_engine.trainer import FileTrainer
from safetensors.torch import load_file, save_file

FUSED_AWAY = "model.layers.1.self_attn.k_proj.weight"


class Flipping(FileTrainer):
    def send_weights(self):
        self.client = _Before(self.client, self._flip)
        super().send_weights()

    def _flip(self):
        file = self.folder / "weights.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)


class Dropping(FileTrainer):
    def send_weights(self):
        self.client = _Before(self.client, self._drop)
        super().send_weights()

    def _drop(self):
        file = self.folder / "weights.safetensors"
        tensors = load_file(file)
        del tensors[FUSED_AWAY]
        save_file(dict(tensors), file)


class _Before:
    def __init__(self, client, act):
        self._client = client
        self._act = act

    def update_weights(self, update_info):
        self._act()
        self._client.update_weights(update_info)
