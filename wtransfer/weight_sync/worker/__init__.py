"""The worker side: the session, staging, commit, the model as target."""
