"""Syncs by verl's manager, between Ray actors; writes what came of each to a file.

python ray_session.py FOLDER RESULT PLAN    FOLDER: Ray's, short, for sockets lie in it

PLAN is JSON: ``syncs``, the fault of each sync (null, or name of one in `Session`), and
``engine_kwargs``. Run it in a network namespace of its own: Ray's processes listen on every
interface that there is.
"""

import json
import os
import socket
import sys
import threading
from pathlib import Path

import ray
import torch
from ray_apart import LOOPBACK, started
from stand_ins import FailingAdapter, HeldAdapter, Replica, TrainerWorker, weights_of
from verl.checkpoint_engine import CheckpointEngineWorker
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.import_utils import load_class_from_fqn
from verl.workers.config import CheckpointEngineConfig, RolloutConfig

NUM_TRAINERS, NUM_ROLLOUTS = 2, 3


def group(size, actor_class, *args):
    """Return a group of verl's workers, on CPUs."""
    with socket.socket() as line:
        line.bind((LOOPBACK, 0))
        port = line.getsockname()[1]
    return RayWorkerGroup(
        resource_pool=RayResourcePool([size], use_gpu=False, max_colocate_count=1),
        ray_cls_with_init=RayClassWithInitArgs(ray.remote(actor_class), *args),
        use_gpu=False,
        device_name="cpu",
        master_addr=LOOPBACK,
        master_port=str(port),
    )


def call(actor, function, *args):
    return ray.get(actor.__ray_call__.remote(function, *args), timeout=60)


def held_step(worker, num_steps):
    """Return the step whose whole set a rollout's model is; 0: it has none yet; None: a mixture."""
    model = worker.server_adapter.model
    for step in range(1, num_steps + 1):
        wanted = dict(weights_of(step))
        if model.keys() == wanted.keys() and all(torch.equal(model[n], wanted[n]) for n in model):
            return step
    return None if model else 0


class Session:
    def __init__(self, syncs, engine_kwargs):
        self.num_steps = len(syncs)
        self.config = CheckpointEngineConfig(
            backend="wtransfer",
            custom_backend_module="wtransfer_verl",
            update_weights_bucket_megabytes=1,
            engine_kwargs={"wtransfer": engine_kwargs},
        )
        self.trainers = group(NUM_TRAINERS, TrainerWorker, self.config)
        self.num_replicas = 0
        # As verl's trainers make it.
        manager_class = load_class_from_fqn("wtransfer_verl.CheckpointManager")
        replicas = [self.replica() for _ in range(NUM_ROLLOUTS)]
        self.manager = manager_class(self.config, self.trainers, replicas)

    def replica(self):
        """Return a replica, whose rollout is verl's own worker."""
        rollout = RolloutConfig(
            name="vllm", tensor_model_parallel_size=1, checkpoint_engine=self.config
        )
        workers = group(1, CheckpointEngineWorker, rollout, None, HeldAdapter()).workers
        self.num_replicas += 1
        return Replica(self.num_replicas, workers)

    def sync(self, step, fault):
        """Sync, and return what came of it."""
        dead = None
        if fault == "trainer fails":
            self.set_trainers("fails", value=True)
        elif fault == "rollout is killed":
            dead = self.manager.replicas[step % NUM_ROLLOUTS]
            self.set_trainers("kills", call(dead.workers[0], lambda _: os.getpid()))
        elif fault == "rollout is killed before":
            dead = self.manager.replicas[step % NUM_ROLLOUTS]
            ray.kill(dead.workers[0])
        elif fault == "serving engine fails":
            broken = self.manager.replicas[0].workers[0]
            call(broken, setattr, "server_adapter", FailingAdapter())
            call(self.manager.replicas[1].workers[0], load_slowly)
        elif fault == "rollout joins late":
            self.manager.add_replicas([self.replica()])
        said = {"step": step, "fault": fault, "metrics": None, "error": None}
        try:
            said["metrics"] = self.manager.update_weights(step)
        except Exception as error:
            said["error"] = str(error)
        self.set_trainers("fails", value=False)
        self.set_trainers("kills", value=None)
        replicas = [each for each in self.manager.replicas if each is not dead]
        said |= {
            "generates": [each.generates and each.has_cache for each in replicas],
            "holds": [call(each.workers[0], held_step, self.num_steps) for each in replicas],
            "num_ordered": [call(each.workers[0], num_ordered) for each in replicas],
            "in_sync": self.in_sync(replicas),
            "num_gathered": [call(each, num_gathered) for each in self.trainers.workers],
        }
        if fault == "serving engine fails":
            call(broken, setattr, "server_adapter", HeldAdapter())
        if dead is not None:
            self.manager.remove_replicas([dead])
            self.manager.add_replicas([self.replica()])
        return said

    def in_sync(self, replicas):
        """Return the threads of the sync that trainer ranks and rollouts have still."""
        workers = [*self.trainers.workers, *(each.workers[0] for each in replicas)]
        return [name for each in workers for name in call(each, threads)]

    def set_trainers(self, name, value):
        for each in self.trainers.workers:
            call(each, setattr, name, value)

    def imported(self):
        """Return the rooms of wtransfer that trainer ranks and rollouts have imported."""
        rollouts = [each.workers[0] for each in self.manager.replicas]
        found = [call(each, rooms) for each in (*self.trainers.workers, *rollouts)]
        return sorted(set().union(*found))


def rooms(_):
    return {name.split(".")[1] for name in sys.modules if name.startswith("wtransfer.")}


def load_slowly(worker):
    worker.server_adapter.waits_s = 3


def threads(_):
    return [each.name for each in threading.enumerate() if each.name.startswith("wtransfer")]


def num_ordered(worker):
    return worker.server_adapter.num_ordered


def num_gathered(worker):
    return worker.num_gathered


def main(folder, result, plan):
    plan = json.loads(plan)
    with started(folder, num_cpus=64):
        session = Session(**plan)
        said = [session.sync(step, fault) for step, fault in enumerate(plan["syncs"], start=1)]
        imported = session.imported()
    Path(result).write_text(json.dumps({"syncs": said, "imported": imported}), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
