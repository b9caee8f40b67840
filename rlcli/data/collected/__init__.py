"""Batches on disk: a folder of checksummed safetensors segments, one a batch, and a journal that names them.

```
journal.jsonl          header: format, version, metadata | one record per segment | closed: segments, frames
                       | cut: lanes whose open episode ends with the segment before
00000000.safetensors   "observation", "next/reward", ...; exact next obs: "@ends", "@extra/observation"
00000001.safetensors   ...
state-00000002.safetensors   what the writer's owner needs to go on after 2 segments; named by their last record
```
A segment is written and synced first, then its name, then its record: what the journal names is there whole.
Memory does not grow with the number of segments, on either side. Keys are joined by "/", parts
percent-encoded. No pickle.
"""

from typing import TYPE_CHECKING

from rlcli.exports import lazily

if TYPE_CHECKING:
    from rlcli.data.collected.reader import SegmentReader as SegmentReader
    from rlcli.data.collected.reader import open_segments as open_segments
    from rlcli.data.collected.reader import verify_segments as verify_segments
    from rlcli.data.collected.writer import SegmentWriter as SegmentWriter

__getattr__, __dir__, __all__ = lazily(__name__)
