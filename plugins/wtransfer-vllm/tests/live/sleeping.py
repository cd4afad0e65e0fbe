"""What a GPU does in sleep at level 2, for vLLM's workers on a CPU, which keep their memory."""

import torch


class Sleeping:
    def let_memory_go(self):
        """Leave in the model what was never written."""
        with torch.no_grad():
            for parameter in self.model_runner.model.parameters():
                parameter.fill_(0.125)
