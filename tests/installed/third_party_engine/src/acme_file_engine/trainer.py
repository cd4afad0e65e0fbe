"""Trainer side, in the style of vLLM's."""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from safetensors.torch import save_file

from wtransfer import TrainerInitInfo, TrainerWeightTransferEngine


@dataclass
class FileTrainerInitInfo(TrainerInitInfo):
    backend: ClassVar[str] = "acme-file"
    folder: str = ""


class FileTrainer(TrainerWeightTransferEngine[FileTrainerInitInfo]):
    init_info_cls = FileTrainerInitInfo

    def __init__(self, init_info, *, client, source=None):
        super().__init__(init_info, client=client, source=source)
        self.folder = Path(tempfile.mkdtemp(prefix="acme-", dir=init_info.folder or None))

    def worker_init_info(self):
        return {"folder": str(self.folder)}

    def send_weights(self):
        tensors = {name: tensor.contiguous() for name, tensor in self.source.iter_full()}
        save_file(tensors, self.folder / "weights.safetensors")
        self.client.update_weights({"file": "weights.safetensors"})

    def shutdown(self):
        shutil.rmtree(self.folder, ignore_errors=True)
