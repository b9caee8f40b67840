"""Small keys of a row packed into a record of few bytes, and unpacked: `cpu` is the compiled pass."""
