"""Whatever order things happen in: indices without gap, one terminal event, nothing left behind."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.bench.virtual_time import run_virtual
from pdserve.core.errors import PdserveError
from pdserve.router.record import PHASES, TERMINAL_PHASE
from tests.router.world import World, failed, read_all, tokens

MAX_TOKENS = 6
ACTIONS = ("token_1", "reserve", "refuse", "decode", "fail_p", "fail_d", "die_p", "die_d", "back", "cancel", "wait")


class Script:
    """Workers that keep to the protocol, in an order that nobody chose."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.sent_first: set[int] = set()
        self.answered: set[int] = set()
        self.next_index: dict[int, int] = {}

    def act(self, action: str) -> None:
        w = self.world
        if action == "back":
            for name in ("p0", "d0"):
                if w.workers.table.live(name) is None:
                    w.connect(name)
            return
        if action in ("die_p", "die_d"):
            name = f"{action[-1]}0"
            if w.workers.table.live(name) is not None:
                w.die(name)
            return
        name = "p0" if action in ("token_1", "fail_p") else "d0"
        if w.workers.table.live(name) is None or not w.clients[name].submits:
            return
        ((_, attempt),) = w.clients[name].submits
        client = w.clients[name]
        if action == "token_1" and attempt not in self.sent_first:
            self.sent_first.add(attempt)
            client.output("r", tokens(0, 0), attempt)
        elif action in ("reserve", "refuse") and attempt not in self.answered:
            self.answered.add(attempt)
            client.reserve("r", attempt, reserved=action == "reserve", retry_after_ms=500)
        elif action == "decode" and attempt in self.answered:
            index = self.next_index.get(attempt, 1)
            if index < MAX_TOKENS:
                client.output("r", tokens(index, index, finish=index == MAX_TOKENS - 1), attempt)
                self.next_index[attempt] = index + 1
        elif action in ("fail_p", "fail_d"):
            client.output("r", failed("ENGINE_FAILED", "INTERNAL"), attempt)


@settings(max_examples=100)
@given(st.lists(st.sampled_from(ACTIONS), max_size=30), st.booleans())
def test_any_order(actions: list[str], settle: bool) -> None:
    async def main() -> None:
        w = World("p0", "d0", queue_timeout_s=5.0, no_worker_timeout_s=2.0)
        opened = await w.open(max_tokens=MAX_TOKENS, deadline_s=60.0)
        script = Script(w)
        for action in actions:
            if action == "wait":
                await w.clock.sleep(0.6)
            elif action == "cancel":
                opened.cancel("CLIENT_CANCELLED")
            else:
                script.act(action)
            if settle:
                await w.settle()
        try:
            ids, _ = await read_all(opened)  # at last the deadline ends it
            assert ids == list(range(len(ids)))
        except PdserveError as e:
            assert e.reason not in ("BROKEN_STREAM", "INTERNAL"), e.message
        await w.settle()
        assert PHASES[w.store.records["r"].state] == TERMINAL_PHASE
        w.check_clean()

    run_virtual(main())
