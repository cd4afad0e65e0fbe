"""What a test adds to vLLM's workers (``worker_extension_cls``)."""

import builtins
import types


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


def _until(weights, at, error):
    for index, (name, tensor) in enumerate(weights):
        if index == at:
            raise error(f"broken at {name}")
        yield name, tensor
