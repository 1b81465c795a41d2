"""The small server around transformers, as far as it needs no model."""

from __future__ import annotations

import socket
from contextlib import ExitStack

from pdserve.bench.peer_transformers import Handler, Server


def test_a_load_that_connects_at_once_is_let_in_before_anything_is_accepted() -> None:
    with ExitStack() as stack:
        server = stack.enter_context(Server(("127.0.0.1", 0), Handler))
        for _ in range(64):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=2.0))
