from memshare.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PoolRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOL_ROLE_UNSPECIFIED: _ClassVar[PoolRole]
    POOL_ROLE_ENGINE: _ClassVar[PoolRole]
    POOL_ROLE_MANAGER: _ClassVar[PoolRole]
    POOL_ROLE_WATCHER: _ClassVar[PoolRole]
POOL_ROLE_UNSPECIFIED: PoolRole
POOL_ROLE_ENGINE: PoolRole
POOL_ROLE_MANAGER: PoolRole
POOL_ROLE_WATCHER: PoolRole

class PoolPacket(_message.Message):
    __slots__ = ("request", "grant", "refusal", "holders_request", "holders")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_REQUEST_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    request: PoolRequest
    grant: PoolGrant
    refusal: PoolRefusal
    holders_request: HoldersRequest
    holders: Holders
    def __init__(self, request: _Optional[_Union[PoolRequest, _Mapping]] = ..., grant: _Optional[_Union[PoolGrant, _Mapping]] = ..., refusal: _Optional[_Union[PoolRefusal, _Mapping]] = ..., holders_request: _Optional[_Union[HoldersRequest, _Mapping]] = ..., holders: _Optional[_Union[Holders, _Mapping]] = ...) -> None: ...

class PoolRequest(_message.Message):
    __slots__ = ("min_protocol", "max_protocol", "version", "role")
    MIN_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    MAX_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    min_protocol: int
    max_protocol: int
    version: str
    role: PoolRole
    def __init__(self, min_protocol: _Optional[int] = ..., max_protocol: _Optional[int] = ..., version: _Optional[str] = ..., role: _Optional[_Union[PoolRole, str]] = ...) -> None: ...

class PoolGrant(_message.Message):
    __slots__ = ("protocol", "version", "pool", "token", "token_key")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_KEY_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    version: str
    pool: _common_pb2.PoolDescriptor
    token: bytes
    token_key: bytes
    def __init__(self, protocol: _Optional[int] = ..., version: _Optional[str] = ..., pool: _Optional[_Union[_common_pb2.PoolDescriptor, _Mapping]] = ..., token: _Optional[bytes] = ..., token_key: _Optional[bytes] = ...) -> None: ...

class PoolRefusal(_message.Message):
    __slots__ = ("reason", "message")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class HoldersRequest(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    def __init__(self, sequence: _Optional[int] = ...) -> None: ...

class Holders(_message.Message):
    __slots__ = ("holders", "sequence")
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    holders: _containers.RepeatedCompositeFieldContainer[Holder]
    sequence: int
    def __init__(self, holders: _Optional[_Iterable[_Union[Holder, _Mapping]]] = ..., sequence: _Optional[int] = ...) -> None: ...

class Holder(_message.Message):
    __slots__ = ("pid", "uid", "token")
    PID_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    pid: int
    uid: int
    token: bytes
    def __init__(self, pid: _Optional[int] = ..., uid: _Optional[int] = ..., token: _Optional[bytes] = ...) -> None: ...
