"""Transport of bytes and messages; every room builds on it, so nothing is written twice."""
