"""A process with a pool that a one-sided transport serves: `source_process.py TRANSPORT OPTIONS NUM_PAGES`.

Prints its address, then obeys lines: `flip N` changes a byte of page N. It ends with its standard input.
"""

from __future__ import annotations

import json
import sys

from pdserve.core.layout import KVLayout
from pdserve.kvtransfer.pool import KvPool


def main() -> None:
    from pdserve.kvtransfer import mooncake, nixl

    transport, options, num_pages = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    layout = KVLayout.uniform(num_layers=4, num_kv_heads=4, head_dim=32, page_size=16, dtype="float32")
    pool = KvPool(layout, num_pages)
    for i in range(num_pages):
        pool.page(i)[:] = bytes([(i * 7 + 1) % 251, i % 256]) * (pool.page_bytes // 2)
    source = nixl.make_source(pool, options) if transport == nixl.NAME else mooncake.make_source(pool, **options)
    sys.stdout.write(source.address + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        pool.page(int(line.split()[1]))[9] ^= 1
        sys.stdout.write("done\n")
        sys.stdout.flush()
    source.close()


main()
