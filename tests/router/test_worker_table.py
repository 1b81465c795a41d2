"""Which workers serve together, and what the router counts of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.layout import CONVERSIONS, DTYPE, PAGE_SIZE, KVLayout
from pdserve.core.request import Role
from pdserve.router.worker_table import (
    Limits,
    Listed,
    WorkerFacts,
    WorkerLoad,
    WorkerTable,
    can_pair,
    incompatibilities,
)

MODEL = "m"
SIZES = frozenset({PAGE_SIZE})


def layout(page_size: int = 16, dtype: str = "float32") -> KVLayout:
    return KVLayout.uniform(num_layers=2, num_kv_heads=1, head_dim=4, page_size=page_size, dtype=dtype)


def facts(
    worker_id: str,
    role: Role,
    *,
    digest: bytes = b"a" * 32,
    page_size: int = 16,
    dtype: str = "float32",
    converts: frozenset[str] = frozenset(),
    model: str = MODEL,
    max_model_len: int = 128,
    num_pages: int = 64,
    transports: tuple[str, ...] = (),
    host_id: str = "host:1",
    staging: int = 0,
) -> WorkerFacts:
    return WorkerFacts(
        worker_id=worker_id,
        role=role,
        incarnation="1",
        address=f"{worker_id}:1",
        model=model,
        identity_digest=digest,
        layout=layout(page_size, dtype),
        max_model_len=max_model_len,
        vocab_size=100,
        num_pages=num_pages,
        max_num_seqs=8,
        kv_converts=converts,
        transports=transports,
        host_id=host_id,
        kv_staging_bytes=staging,
    )


def table(*workers: WorkerFacts) -> WorkerTable:
    t = WorkerTable(MODEL)
    for w in workers:
        t.connected(w)
    return t


def state(t: WorkerTable, worker_id: str) -> str:
    return next(r.state for r in t.rows() if r.worker_id == worker_id)


def test_serving_pool_wins_over_bigger_one_that_cannot_serve() -> None:
    odd = b"0" * 32
    t = table(
        facts("p0", Role.PREFILL),
        facts("d0", Role.DECODE),
        facts("d1", Role.DECODE, digest=odd),
        facts("d2", Role.DECODE, digest=odd),
        facts("d3", Role.DECODE, digest=odd),
    )
    assert state(t, "p0") == state(t, "d0") == "ready"
    assert state(t, "d1").startswith("incompatible: identity digest")
    assert [w.facts.worker_id for w in t.pool().decode] == ["d0"]


def test_majority_and_then_the_smaller_digest_win() -> None:
    mixed = [facts(f"m{i}", Role.MIXED, digest=bytes([d]) * 32) for i, d in enumerate([2, 2, 1])]
    assert set(incompatibilities(MODEL, mixed)) == {"m2"}
    assert set(incompatibilities(MODEL, mixed[1:])) == {"m1"}


def test_other_model_is_named() -> None:
    t = table(facts("p0", Role.PREFILL), facts("d0", Role.DECODE), facts("d1", Role.DECODE, model="other"))
    assert "serves model 'other'" in state(t, "d1")


def test_layout_that_fits_no_peer_is_named_and_never_paired() -> None:
    t = table(facts("p0", Role.PREFILL), facts("d0", Role.DECODE), facts("d1", Role.DECODE, page_size=32))
    assert "page_size differs" in state(t, "d1")
    assert state(t, "p0") == state(t, "d0") == "ready"
    assert not can_pair(facts("p0", Role.PREFILL), facts("d1", Role.DECODE, page_size=32))


def test_page_sizes_differ_where_both_say_that_decode_converts() -> None:
    p, d = facts("p0", Role.PREFILL, converts=CONVERSIONS), facts("d0", Role.DECODE, page_size=32, converts=SIZES)
    assert can_pair(p, d)
    t = table(p, d)
    assert state(t, "p0") == state(t, "d0") == "ready"
    before = facts("p0", Role.PREFILL)  # a prefill worker of the version before would refuse it
    assert not can_pair(before, d)
    assert "page_size differs: 16 here, 32 there" in state(table(before, d), "p0")


def test_workers_without_a_common_data_plane_are_named_and_never_paired() -> None:
    p = facts("prefill-0", Role.PREFILL, transports=("tcp",))
    shm = facts("d0", Role.DECODE, transports=("shm",))
    t = table(p, shm)
    assert state(t, "d0") == (
        "incompatible: no common data plane: this worker has shm, prefill-0 has tcp (--kv-transfer-config)"
    )
    assert not can_pair(p, shm)
    assert t.pool().decode == () and "no common data plane" in t.missing()
    t.connected(facts("d1", Role.DECODE, transports=("shm", "tcp")))
    assert state(t, "prefill-0") == state(t, "d1") == "ready"
    assert [w.facts.worker_id for w in t.pool().decode] == ["d1"]


def test_pages_of_another_layout_must_fit_into_the_decode_workers_staging() -> None:
    p, page_bytes = facts("p0", Role.PREFILL, page_size=32, converts=SIZES), layout(32).page_bytes
    small, enough = (facts("d0", Role.DECODE, converts=SIZES, staging=n) for n in (page_bytes - 1, page_bytes))
    assert can_pair(p, enough) and can_pair(facts("p1", Role.PREFILL, converts=SIZES), small)  # no conversion
    assert not can_pair(p, small)
    assert f"{page_bytes} bytes does not fit into {page_bytes - 1} (--kv-staging-bytes of d0)" in state(
        table(p, small), "d0"
    )


def test_a_plane_within_the_host_is_none_between_two() -> None:
    p = facts("p0", Role.PREFILL, transports=("shm",))
    near, far, nowhere = (facts("d0", Role.DECODE, transports=("shm",), host_id=h) for h in ("host:1", "host:2", ""))
    assert can_pair(p, near) and not can_pair(p, far) and not can_pair(p, nowhere)
    assert "only within one host" in state(table(p, far), "d0")


def test_a_worker_of_the_version_before_names_no_planes_and_may_pair() -> None:
    before, p = facts("d0", Role.DECODE), facts("p0", Role.PREFILL, transports=("tcp",))
    assert can_pair(p, before) and can_pair(facts("p1", Role.PREFILL), facts("d1", Role.DECODE, transports=("shm",)))
    t = table(p, before)
    assert state(t, "p0") == state(t, "d0") == "ready"


def test_a_dtype_wins_and_only_decode_workers_that_convert_may_have_another() -> None:
    workers = [
        facts("p0", Role.PREFILL, converts=CONVERSIONS),
        facts("d0", Role.DECODE, dtype="bfloat16", converts=SIZES),
        facts("d1", Role.DECODE, dtype="bfloat16", converts=CONVERSIONS),
        facts("m0", Role.MIXED, dtype="bfloat16", converts=CONVERSIONS),
        facts("m1", Role.MIXED),
        facts("m2", Role.MIXED),
    ]
    t = table(*workers)
    assert [state(t, w) for w in ("p0", "d1", "m1")] == ["ready"] * 3
    for name in ("d0", "m0"):
        assert "dtype is bfloat16, the pool's is float32" in state(t, name) and "--kv-convert-dtype" in state(t, name)
    assert can_pair(workers[0], workers[2]) and not can_pair(workers[0], workers[1])
    for name in ("p0", "m1", "m2"):
        t.disconnected(name)
    assert [state(t, w) for w in ("d0", "d1", "m0")] == ["ready"] * 3, "now all are of one dtype"


def test_registry_never_removes_a_live_worker() -> None:
    t = table(facts("p0", Role.PREFILL))
    t.set_listed([])
    assert state(t, "p0") == "ready"
    t.disconnected("p0")
    assert t.rows() == []
    t.set_listed([Listed(worker_id="p0", role=Role.PREFILL, incarnation="2", address="x:1")])
    assert state(t, "p0") == "connecting"
    t.disconnected("p0", "TLS_FAILED: no")
    assert state(t, "p0") == "connecting: TLS_FAILED: no"
    t.set_listed([Listed(worker_id="p0", role=Role.PREFILL, incarnation="2", address="x:1")])
    assert state(t, "p0") == "connecting: TLS_FAILED: no"
    t.set_listed([Listed(worker_id="p0", role=Role.PREFILL, incarnation="3", address="x:1")])
    assert state(t, "p0") == "connecting", "another process: nothing is known of it"
    t.disconnected("p0", "TLS_FAILED: no")
    t.connected(facts("p0", Role.PREFILL))
    t.disconnected("p0")
    assert state(t, "p0") == "connecting"


def test_draining_worker_takes_nothing_new() -> None:
    t = table(facts("p0", Role.PREFILL), facts("d0", Role.DECODE))
    assert t.set_draining("p0", True)
    assert not t.set_draining("p0", True)
    assert state(t, "p0") == "draining"
    assert t.pool().prefill == ()
    assert "no prefill worker is ready" in t.missing()
    assert "p0 is draining" in t.missing()


def test_limits_are_what_every_compatible_worker_accepts() -> None:
    t = WorkerTable(MODEL)
    assert t.limits() is None
    t.connected(facts("p0", Role.PREFILL, max_model_len=128))
    t.connected(facts("d0", Role.DECODE, max_model_len=64))
    t.connected(facts("d1", Role.DECODE, max_model_len=8, model="other"))
    assert t.limits() == Limits(64, 100)


def test_own_counts_stand_in_for_an_old_report() -> None:
    t = table(facts("p0", Role.PREFILL))
    t.placed("p0", "r/1", 50)
    t.placed("p0", "s/1", 30)
    worker = t.live("p0")
    assert worker is not None
    assert (worker.pending_prefill_tokens, worker.num_sequences) == (80, 2)
    t.loaded("p0", WorkerLoad(num_running=5, num_pending_prefill_tokens=200))
    assert (worker.pending_prefill_tokens, worker.num_sequences) == (200, 5)
    t.loaded("p0", WorkerLoad())
    t.computed("p0", "r/1")
    t.released("p0", "s/1")
    t.released("p0", "never-placed")
    assert (worker.pending_prefill_tokens, worker.num_sequences) == (0, 1)


worker = st.builds(
    facts,
    st.sampled_from([f"w{i}" for i in range(8)]),
    st.sampled_from(list(Role)),
    digest=st.sampled_from([b"a" * 32, b"b" * 32]),
    page_size=st.sampled_from([16, 32]),
    dtype=st.sampled_from(["float32", "float32", "bfloat16"]),
    converts=st.sampled_from([frozenset[str](), SIZES, CONVERSIONS]),
    model=st.sampled_from([MODEL, MODEL, "other"]),
    transports=st.sampled_from([(), ("tcp",), ("shm",), ("shm", "tcp")]),
    host_id=st.sampled_from(["", "host:1", "host:2"]),
    staging=st.sampled_from([0, 1, 1 << 30]),
)


@given(st.lists(worker, unique_by=lambda f: f.worker_id).flatmap(lambda w: st.tuples(st.just(w), st.permutations(w))))
def test_one_pool_whatever_the_order(orders: tuple[list[WorkerFacts], list[WorkerFacts]]) -> None:
    workers, shuffled = orders
    faults = incompatibilities(MODEL, workers)
    assert incompatibilities(MODEL, shuffled).keys() == faults.keys()
    good = [f for f in workers if f.worker_id not in faults]
    assert len({f.identity_digest for f in good}) <= 1
    assert all(f.model == MODEL for f in good)
    assert len({f.layout.dtype for f in good if f.role is not Role.DECODE or DTYPE not in f.kv_converts}) <= 1
    prefills = [f for f in good if f.role is Role.PREFILL]
    decodes = [f for f in good if f.role is Role.DECODE]
    if prefills and decodes:  # nobody is left without a partner
        assert all(any(can_pair(p, d) for d in decodes) for p in prefills)
        assert all(any(can_pair(p, d) for p in prefills) for d in decodes)
