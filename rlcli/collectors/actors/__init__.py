"""Policies as the loop calls them: `act(t)` reads rows t and returns the action, everything else decided beforehand.

| file | what it runs |
|---|---|
| `actor` | nothing: what each reads and writes, and what is refused of it |
| `rows` | no policy, or one that is a function of rows (`modules.actor`): `addmm`, cells, modules; then a draw |
| `tensordict` | any callable on a tensordict, as it is |
| `which_actor` | decides between the last two |
"""
