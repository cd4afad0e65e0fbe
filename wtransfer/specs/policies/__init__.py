"""Which of the blocks that are kept give way when room is needed."""
