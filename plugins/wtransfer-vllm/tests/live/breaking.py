"""What a test adds to vLLM's workers (``worker_extension_cls``)."""

import builtins
import contextlib
import time
import types

import faults
import torch


class Breaking:
    def break_loader(self, at, rank=0, error="RuntimeError"):
        """Let the model's loader raise, once, before its tensor number `at`."""
        if self.rank != rank:
            return
        model = self.model_runner.model
        whole = model.load_weights

        def load_weights(model, weights):
            if vars(model).pop("load_weights", None) is None:
                return whole(weights)
            return whole(_until(weights, at, getattr(builtins, error)))

        model.load_weights = types.MethodType(load_weights, model)

    def break_reload(self, name):
        """Let vLLM's reload have a fault of `faults.FAULTS`, and its proof be made anew."""
        self.mend_reload()
        self.faults = contextlib.ExitStack()
        self.faults.enter_context(faults.standing_in(faults.FAULTS[name]()))

    def mend_reload(self):
        """Take the fault out again, and have the proof made anew."""
        vars(self).pop("faults", contextlib.ExitStack()).close()
        target = self.weight_transfer_engine.member._target
        target.proven, target._refusal = False, None

    def make_pipeline_buffers(self):
        """Make what a stage of a pipeline receives into.

        Without graphs vLLM's CPU worker runs no dummy batch, which makes them elsewhere.
        """
        runner = self.model_runner
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens,
            dtype=runner.model_config.dtype,
            device=runner.device,
        )

    def let_memory_go(self):
        """Leave in the model what was never written, as sleep at level 2 does on a GPU."""
        with torch.no_grad():
            for parameter in self.model_runner.model.parameters():
                parameter.fill_(0.125)
            for layer in self.model_runner.model.modules():
                for name in ("lora_a_stacked", "lora_b_stacked"):  # of adapters
                    for tensor in getattr(layer, name, ()):
                        tensor.fill_(0.125)

    def pace(self, step_s):
        """Let every step take so long at least, from here on; 0: as fast as it can."""
        runner = self.model_runner
        vars(runner).pop("execute_model", None)
        if not step_s:
            return
        execute_model = runner.execute_model

        def execute_slowly(*args, **options):
            time.sleep(step_s)
            return execute_model(*args, **options)

        runner.execute_model = execute_slowly


def _until(weights, at, error):
    for index, (name, tensor) in enumerate(weights):
        if index == at:
            raise error(f"broken at {name}")
        yield name, tensor
