"""The engine `shm`, which damages the tensor that the file ``spoil`` of the witness names."""

import json

from sglang_witness import FOLDER, is_at_fault
from wtransfer.engines.shm import ShmTrainerEngine, ShmWeightTransferEngine
from wtransfer.testing.faults import Fault, Faults

faults = Faults()


class SpoiltShm(faults.wrap(ShmWeightTransferEngine, ShmTrainerEngine)):
    def start_weight_update(self):
        faults.disarm()
        file = FOLDER / "spoil"
        if file.exists() and is_at_fault():
            faults.arm(Fault(**json.loads(file.read_text())))
        super().start_weight_update()
