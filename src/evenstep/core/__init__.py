"""The lowest layer in Python: errors, configuration, the environment, fingerprints."""
