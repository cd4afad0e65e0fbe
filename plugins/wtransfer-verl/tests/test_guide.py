"""The command of the guide, as verl's own configuration takes it."""

import re
from pathlib import Path

import verl
from hydra import compose, initialize_config_dir
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.import_utils import load_class_from_fqn

import wtransfer_verl

GUIDE = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
CONFIG = Path(verl.__file__).parent / "experimental" / "one_step_off_policy" / "config"


def test_overrides_of_the_guide_choose_the_engine_and_the_manager():
    overrides = re.findall(r"\+?actor_rollout_ref\.rollout\.[\w.]+=[\w.]+", GUIDE)
    assert len(overrides) == 5
    with initialize_config_dir(str(CONFIG), version_base=None):
        config = compose(
            "one_step_off_ppo_trainer",
            # Their place is found by the current folder otherwise.
            [*overrides, "hydra.searchpath=[pkg://verl.trainer.config]"],
        )
    rollout = config.actor_rollout_ref.rollout
    engine = omega_conf_to_dataclass(rollout.checkpoint_engine)
    assert (engine.backend, engine.custom_backend_module) == ("wtransfer", "wtransfer_verl")
    assert engine.engine_kwargs == {"wtransfer": {"engine": "gloo"}}
    assert rollout.free_cache_engine is False
    manager_class = load_class_from_fqn(rollout.checkpoint_manager_class)
    assert manager_class is wtransfer_verl.CheckpointManager
