"""The demo: a trainer and two workers, real training, real text, and one worker killed."""
