"""An offloading spec whose loads end only once a file has gone: a load that is held open."""

from pathlib import Path

from wtransfer.specs.cpu import CPUOffloadingOptions, CPUOffloadingSpec


class HeldOptions(CPUOffloadingOptions, frozen=True, kw_only=True):
    gate: str
    spoils: bool = False
    """Whether a load that was held writes other bytes just before it ends."""


class HeldSpec(CPUOffloadingSpec):
    options_cls = HeldOptions

    def get_worker(self, kv_caches):
        worker = super().get_worker(kv_caches)
        gate = Path(self.options.gate)
        loads, held = {}, []
        submit_load, get_finished = worker.submit_load, worker.get_finished

        def submit(job_id, source, target):
            loads[job_id] = target.block_ids
            return submit_load(job_id, source, target)

        def finished():
            for each in held if self.options.spoils and not gate.exists() else ():
                for tensor in kv_caches.tensors:
                    tensor.tensor[loads[each.job_id]] = 0x3F
            results = [*held, *get_finished()]
            held.clear()
            if gate.exists():
                held.extend(each for each in results if each.job_id in loads)
                return [each for each in results if each.job_id not in loads]
            return results

        worker.submit_load, worker.get_finished = submit, finished
        return worker
