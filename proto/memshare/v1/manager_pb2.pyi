from google.protobuf import any_pb2 as _any_pb2
from memshare.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttachRequest(_message.Message):
    __slots__ = ("sequence", "hello", "lease_rows", "return_rows", "open_request", "seal_tokens", "truncate_request", "close_requests", "decision_result", "step_completed", "sync", "goodbye", "pin_result")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    LEASE_ROWS_FIELD_NUMBER: _ClassVar[int]
    RETURN_ROWS_FIELD_NUMBER: _ClassVar[int]
    OPEN_REQUEST_FIELD_NUMBER: _ClassVar[int]
    SEAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    CLOSE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    DECISION_RESULT_FIELD_NUMBER: _ClassVar[int]
    STEP_COMPLETED_FIELD_NUMBER: _ClassVar[int]
    SYNC_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    PIN_RESULT_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    hello: Hello
    lease_rows: LeaseRows
    return_rows: ReturnRows
    open_request: OpenRequest
    seal_tokens: SealTokens
    truncate_request: TruncateRequest
    close_requests: CloseRequests
    decision_result: DecisionResult
    step_completed: StepCompleted
    sync: Sync
    goodbye: Goodbye
    pin_result: PinResult
    def __init__(self, sequence: _Optional[int] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., lease_rows: _Optional[_Union[LeaseRows, _Mapping]] = ..., return_rows: _Optional[_Union[ReturnRows, _Mapping]] = ..., open_request: _Optional[_Union[OpenRequest, _Mapping]] = ..., seal_tokens: _Optional[_Union[SealTokens, _Mapping]] = ..., truncate_request: _Optional[_Union[TruncateRequest, _Mapping]] = ..., close_requests: _Optional[_Union[CloseRequests, _Mapping]] = ..., decision_result: _Optional[_Union[DecisionResult, _Mapping]] = ..., step_completed: _Optional[_Union[StepCompleted, _Mapping]] = ..., sync: _Optional[_Union[Sync, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., pin_result: _Optional[_Union[PinResult, _Mapping]] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("sequence", "welcome", "row_lease", "share_decision", "rejected", "policy_changed", "synced", "draining", "pin_rows", "unpin_rows")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ROW_LEASE_FIELD_NUMBER: _ClassVar[int]
    SHARE_DECISION_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    POLICY_CHANGED_FIELD_NUMBER: _ClassVar[int]
    SYNCED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    PIN_ROWS_FIELD_NUMBER: _ClassVar[int]
    UNPIN_ROWS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    welcome: Welcome
    row_lease: RowLease
    share_decision: ShareDecision
    rejected: Rejected
    policy_changed: PolicyChanged
    synced: Synced
    draining: Draining
    pin_rows: PinRows
    unpin_rows: UnpinRows
    def __init__(self, sequence: _Optional[int] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., row_lease: _Optional[_Union[RowLease, _Mapping]] = ..., share_decision: _Optional[_Union[ShareDecision, _Mapping]] = ..., rejected: _Optional[_Union[Rejected, _Mapping]] = ..., policy_changed: _Optional[_Union[PolicyChanged, _Mapping]] = ..., synced: _Optional[_Union[Synced, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., pin_rows: _Optional[_Union[PinRows, _Mapping]] = ..., unpin_rows: _Optional[_Union[UnpinRows, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("min_protocol", "max_protocol", "client_version", "capabilities", "token", "pid", "engine", "tenant", "layout", "policy_name", "policy", "max_rows", "resume", "row_mode_obstacle", "block_layout")
    MIN_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    MAX_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    CLIENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    POLICY_NAME_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    ROW_MODE_OBSTACLE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    min_protocol: int
    max_protocol: int
    client_version: str
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    token: bytes
    pid: int
    engine: str
    tenant: str
    layout: _common_pb2.RowLayout
    policy_name: str
    policy: _common_pb2.Policy
    max_rows: int
    resume: Resume
    row_mode_obstacle: str
    block_layout: _common_pb2.BlockLayout
    def __init__(self, min_protocol: _Optional[int] = ..., max_protocol: _Optional[int] = ..., client_version: _Optional[str] = ..., capabilities: _Optional[_Iterable[str]] = ..., token: _Optional[bytes] = ..., pid: _Optional[int] = ..., engine: _Optional[str] = ..., tenant: _Optional[str] = ..., layout: _Optional[_Union[_common_pb2.RowLayout, _Mapping]] = ..., policy_name: _Optional[str] = ..., policy: _Optional[_Union[_common_pb2.Policy, _Mapping]] = ..., max_rows: _Optional[int] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., row_mode_obstacle: _Optional[str] = ..., block_layout: _Optional[_Union[_common_pb2.BlockLayout, _Mapping]] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("session_id", "epoch")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    epoch: int
    def __init__(self, session_id: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol", "server_version", "capabilities", "session_id", "epoch", "pool", "policy", "mode_reason", "snapshot_required")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    MODE_REASON_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_REQUIRED_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    server_version: str
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    session_id: int
    epoch: int
    pool: _common_pb2.PoolDescriptor
    policy: _common_pb2.Policy
    mode_reason: str
    snapshot_required: bool
    def __init__(self, protocol: _Optional[int] = ..., server_version: _Optional[str] = ..., capabilities: _Optional[_Iterable[str]] = ..., session_id: _Optional[int] = ..., epoch: _Optional[int] = ..., pool: _Optional[_Union[_common_pb2.PoolDescriptor, _Mapping]] = ..., policy: _Optional[_Union[_common_pb2.Policy, _Mapping]] = ..., mode_reason: _Optional[str] = ..., snapshot_required: _Optional[bool] = ...) -> None: ...

class LeaseRows(_message.Message):
    __slots__ = ("count",)
    COUNT_FIELD_NUMBER: _ClassVar[int]
    count: int
    def __init__(self, count: _Optional[int] = ...) -> None: ...

class RowLease(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: bytes
    def __init__(self, rows: _Optional[bytes] = ...) -> None: ...

class ReturnRows(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: bytes
    def __init__(self, rows: _Optional[bytes] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("request_id", "generation", "first_token", "private")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PRIVATE_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    generation: int
    first_token: int
    private: bool
    def __init__(self, request_id: _Optional[int] = ..., generation: _Optional[int] = ..., first_token: _Optional[int] = ..., private: _Optional[bool] = ...) -> None: ...

class SealTokens(_message.Message):
    __slots__ = ("request_id", "generation", "start", "num_tokens", "key_rows", "value_rows", "candidates")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEY_ROWS_FIELD_NUMBER: _ClassVar[int]
    VALUE_ROWS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    generation: int
    start: int
    num_tokens: int
    key_rows: bytes
    value_rows: bytes
    candidates: bytes
    def __init__(self, request_id: _Optional[int] = ..., generation: _Optional[int] = ..., start: _Optional[int] = ..., num_tokens: _Optional[int] = ..., key_rows: _Optional[bytes] = ..., value_rows: _Optional[bytes] = ..., candidates: _Optional[bytes] = ...) -> None: ...

class TruncateRequest(_message.Message):
    __slots__ = ("request_id", "generation", "new_generation", "num_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NEW_GENERATION_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    generation: int
    new_generation: int
    num_tokens: int
    def __init__(self, request_id: _Optional[int] = ..., generation: _Optional[int] = ..., new_generation: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class CloseRequests(_message.Message):
    __slots__ = ("request_ids", "generations")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    request_ids: bytes
    generations: bytes
    def __init__(self, request_ids: _Optional[bytes] = ..., generations: _Optional[bytes] = ...) -> None: ...

class ShareDecision(_message.Message):
    __slots__ = ("decision_id", "request_id", "generation", "layers", "kinds", "targets", "target_rows", "donor_rows", "deltas", "distances", "donors", "donor_requests", "donor_generations")
    DECISION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    TARGET_ROWS_FIELD_NUMBER: _ClassVar[int]
    DONOR_ROWS_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    DISTANCES_FIELD_NUMBER: _ClassVar[int]
    DONORS_FIELD_NUMBER: _ClassVar[int]
    DONOR_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    DONOR_GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    decision_id: int
    request_id: int
    generation: int
    layers: bytes
    kinds: bytes
    targets: bytes
    target_rows: bytes
    donor_rows: bytes
    deltas: bytes
    distances: bytes
    donors: bytes
    donor_requests: bytes
    donor_generations: bytes
    def __init__(self, decision_id: _Optional[int] = ..., request_id: _Optional[int] = ..., generation: _Optional[int] = ..., layers: _Optional[bytes] = ..., kinds: _Optional[bytes] = ..., targets: _Optional[bytes] = ..., target_rows: _Optional[bytes] = ..., donor_rows: _Optional[bytes] = ..., deltas: _Optional[bytes] = ..., distances: _Optional[bytes] = ..., donors: _Optional[bytes] = ..., donor_requests: _Optional[bytes] = ..., donor_generations: _Optional[bytes] = ...) -> None: ...

class DecisionResult(_message.Message):
    __slots__ = ("decision_id", "applied")
    DECISION_ID_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    decision_id: int
    applied: bytes
    def __init__(self, decision_id: _Optional[int] = ..., applied: _Optional[bytes] = ...) -> None: ...

class PinRows(_message.Message):
    __slots__ = ("pin_id", "rows", "request_ids", "generations", "indices", "groups")
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    pin_id: int
    rows: bytes
    request_ids: bytes
    generations: bytes
    indices: bytes
    groups: bytes
    def __init__(self, pin_id: _Optional[int] = ..., rows: _Optional[bytes] = ..., request_ids: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., indices: _Optional[bytes] = ..., groups: _Optional[bytes] = ...) -> None: ...

class PinResult(_message.Message):
    __slots__ = ("pin_id", "pinned")
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    pin_id: int
    pinned: bytes
    def __init__(self, pin_id: _Optional[int] = ..., pinned: _Optional[bytes] = ...) -> None: ...

class UnpinRows(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: bytes
    def __init__(self, rows: _Optional[bytes] = ...) -> None: ...

class StepCompleted(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class Sync(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Synced(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("code", "message", "details")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    details: _containers.RepeatedCompositeFieldContainer[_any_pb2.Any]
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., details: _Optional[_Iterable[_Union[_any_pb2.Any, _Mapping]]] = ...) -> None: ...

class PolicyChanged(_message.Message):
    __slots__ = ("policy", "mode_reason")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    MODE_REASON_FIELD_NUMBER: _ClassVar[int]
    policy: _common_pb2.Policy
    mode_reason: str
    def __init__(self, policy: _Optional[_Union[_common_pb2.Policy, _Mapping]] = ..., mode_reason: _Optional[str] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("session_id", "epoch", "lease", "table", "end")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    epoch: int
    lease: SnapshotLease
    table: SnapshotTable
    end: SnapshotEnd
    def __init__(self, session_id: _Optional[int] = ..., epoch: _Optional[int] = ..., lease: _Optional[_Union[SnapshotLease, _Mapping]] = ..., table: _Optional[_Union[SnapshotTable, _Mapping]] = ..., end: _Optional[_Union[SnapshotEnd, _Mapping]] = ...) -> None: ...

class SnapshotLease(_message.Message):
    __slots__ = ("rows", "pinned_rows")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PINNED_ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: bytes
    pinned_rows: bytes
    def __init__(self, rows: _Optional[bytes] = ..., pinned_rows: _Optional[bytes] = ...) -> None: ...

class SnapshotTable(_message.Message):
    __slots__ = ("request_id", "generation", "first_token", "num_tokens", "key_rows", "value_rows", "shared", "accumulated_error", "start", "candidates", "private")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEY_ROWS_FIELD_NUMBER: _ClassVar[int]
    VALUE_ROWS_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    ACCUMULATED_ERROR_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    PRIVATE_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    generation: int
    first_token: int
    num_tokens: int
    key_rows: bytes
    value_rows: bytes
    shared: bytes
    accumulated_error: float
    start: int
    candidates: bytes
    private: bool
    def __init__(self, request_id: _Optional[int] = ..., generation: _Optional[int] = ..., first_token: _Optional[int] = ..., num_tokens: _Optional[int] = ..., key_rows: _Optional[bytes] = ..., value_rows: _Optional[bytes] = ..., shared: _Optional[bytes] = ..., accumulated_error: _Optional[float] = ..., start: _Optional[int] = ..., candidates: _Optional[bytes] = ..., private: _Optional[bool] = ...) -> None: ...

class SnapshotEnd(_message.Message):
    __slots__ = ("parts",)
    PARTS_FIELD_NUMBER: _ClassVar[int]
    parts: int
    def __init__(self, parts: _Optional[int] = ...) -> None: ...

class SnapshotResponse(_message.Message):
    __slots__ = ("live_rows", "leased_rows")
    LIVE_ROWS_FIELD_NUMBER: _ClassVar[int]
    LEASED_ROWS_FIELD_NUMBER: _ClassVar[int]
    live_rows: int
    leased_rows: int
    def __init__(self, live_rows: _Optional[int] = ..., leased_rows: _Optional[int] = ...) -> None: ...
