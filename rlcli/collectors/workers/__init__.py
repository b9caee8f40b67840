"""Collectors in worker processes of this machine, or wherever a transport has workers.

| file | what it has |
|---|---|
| `multi`, `sync`, `asynchronous` | the parent: one batch of all workers, or one of each as it comes |
| `group` | the workers as their parent commands and replaces them |
| `rows` | where rows get to the parent: memory that is shared, or answers |
| `worker` | the collector in a worker |
| `batches` | one batch of what workers wrote |
| `each` | options, pickles and records of each worker |
| `weights` | versions of weights on their way to workers |
"""
