from memshare.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RowCounts(_message.Message):
    __slots__ = ("total", "free", "leased", "live", "quarantined")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    total: int
    free: int
    leased: int
    live: int
    quarantined: int
    def __init__(self, total: _Optional[int] = ..., free: _Optional[int] = ..., leased: _Optional[int] = ..., live: _Optional[int] = ..., quarantined: _Optional[int] = ...) -> None: ...

class ShareCounters(_message.Message):
    __slots__ = ("sealed_tokens", "examined_entries", "shared_keys", "shared_values", "proposed", "applied", "missed", "shareable_keys", "shareable_values", "over_budget", "nonfinite", "accumulated_error")
    SEALED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXAMINED_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    SHARED_KEYS_FIELD_NUMBER: _ClassVar[int]
    SHARED_VALUES_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    SHAREABLE_KEYS_FIELD_NUMBER: _ClassVar[int]
    SHAREABLE_VALUES_FIELD_NUMBER: _ClassVar[int]
    OVER_BUDGET_FIELD_NUMBER: _ClassVar[int]
    NONFINITE_FIELD_NUMBER: _ClassVar[int]
    ACCUMULATED_ERROR_FIELD_NUMBER: _ClassVar[int]
    sealed_tokens: int
    examined_entries: int
    shared_keys: int
    shared_values: int
    proposed: int
    applied: int
    missed: int
    shareable_keys: int
    shareable_values: int
    over_budget: int
    nonfinite: int
    accumulated_error: float
    def __init__(self, sealed_tokens: _Optional[int] = ..., examined_entries: _Optional[int] = ..., shared_keys: _Optional[int] = ..., shared_values: _Optional[int] = ..., proposed: _Optional[int] = ..., applied: _Optional[int] = ..., missed: _Optional[int] = ..., shareable_keys: _Optional[int] = ..., shareable_values: _Optional[int] = ..., over_budget: _Optional[int] = ..., nonfinite: _Optional[int] = ..., accumulated_error: _Optional[float] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("server_version", "protocol", "pid", "uptime_seconds", "cpu_seconds", "pool", "rows", "counters", "sessions", "requests", "state", "agent_state", "worker_epoch", "worker_pid", "worker_cpu_seconds", "worker_restarts", "awaited_pids", "block_tokens")
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CPU_SECONDS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    AGENT_STATE_FIELD_NUMBER: _ClassVar[int]
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_PID_FIELD_NUMBER: _ClassVar[int]
    WORKER_CPU_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WORKER_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    AWAITED_PIDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    server_version: str
    protocol: int
    pid: int
    uptime_seconds: float
    cpu_seconds: float
    pool: _common_pb2.PoolDescriptor
    rows: RowCounts
    counters: ShareCounters
    sessions: int
    requests: int
    state: str
    agent_state: str
    worker_epoch: int
    worker_pid: int
    worker_cpu_seconds: float
    worker_restarts: int
    awaited_pids: _containers.RepeatedScalarFieldContainer[int]
    block_tokens: int
    def __init__(self, server_version: _Optional[str] = ..., protocol: _Optional[int] = ..., pid: _Optional[int] = ..., uptime_seconds: _Optional[float] = ..., cpu_seconds: _Optional[float] = ..., pool: _Optional[_Union[_common_pb2.PoolDescriptor, _Mapping]] = ..., rows: _Optional[_Union[RowCounts, _Mapping]] = ..., counters: _Optional[_Union[ShareCounters, _Mapping]] = ..., sessions: _Optional[int] = ..., requests: _Optional[int] = ..., state: _Optional[str] = ..., agent_state: _Optional[str] = ..., worker_epoch: _Optional[int] = ..., worker_pid: _Optional[int] = ..., worker_cpu_seconds: _Optional[float] = ..., worker_restarts: _Optional[int] = ..., awaited_pids: _Optional[_Iterable[int]] = ..., block_tokens: _Optional[int] = ...) -> None: ...

class EngineInfo(_message.Message):
    __slots__ = ("session_id", "epoch", "pid", "engine", "tenant", "layout", "policy", "mode_reason", "leased_rows", "live_rows", "requests", "counters", "client_version", "block_layout")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    MODE_REASON_FIELD_NUMBER: _ClassVar[int]
    LEASED_ROWS_FIELD_NUMBER: _ClassVar[int]
    LIVE_ROWS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    epoch: int
    pid: int
    engine: str
    tenant: str
    layout: _common_pb2.RowLayout
    policy: _common_pb2.Policy
    mode_reason: str
    leased_rows: int
    live_rows: int
    requests: int
    counters: ShareCounters
    client_version: str
    block_layout: _common_pb2.BlockLayout
    def __init__(self, session_id: _Optional[int] = ..., epoch: _Optional[int] = ..., pid: _Optional[int] = ..., engine: _Optional[str] = ..., tenant: _Optional[str] = ..., layout: _Optional[_Union[_common_pb2.RowLayout, _Mapping]] = ..., policy: _Optional[_Union[_common_pb2.Policy, _Mapping]] = ..., mode_reason: _Optional[str] = ..., leased_rows: _Optional[int] = ..., live_rows: _Optional[int] = ..., requests: _Optional[int] = ..., counters: _Optional[_Union[ShareCounters, _Mapping]] = ..., client_version: _Optional[str] = ..., block_layout: _Optional[_Union[_common_pb2.BlockLayout, _Mapping]] = ...) -> None: ...

class ListEnginesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListEnginesResponse(_message.Message):
    __slots__ = ("engines", "left_out")
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    engines: _containers.RepeatedCompositeFieldContainer[EngineInfo]
    left_out: int
    def __init__(self, engines: _Optional[_Iterable[_Union[EngineInfo, _Mapping]]] = ..., left_out: _Optional[int] = ...) -> None: ...

class RequestInfo(_message.Message):
    __slots__ = ("session_id", "request_id", "generation", "sealed_tokens", "shared_keys", "shared_values", "taint", "accumulated_error", "shared_keys_by_layer", "shared_values_by_layer")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SEALED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SHARED_KEYS_FIELD_NUMBER: _ClassVar[int]
    SHARED_VALUES_FIELD_NUMBER: _ClassVar[int]
    TAINT_FIELD_NUMBER: _ClassVar[int]
    ACCUMULATED_ERROR_FIELD_NUMBER: _ClassVar[int]
    SHARED_KEYS_BY_LAYER_FIELD_NUMBER: _ClassVar[int]
    SHARED_VALUES_BY_LAYER_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    request_id: int
    generation: int
    sealed_tokens: int
    shared_keys: int
    shared_values: int
    taint: int
    accumulated_error: float
    shared_keys_by_layer: bytes
    shared_values_by_layer: bytes
    def __init__(self, session_id: _Optional[int] = ..., request_id: _Optional[int] = ..., generation: _Optional[int] = ..., sealed_tokens: _Optional[int] = ..., shared_keys: _Optional[int] = ..., shared_values: _Optional[int] = ..., taint: _Optional[int] = ..., accumulated_error: _Optional[float] = ..., shared_keys_by_layer: _Optional[bytes] = ..., shared_values_by_layer: _Optional[bytes] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    def __init__(self, session_id: _Optional[int] = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests", "left_out")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestInfo]
    left_out: int
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestInfo, _Mapping]]] = ..., left_out: _Optional[int] = ...) -> None: ...

class GetPolicyRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    def __init__(self, session_id: _Optional[int] = ...) -> None: ...

class GetPolicyResponse(_message.Message):
    __slots__ = ("policy", "presets")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    PRESETS_FIELD_NUMBER: _ClassVar[int]
    policy: _common_pb2.Policy
    presets: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, policy: _Optional[_Union[_common_pb2.Policy, _Mapping]] = ..., presets: _Optional[_Iterable[str]] = ...) -> None: ...

class SetPolicyRequest(_message.Message):
    __slots__ = ("session_id", "preset", "policy")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PRESET_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    preset: str
    policy: _common_pb2.Policy
    def __init__(self, session_id: _Optional[int] = ..., preset: _Optional[str] = ..., policy: _Optional[_Union[_common_pb2.Policy, _Mapping]] = ...) -> None: ...

class SetPolicyResponse(_message.Message):
    __slots__ = ("policy", "sessions_changed")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_CHANGED_FIELD_NUMBER: _ClassVar[int]
    policy: _common_pb2.Policy
    sessions_changed: int
    def __init__(self, policy: _Optional[_Union[_common_pb2.Policy, _Mapping]] = ..., sessions_changed: _Optional[int] = ...) -> None: ...

class CheckIntegrityRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckIntegrityResponse(_message.Message):
    __slots__ = ("errors", "rows")
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    errors: _containers.RepeatedScalarFieldContainer[str]
    rows: RowCounts
    def __init__(self, errors: _Optional[_Iterable[str]] = ..., rows: _Optional[_Union[RowCounts, _Mapping]] = ...) -> None: ...
