"""Engine ``nccl`` of wtransfer: weights from GPU to GPU."""
