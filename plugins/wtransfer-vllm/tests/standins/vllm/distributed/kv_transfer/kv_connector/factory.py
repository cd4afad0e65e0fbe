"""A stand-in for vLLM's factory of connectors, which has some of its own."""


class KVConnectorFactory:
    _registry = {}  # noqa: RUF012

    @classmethod
    def register_connector(cls, name, module_path, class_name):
        if name in cls._registry:
            raise ValueError(f"Connector '{name}' is already registered.")
        cls._registry[name] = module_path, class_name


for each in ("OffloadingConnector", "MultiConnector", "NixlConnector"):
    KVConnectorFactory.register_connector(each, "vllms", each)
