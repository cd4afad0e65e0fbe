"""Commands that belong to the engines, one module each."""
