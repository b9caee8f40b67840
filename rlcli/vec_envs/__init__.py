"""Vectorised envs: stepped straight into rows of numpy arrays; importable without torch, which is how workers live."""
