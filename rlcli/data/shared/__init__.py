"""Buffers that another process writes: batches pass through memory that both share, and this process keeps and samples.

```
writer process          files of a scratch folder            owner process
checks, copies    ->    rows-*.bin  layout.json        ->    buffer: storage, index, sampler, transforms
                        published: how many rows
```
Published batches never change: a writer appends, then stores one word. So nobody waits for anybody, no lock is shared,
and a writer that is killed at any instruction leaves what it published.
"""

from typing import TYPE_CHECKING

from rlcli.exports import lazily

if TYPE_CHECKING:
    from rlcli.data.shared.inbox import Inbox as Inbox
    from rlcli.data.shared.region import RegionWriter as RegionWriter

__getattr__, __dir__, __all__ = lazily(__name__)
