"""The bench: what moving weights costs here, each number beside its goal and its neighbours."""
