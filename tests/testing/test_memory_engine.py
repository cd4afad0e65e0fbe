from wtransfer.testing.engine import EngineConformance
from wtransfer.testing.memory import MemoryEngine


class TestMemory(EngineConformance):
    engine_cls = MemoryEngine
