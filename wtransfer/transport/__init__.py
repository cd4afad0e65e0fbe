"""How bytes and messages travel; every room builds on it, nobody writes it twice."""
