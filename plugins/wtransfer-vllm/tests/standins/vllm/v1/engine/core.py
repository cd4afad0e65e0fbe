"""The engine core, as far as calls to workers go; the same in all generations."""


class EngineCore:
    def __init__(self, vllm_config, model_executor):
        self.vllm_config = vllm_config
        self.model_executor = model_executor

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        return self.model_executor.collective_rpc(method, timeout, args, kwargs)
