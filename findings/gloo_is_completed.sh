#!/usr/bin/env bash
# torch.distributed 2.13.0 over gloo: the work that `irecv` and `isend` return says `is_completed() == False` for as long
# as nobody waits for it, also when its bytes have arrived and lie in the tensor; the work of an asynchronous `all_reduce`
# tells the truth. Who polls several peers for the first that has answered polls for ever: a thread a peer that waits is
# the way out.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cat >"$folder/peers.py" <<'EOF2'
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def polled(work, seconds=3.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end and not work.is_completed():
        time.sleep(0.01)
    return work.is_completed()


def peer(rank, folder):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    x = torch.zeros(4)
    if rank == 1:
        dist.send(torch.ones(4), 0)
        dist.barrier()
        dist.recv(x, 0)
        dist.barrier()
    else:
        received = dist.irecv(x, 1)
        dist.barrier()
        said = polled(received)
        there = bool((x == 1).all())
        received.wait()
        print(f"torch {torch.__version__}, irecv: bytes there {there}, is_completed {said}, after wait {received.is_completed()}")
        assert there and not said and received.is_completed()
        sent = dist.isend(torch.ones(4), 1)
        dist.barrier()
        said = polled(sent)
        sent.wait()
        print(f"isend: received by its peer, is_completed {said}, after wait {sent.is_completed()}")
        assert not said and sent.is_completed()
    dist.barrier()
    reduced = dist.all_reduce(torch.ones(4), async_op=True)
    said = polled(reduced)
    reduced.wait()
    assert said, "all_reduce"


if __name__ == "__main__":
    mp.spawn(peer, (sys.argv[1],), nprocs=2)
EOF2
"$folder/venv/bin/python" "$folder/peers.py" "$folder"
