from memshare.v1 import common_pb2 as _common_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetAgentInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetAgentInfoResponse(_message.Message):
    __slots__ = ("pool", "worker_epoch", "backend", "version", "worker_pid", "sessions", "requests", "indexed_rows", "cpu_seconds", "nonfinite_rows")
    POOL_FIELD_NUMBER: _ClassVar[int]
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_PID_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    INDEXED_ROWS_FIELD_NUMBER: _ClassVar[int]
    CPU_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NONFINITE_ROWS_FIELD_NUMBER: _ClassVar[int]
    pool: _common_pb2.PoolDescriptor
    worker_epoch: int
    backend: str
    version: str
    worker_pid: int
    sessions: int
    requests: int
    indexed_rows: int
    cpu_seconds: float
    nonfinite_rows: int
    def __init__(self, pool: _Optional[_Union[_common_pb2.PoolDescriptor, _Mapping]] = ..., worker_epoch: _Optional[int] = ..., backend: _Optional[str] = ..., version: _Optional[str] = ..., worker_pid: _Optional[int] = ..., sessions: _Optional[int] = ..., requests: _Optional[int] = ..., indexed_rows: _Optional[int] = ..., cpu_seconds: _Optional[float] = ..., nonfinite_rows: _Optional[int] = ...) -> None: ...

class OpenIndexRequest(_message.Message):
    __slots__ = ("worker_epoch", "session_id", "layout", "row_bytes", "tenant", "block_layout")
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    ROW_BYTES_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    worker_epoch: int
    session_id: int
    layout: _common_pb2.RowLayout
    row_bytes: int
    tenant: str
    block_layout: _common_pb2.BlockLayout
    def __init__(self, worker_epoch: _Optional[int] = ..., session_id: _Optional[int] = ..., layout: _Optional[_Union[_common_pb2.RowLayout, _Mapping]] = ..., row_bytes: _Optional[int] = ..., tenant: _Optional[str] = ..., block_layout: _Optional[_Union[_common_pb2.BlockLayout, _Mapping]] = ...) -> None: ...

class OpenIndexResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CloseIndexRequest(_message.Message):
    __slots__ = ("worker_epoch", "session_id")
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    worker_epoch: int
    session_id: int
    def __init__(self, worker_epoch: _Optional[int] = ..., session_id: _Optional[int] = ...) -> None: ...

class CloseIndexResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class IndexRowsRequest(_message.Message):
    __slots__ = ("worker_epoch", "session_id", "request_id", "generation", "start", "num_tokens", "key_rows", "value_rows", "first_token", "candidates", "private")
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEY_ROWS_FIELD_NUMBER: _ClassVar[int]
    VALUE_ROWS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    PRIVATE_FIELD_NUMBER: _ClassVar[int]
    worker_epoch: int
    session_id: int
    request_id: int
    generation: int
    start: int
    num_tokens: int
    key_rows: bytes
    value_rows: bytes
    first_token: int
    candidates: bytes
    private: bool
    def __init__(self, worker_epoch: _Optional[int] = ..., session_id: _Optional[int] = ..., request_id: _Optional[int] = ..., generation: _Optional[int] = ..., start: _Optional[int] = ..., num_tokens: _Optional[int] = ..., key_rows: _Optional[bytes] = ..., value_rows: _Optional[bytes] = ..., first_token: _Optional[int] = ..., candidates: _Optional[bytes] = ..., private: _Optional[bool] = ...) -> None: ...

class IndexRowsResponse(_message.Message):
    __slots__ = ("num_tokens",)
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    def __init__(self, num_tokens: _Optional[int] = ...) -> None: ...

class DropRequestsRequest(_message.Message):
    __slots__ = ("worker_epoch", "session_id", "request_ids", "keep_tokens", "generations")
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    KEEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    worker_epoch: int
    session_id: int
    request_ids: bytes
    keep_tokens: bytes
    generations: bytes
    def __init__(self, worker_epoch: _Optional[int] = ..., session_id: _Optional[int] = ..., request_ids: _Optional[bytes] = ..., keep_tokens: _Optional[bytes] = ..., generations: _Optional[bytes] = ...) -> None: ...

class DropRequestsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FindDonorsRequest(_message.Message):
    __slots__ = ("worker_epoch", "session_id", "request_id", "generation", "target_start", "target_end", "donor_mask", "target_mask", "key_thresholds", "value_thresholds", "exact", "candidates", "exhaustive")
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TARGET_START_FIELD_NUMBER: _ClassVar[int]
    TARGET_END_FIELD_NUMBER: _ClassVar[int]
    DONOR_MASK_FIELD_NUMBER: _ClassVar[int]
    TARGET_MASK_FIELD_NUMBER: _ClassVar[int]
    KEY_THRESHOLDS_FIELD_NUMBER: _ClassVar[int]
    VALUE_THRESHOLDS_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    EXHAUSTIVE_FIELD_NUMBER: _ClassVar[int]
    worker_epoch: int
    session_id: int
    request_id: int
    generation: int
    target_start: int
    target_end: int
    donor_mask: bytes
    target_mask: bytes
    key_thresholds: bytes
    value_thresholds: bytes
    exact: bool
    candidates: int
    exhaustive: bool
    def __init__(self, worker_epoch: _Optional[int] = ..., session_id: _Optional[int] = ..., request_id: _Optional[int] = ..., generation: _Optional[int] = ..., target_start: _Optional[int] = ..., target_end: _Optional[int] = ..., donor_mask: _Optional[bytes] = ..., target_mask: _Optional[bytes] = ..., key_thresholds: _Optional[bytes] = ..., value_thresholds: _Optional[bytes] = ..., exact: _Optional[bool] = ..., candidates: _Optional[int] = ..., exhaustive: _Optional[bool] = ...) -> None: ...

class FindDonorsResponse(_message.Message):
    __slots__ = ("layers", "kinds", "targets", "donors", "donor_rows", "distances", "donor_sessions", "donor_requests", "examined", "nonfinite")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    DONORS_FIELD_NUMBER: _ClassVar[int]
    DONOR_ROWS_FIELD_NUMBER: _ClassVar[int]
    DISTANCES_FIELD_NUMBER: _ClassVar[int]
    DONOR_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    DONOR_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    EXAMINED_FIELD_NUMBER: _ClassVar[int]
    NONFINITE_FIELD_NUMBER: _ClassVar[int]
    layers: bytes
    kinds: bytes
    targets: bytes
    donors: bytes
    donor_rows: bytes
    distances: bytes
    donor_sessions: bytes
    donor_requests: bytes
    examined: int
    nonfinite: int
    def __init__(self, layers: _Optional[bytes] = ..., kinds: _Optional[bytes] = ..., targets: _Optional[bytes] = ..., donors: _Optional[bytes] = ..., donor_rows: _Optional[bytes] = ..., distances: _Optional[bytes] = ..., donor_sessions: _Optional[bytes] = ..., donor_requests: _Optional[bytes] = ..., examined: _Optional[int] = ..., nonfinite: _Optional[int] = ...) -> None: ...

class CopyRowsRequest(_message.Message):
    __slots__ = ("worker_epoch", "row_bytes", "source_rows", "destination_rows", "block_layout")
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROW_BYTES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_ROWS_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_ROWS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    worker_epoch: int
    row_bytes: int
    source_rows: bytes
    destination_rows: bytes
    block_layout: _common_pb2.BlockLayout
    def __init__(self, worker_epoch: _Optional[int] = ..., row_bytes: _Optional[int] = ..., source_rows: _Optional[bytes] = ..., destination_rows: _Optional[bytes] = ..., block_layout: _Optional[_Union[_common_pb2.BlockLayout, _Mapping]] = ...) -> None: ...

class CopyRowsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ZeroRowsRequest(_message.Message):
    __slots__ = ("worker_epoch", "row_bytes", "rows", "block_layout")
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROW_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    worker_epoch: int
    row_bytes: int
    rows: bytes
    block_layout: _common_pb2.BlockLayout
    def __init__(self, worker_epoch: _Optional[int] = ..., row_bytes: _Optional[int] = ..., rows: _Optional[bytes] = ..., block_layout: _Optional[_Union[_common_pb2.BlockLayout, _Mapping]] = ...) -> None: ...

class ZeroRowsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
