"""KV cache to cheaper tiers: host memory, disks, remote stores."""
