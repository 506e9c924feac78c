"""The resident verifier engine: one load serves any number of chunks."""
