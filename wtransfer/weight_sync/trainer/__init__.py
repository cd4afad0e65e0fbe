"""The trainer side: the publisher, its rounds, the source of the weights."""
