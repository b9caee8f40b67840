"""Makes `batches.py` importable from the folders below."""
