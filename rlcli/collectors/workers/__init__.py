"""Collectors in worker processes.

| file | what it has |
|---|---|
| `multi`, `sync`, `asynchronous` | the parent: one batch of all workers, or one of each as it comes |
| `group` | the worker processes as their parent commands and replaces them |
| `worker` | the collector in a worker process |
| `batches` | the memory that they share, and one batch of what they wrote |
| `each` | options, pickles and records of each worker |
| `weights` | versions of weights on their way to workers |
"""
