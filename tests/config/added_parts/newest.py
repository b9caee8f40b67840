"""A sampler: rows of the newest part of a storage."""

import rlcli
from rlcli.data.samplers.sampler import Draw, Sampler, live_rows


@rlcli.register_sampler("newest")
class Newest(Sampler):
    def __init__(self, seed, share=1.0):
        super().__init__(seed)
        self.share = share

    def sample(self, ring, batch_size):
        rows = live_rows(ring)
        rows = rows[-max(1, round(self.share * len(rows))) :]
        return Draw(rows[self.random.integers(len(rows), batch_size)])
