from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TransferOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSFER_OUTCOME_UNSPECIFIED: _ClassVar[TransferOutcome]
    TRANSFER_OUTCOME_COMPLETE: _ClassVar[TransferOutcome]
    TRANSFER_OUTCOME_ABORTED: _ClassVar[TransferOutcome]
    TRANSFER_OUTCOME_FAILED: _ClassVar[TransferOutcome]
TRANSFER_OUTCOME_UNSPECIFIED: TransferOutcome
TRANSFER_OUTCOME_COMPLETE: TransferOutcome
TRANSFER_OUTCOME_ABORTED: TransferOutcome
TRANSFER_OUTCOME_FAILED: TransferOutcome

class ControlRequest(_message.Message):
    __slots__ = ("hello", "open", "renew", "close")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    hello: TransferHello
    open: OpenTransfer
    renew: RenewTransfers
    close: CloseTransfer
    def __init__(self, hello: _Optional[_Union[TransferHello, _Mapping]] = ..., open: _Optional[_Union[OpenTransfer, _Mapping]] = ..., renew: _Optional[_Union[RenewTransfers, _Mapping]] = ..., close: _Optional[_Union[CloseTransfer, _Mapping]] = ...) -> None: ...

class ControlResponse(_message.Message):
    __slots__ = ("welcome", "watermark", "manifest", "closed", "heartbeat")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    welcome: TransferWelcome
    watermark: Watermark
    manifest: Manifest
    closed: TransferClosed
    heartbeat: TransferHeartbeat
    def __init__(self, welcome: _Optional[_Union[TransferWelcome, _Mapping]] = ..., watermark: _Optional[_Union[Watermark, _Mapping]] = ..., manifest: _Optional[_Union[Manifest, _Mapping]] = ..., closed: _Optional[_Union[TransferClosed, _Mapping]] = ..., heartbeat: _Optional[_Union[TransferHeartbeat, _Mapping]] = ...) -> None: ...

class TransferHello(_message.Message):
    __slots__ = ("protocol_version", "worker_id", "incarnation", "identity_digest", "layout", "expected_incarnation", "transports", "host_id", "kv_converts")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    KV_CONVERTS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    worker_id: str
    incarnation: str
    identity_digest: bytes
    layout: str
    expected_incarnation: str
    transports: _containers.RepeatedScalarFieldContainer[str]
    host_id: str
    kv_converts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol_version: _Optional[int] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., identity_digest: _Optional[bytes] = ..., layout: _Optional[str] = ..., expected_incarnation: _Optional[str] = ..., transports: _Optional[_Iterable[str]] = ..., host_id: _Optional[str] = ..., kv_converts: _Optional[_Iterable[str]] = ...) -> None: ...

class TransferWelcome(_message.Message):
    __slots__ = ("protocol_version", "incarnation", "data_address", "data_token", "lease_ms", "integrity", "layout", "transport", "first_kv_heads")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DATA_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    INTEGRITY_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    FIRST_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    incarnation: str
    data_address: str
    data_token: bytes
    lease_ms: int
    integrity: str
    layout: str
    transport: str
    first_kv_heads: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, protocol_version: _Optional[int] = ..., incarnation: _Optional[str] = ..., data_address: _Optional[str] = ..., data_token: _Optional[bytes] = ..., lease_ms: _Optional[int] = ..., integrity: _Optional[str] = ..., layout: _Optional[str] = ..., transport: _Optional[str] = ..., first_kv_heads: _Optional[_Iterable[int]] = ...) -> None: ...

class OpenTransfer(_message.Message):
    __slots__ = ("transfer_id", "num_cached_pages", "request_id")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    num_cached_pages: int
    request_id: str
    def __init__(self, transfer_id: _Optional[str] = ..., num_cached_pages: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...

class RenewTransfers(_message.Message):
    __slots__ = ("transfer_ids",)
    TRANSFER_IDS_FIELD_NUMBER: _ClassVar[int]
    transfer_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, transfer_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class CloseTransfer(_message.Message):
    __slots__ = ("transfer_id", "outcome", "reason")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    outcome: TransferOutcome
    reason: str
    def __init__(self, transfer_id: _Optional[str] = ..., outcome: _Optional[_Union[TransferOutcome, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class SourcePage(_message.Message):
    __slots__ = ("page_id", "generation", "checksum")
    PAGE_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    page_id: int
    generation: int
    checksum: int
    def __init__(self, page_id: _Optional[int] = ..., generation: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class Watermark(_message.Message):
    __slots__ = ("transfer_id", "first_page", "pages")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    first_page: int
    pages: _containers.RepeatedCompositeFieldContainer[SourcePage]
    def __init__(self, transfer_id: _Optional[str] = ..., first_page: _Optional[int] = ..., pages: _Optional[_Iterable[_Union[SourcePage, _Mapping]]] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("transfer_id", "num_pages", "num_tokens", "token_id", "index", "prompt_digest", "finished")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PROMPT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    num_pages: int
    num_tokens: int
    token_id: int
    index: int
    prompt_digest: bytes
    finished: bool
    def __init__(self, transfer_id: _Optional[str] = ..., num_pages: _Optional[int] = ..., num_tokens: _Optional[int] = ..., token_id: _Optional[int] = ..., index: _Optional[int] = ..., prompt_digest: _Optional[bytes] = ..., finished: _Optional[bool] = ...) -> None: ...

class TransferClosed(_message.Message):
    __slots__ = ("transfer_id", "reason")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    reason: str
    def __init__(self, transfer_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class TransferHeartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
