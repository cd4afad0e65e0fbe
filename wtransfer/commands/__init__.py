"""Commands of the CLI, one module each."""
