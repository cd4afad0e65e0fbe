"""The rows of the bench: one class for each number of the design that concerns weights."""
