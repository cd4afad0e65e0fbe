"""Worker side: the seed's contract, and one line more."""

from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from wtransfer import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    folder: str


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    file: str


class FileEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo
    trainer_cls = "acme_file_engine.trainer:FileTrainer"

    def init_transfer_engine(self, init_info):
        self.folder = Path(init_info.folder)

    def receive_weights(self, update_info, load_weights):
        with safe_open(self.folder / update_info.file, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118 - no mapping
                load_weights([(name, reader.get_tensor(name))])

    def shutdown(self):
        self.folder = None
