"""Updates that no publisher of ours has planned or digested."""
