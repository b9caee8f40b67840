"""Policies as the loop calls them: `act(t)` reads rows t and returns the action, everything else decided beforehand.

| file | what it runs |
|---|---|
| `actor` | no policy: uniform actions of the action space |
| `rows` | a policy that is a function of rows (`modules.actor`): `addmm`, cells, modules; then a draw |
| `tensordict` | any callable on a tensordict, as it is |
| `choose` | decides between the last two |
"""
