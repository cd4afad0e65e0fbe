"""A stand-in for vLLM's MultiConnector."""


class MultiConnector:
    def __init__(self, vllm_config, role, kv_cache_config):
        self.made_with = vllm_config, role, kv_cache_config
