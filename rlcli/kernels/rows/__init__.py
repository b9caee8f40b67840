"""Copying rows of many columns at once, by address: `cpu` is the compiled pass, `reference` the plain one."""
