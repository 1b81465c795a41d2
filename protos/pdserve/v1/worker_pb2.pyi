from pdserve.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SessionRequest(_message.Message):
    __slots__ = ("hello", "submit", "abort", "attach", "rebind", "renew_leases", "heartbeat")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    REBIND_FIELD_NUMBER: _ClassVar[int]
    RENEW_LEASES_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    submit: Submit
    abort: Abort
    attach: AttachSequence
    rebind: Rebind
    renew_leases: RenewLeases
    heartbeat: RouterHeartbeat
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., attach: _Optional[_Union[AttachSequence, _Mapping]] = ..., rebind: _Optional[_Union[Rebind, _Mapping]] = ..., renew_leases: _Optional[_Union[RenewLeases, _Mapping]] = ..., heartbeat: _Optional[_Union[RouterHeartbeat, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("router_id", "protocol_version")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    protocol_version: int
    def __init__(self, router_id: _Optional[str] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("worker_id", "address", "incarnation")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    incarnation: str
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("fence", "reservation_id", "transfer_id", "part", "prefill", "decode", "prompt_token_ids", "emitted_token_ids", "sampling", "deadline_ms", "traceparent", "priority", "cache_salt", "tenant", "prompt_digest", "prefill_shards")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EMITTED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SHARDS_FIELD_NUMBER: _ClassVar[int]
    fence: _common_pb2.Fence
    reservation_id: str
    transfer_id: str
    part: _common_pb2.Role
    prefill: Peer
    decode: Peer
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    emitted_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingParams
    deadline_ms: int
    traceparent: str
    priority: int
    cache_salt: str
    tenant: str
    prompt_digest: bytes
    prefill_shards: _containers.RepeatedCompositeFieldContainer[Peer]
    def __init__(self, fence: _Optional[_Union[_common_pb2.Fence, _Mapping]] = ..., reservation_id: _Optional[str] = ..., transfer_id: _Optional[str] = ..., part: _Optional[_Union[_common_pb2.Role, str]] = ..., prefill: _Optional[_Union[Peer, _Mapping]] = ..., decode: _Optional[_Union[Peer, _Mapping]] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., emitted_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., deadline_ms: _Optional[int] = ..., traceparent: _Optional[str] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., tenant: _Optional[str] = ..., prompt_digest: _Optional[bytes] = ..., prefill_shards: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("fence", "reason")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    fence: _common_pb2.Fence
    reason: str
    def __init__(self, fence: _Optional[_Union[_common_pb2.Fence, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class AttachSequence(_message.Message):
    __slots__ = ("fence", "index")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    fence: _common_pb2.Fence
    index: int
    def __init__(self, fence: _Optional[_Union[_common_pb2.Fence, _Mapping]] = ..., index: _Optional[int] = ...) -> None: ...

class Rebind(_message.Message):
    __slots__ = ("fence", "old_transfer_id", "transfer_id", "decode")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    OLD_TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    fence: _common_pb2.Fence
    old_transfer_id: str
    transfer_id: str
    decode: Peer
    def __init__(self, fence: _Optional[_Union[_common_pb2.Fence, _Mapping]] = ..., old_transfer_id: _Optional[str] = ..., transfer_id: _Optional[str] = ..., decode: _Optional[_Union[Peer, _Mapping]] = ...) -> None: ...

class RenewLeases(_message.Message):
    __slots__ = ("transfer_ids",)
    TRANSFER_IDS_FIELD_NUMBER: _ClassVar[int]
    transfer_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, transfer_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class RouterHeartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("welcome", "reservation", "step_outputs", "aborted", "heartbeat")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    STEP_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    reservation: ReservationResult
    step_outputs: StepOutputs
    aborted: Aborted
    heartbeat: WorkerHeartbeat
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., reservation: _Optional[_Union[ReservationResult, _Mapping]] = ..., step_outputs: _Optional[_Union[StepOutputs, _Mapping]] = ..., aborted: _Optional[_Union[Aborted, _Mapping]] = ..., heartbeat: _Optional[_Union[WorkerHeartbeat, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("worker_id", "role", "incarnation", "protocol_version", "identity_digest", "model", "max_model_len", "vocab_size", "layout", "num_pages", "page_size", "max_num_seqs", "kv_converts", "transports", "host_id", "kv_staging_bytes")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    KV_CONVERTS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    KV_STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: _common_pb2.Role
    incarnation: str
    protocol_version: int
    identity_digest: bytes
    model: str
    max_model_len: int
    vocab_size: int
    layout: str
    num_pages: int
    page_size: int
    max_num_seqs: int
    kv_converts: _containers.RepeatedScalarFieldContainer[str]
    transports: _containers.RepeatedScalarFieldContainer[str]
    host_id: str
    kv_staging_bytes: int
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., incarnation: _Optional[str] = ..., protocol_version: _Optional[int] = ..., identity_digest: _Optional[bytes] = ..., model: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., layout: _Optional[str] = ..., num_pages: _Optional[int] = ..., page_size: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., kv_converts: _Optional[_Iterable[str]] = ..., transports: _Optional[_Iterable[str]] = ..., host_id: _Optional[str] = ..., kv_staging_bytes: _Optional[int] = ...) -> None: ...

class ReservationResult(_message.Message):
    __slots__ = ("fence", "reservation_id", "reserved", "retry_after_ms", "num_cached_pages")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    fence: _common_pb2.Fence
    reservation_id: str
    reserved: bool
    retry_after_ms: int
    num_cached_pages: int
    def __init__(self, fence: _Optional[_Union[_common_pb2.Fence, _Mapping]] = ..., reservation_id: _Optional[str] = ..., reserved: _Optional[bool] = ..., retry_after_ms: _Optional[int] = ..., num_cached_pages: _Optional[int] = ...) -> None: ...

class StepOutputs(_message.Message):
    __slots__ = ("step", "outputs", "load")
    STEP_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    step: int
    outputs: _containers.RepeatedCompositeFieldContainer[SequenceOutput]
    load: Load
    def __init__(self, step: _Optional[int] = ..., outputs: _Optional[_Iterable[_Union[SequenceOutput, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class SequenceOutput(_message.Message):
    __slots__ = ("fence", "delta", "finished", "failed", "timings", "prompt_logprobs", "cached_tokens")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    fence: _common_pb2.Fence
    delta: _common_pb2.Delta
    finished: SequenceFinished
    failed: _common_pb2.ErrorDetail
    timings: _common_pb2.Timings
    prompt_logprobs: _common_pb2.PromptLogprobs
    cached_tokens: int
    def __init__(self, fence: _Optional[_Union[_common_pb2.Fence, _Mapping]] = ..., delta: _Optional[_Union[_common_pb2.Delta, _Mapping]] = ..., finished: _Optional[_Union[SequenceFinished, _Mapping]] = ..., failed: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ..., timings: _Optional[_Union[_common_pb2.Timings, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_common_pb2.PromptLogprobs, _Mapping]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class SequenceFinished(_message.Message):
    __slots__ = ("finish_reason", "stop_reason", "usage")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    finish_reason: _common_pb2.FinishReason
    stop_reason: str
    usage: _common_pb2.Usage
    def __init__(self, finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., stop_reason: _Optional[str] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ...) -> None: ...

class Aborted(_message.Message):
    __slots__ = ("fence", "known")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    fence: _common_pb2.Fence
    known: bool
    def __init__(self, fence: _Optional[_Union[_common_pb2.Fence, _Mapping]] = ..., known: _Optional[bool] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_free_pages", "num_pending_prefill_tokens")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_PENDING_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    num_free_pages: int
    num_pending_prefill_tokens: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_free_pages: _Optional[int] = ..., num_pending_prefill_tokens: _Optional[int] = ...) -> None: ...

class WorkerHeartbeat(_message.Message):
    __slots__ = ("load", "draining", "leaving")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    load: Load
    draining: bool
    leaving: bool
    def __init__(self, load: _Optional[_Union[Load, _Mapping]] = ..., draining: _Optional[bool] = ..., leaving: _Optional[bool] = ...) -> None: ...
