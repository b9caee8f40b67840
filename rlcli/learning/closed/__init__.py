"""Gradients of losses whose formulas and networks are known, without autograd."""
