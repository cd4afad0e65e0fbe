"""Weight transfer."""
