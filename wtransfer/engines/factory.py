"""Make engines by name: the worker's side and the trainer's. Thin faces over the registry.

Source: names, signatures and texts are those of vLLM's factories.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from wtransfer.errors import PluginTypeError, RegistrationError
from wtransfer.registry.resolve import registry

if TYPE_CHECKING:
    from wtransfer.config import HasBackend, ParallelConfig
    from wtransfer.engines.interface import (
        RoundSource,
        TrainerInitInfo,
        TrainerWeightTransferEngine,
        WeightSyncClient,
        WeightTransferEngine,
    )

logger = logging.getLogger(__name__)


class WeightTransferEngineFactory:
    """Worker engines by name."""

    @classmethod
    def register_engine(
        cls,
        name: str,
        module_path_or_cls: str | type[WeightTransferEngine[Any, Any]],
        class_name: str | None = None,
    ) -> None:
        """Register an engine at run time: a class, or a module that is imported on first use.

        Args:
            name: Name of the backend, compared exactly as written.
            module_path_or_cls: The class, or the path of its module.
            class_name: Name of the class; required with a module path.

        Raises:
            AlreadyRegisteredError: The name is registered or a built-in's; a `ValueError`.
            RegistrationError: A module path without a class name; a `ValueError`.
        """
        registry("engines").register(name, module_path_or_cls, class_name)

    @classmethod
    def create_engine(
        cls, config: HasBackend, parallel_config: ParallelConfig
    ) -> WeightTransferEngine[Any, Any]:
        """Make the engine that ``config.backend`` names.

        The engine's hooks, if it has any, are called until its ``shutdown``.

        Raises:
            UnknownBackendError: No backend has this name; a `ValueError`. For the other reasons
                why it cannot be loaded see `wtransfer.registry.resolve.Registry.get`.
        """
        engine_cls = registry("engines").get(config.backend)
        logger.info("Creating weight transfer engine: %s", engine_cls.__name__)
        engine: WeightTransferEngine[Any, Any] = engine_cls(config, parallel_config)
        listen(engine)
        return engine


class WeightTransferTrainerFactory:
    """Trainer engines by name: those registered here, else the twins that worker engines name."""

    @classmethod
    def register_engine(
        cls,
        name: str,
        module_path_or_cls: str | type[TrainerWeightTransferEngine[Any]],
        class_name: str | None = None,
    ) -> None:
        """Register a trainer engine at run time; arguments and errors as for worker engines."""
        registry("trainers").register(name, module_path_or_cls, class_name)

    @classmethod
    def trainer_class(cls, name: str) -> type[TrainerWeightTransferEngine[Any]]:
        """Return the trainer's class of a backend, loaded and checked as plug-ins are.

        Raises:
            PluginTypeError: The worker engine names no trainer, or not one that can
                ``trainer_init`` and ``send_weights``.
            PluginError: Worker or trainer engine cannot be found or loaded.
        """
        trainers = registry("trainers")
        if trainers.registered(name):
            return trainers.get(name)
        return _twin(name, registry("engines").get(name))

    @classmethod
    def trainer_init(
        cls,
        init_info: TrainerInitInfo,
        *,
        client: WeightSyncClient,
        source: RoundSource | None = None,
    ) -> TrainerWeightTransferEngine[Any]:
        """Make the trainer engine that the class of `init_info` names as its ``backend``.

        Args:
            init_info: Options; ``backend`` is an attribute of its class.
            client: Client of the workers.
            source: The weights.

        Raises:
            RegistrationError: The class of `init_info` names no backend.
            PluginError: As for `trainer_class`.
        """
        name = getattr(type(init_info), "backend", None)
        if not name or not isinstance(name, str):
            raise RegistrationError(
                f"{type(init_info).__name__} names no backend; set the class attribute "
                f"backend = '<engine name>', one of {registry('engines').names()}"
            )
        trainer_cls = cls.trainer_class(name)
        logger.info("Creating weight transfer trainer engine: %s", trainer_cls.__name__)
        trainer = trainer_cls.trainer_init(init_info, client=client, source=source)
        listen(trainer)
        return trainer


def _twin(name: str, worker_cls: type) -> type[TrainerWeightTransferEngine[Any]]:
    twin: Any = getattr(worker_cls, "trainer_cls", None)
    worker = registry("engines").record(name)
    if twin is None:
        raise worker.error(
            PluginTypeError,
            f"has no trainer side: set trainer_cls in {worker_cls.__qualname__} to a class or "
            "'package.module:Class', or register one with "
            "WeightTransferTrainerFactory.register_engine.",
        )
    trainers = registry("trainers")
    by_path = isinstance(twin, str)
    # The worker's distribution answers for its twin: errors name it.
    record = dataclasses.replace(
        worker,
        kind=trainers.kind,
        value=twin if by_path else f"{worker.value} trainer_cls",
        target=None if by_path else twin,
    )
    return trainers.load(record)


def listen(engine: Any) -> None:
    """Register an engine's hooks, if it has any, until its ``shutdown``."""
    from wtransfer.registry import hooks

    hooks.board.attach(engine)
