from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RowDtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROW_DTYPE_UNSPECIFIED: _ClassVar[RowDtype]
    ROW_DTYPE_FP32: _ClassVar[RowDtype]
    ROW_DTYPE_FP16: _ClassVar[RowDtype]
    ROW_DTYPE_BF16: _ClassVar[RowDtype]

class SharingMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SHARING_MODE_UNSPECIFIED: _ClassVar[SharingMode]
    SHARING_MODE_OBSERVE: _ClassVar[SharingMode]
    SHARING_MODE_EXACT: _ClassVar[SharingMode]
    SHARING_MODE_ROW: _ClassVar[SharingMode]
    SHARING_MODE_BLOCK: _ClassVar[SharingMode]
ROW_DTYPE_UNSPECIFIED: RowDtype
ROW_DTYPE_FP32: RowDtype
ROW_DTYPE_FP16: RowDtype
ROW_DTYPE_BF16: RowDtype
SHARING_MODE_UNSPECIFIED: SharingMode
SHARING_MODE_OBSERVE: SharingMode
SHARING_MODE_EXACT: SharingMode
SHARING_MODE_ROW: SharingMode
SHARING_MODE_BLOCK: SharingMode

class RopeParameters(_message.Message):
    __slots__ = ("inv_freq",)
    INV_FREQ_FIELD_NUMBER: _ClassVar[int]
    inv_freq: bytes
    def __init__(self, inv_freq: _Optional[bytes] = ...) -> None: ...

class RowLayout(_message.Message):
    __slots__ = ("num_layers", "num_kv_heads", "key_head_dim", "value_head_dim", "dtype", "rope")
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    KEY_HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    VALUE_HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ROPE_FIELD_NUMBER: _ClassVar[int]
    num_layers: int
    num_kv_heads: int
    key_head_dim: int
    value_head_dim: int
    dtype: RowDtype
    rope: RopeParameters
    def __init__(self, num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., key_head_dim: _Optional[int] = ..., value_head_dim: _Optional[int] = ..., dtype: _Optional[_Union[RowDtype, str]] = ..., rope: _Optional[_Union[RopeParameters, _Mapping]] = ...) -> None: ...

class PagePart(_message.Message):
    __slots__ = ("offset", "head_stride", "token_stride", "dim_stride")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    HEAD_STRIDE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_STRIDE_FIELD_NUMBER: _ClassVar[int]
    DIM_STRIDE_FIELD_NUMBER: _ClassVar[int]
    offset: int
    head_stride: int
    token_stride: int
    dim_stride: int
    def __init__(self, offset: _Optional[int] = ..., head_stride: _Optional[int] = ..., token_stride: _Optional[int] = ..., dim_stride: _Optional[int] = ...) -> None: ...

class BlockGroup(_message.Message):
    __slots__ = ("num_kv_heads", "key_head_dim", "value_head_dim", "layer_offsets", "block_stride", "keys", "values")
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    KEY_HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    VALUE_HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    LAYER_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_STRIDE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    num_kv_heads: int
    key_head_dim: int
    value_head_dim: int
    layer_offsets: bytes
    block_stride: int
    keys: PagePart
    values: PagePart
    def __init__(self, num_kv_heads: _Optional[int] = ..., key_head_dim: _Optional[int] = ..., value_head_dim: _Optional[int] = ..., layer_offsets: _Optional[bytes] = ..., block_stride: _Optional[int] = ..., keys: _Optional[_Union[PagePart, _Mapping]] = ..., values: _Optional[_Union[PagePart, _Mapping]] = ...) -> None: ...

class BlockLayout(_message.Message):
    __slots__ = ("dtype", "block_tokens", "block_bytes", "num_blocks", "groups")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    dtype: RowDtype
    block_tokens: int
    block_bytes: int
    num_blocks: int
    groups: _containers.RepeatedCompositeFieldContainer[BlockGroup]
    def __init__(self, dtype: _Optional[_Union[RowDtype, str]] = ..., block_tokens: _Optional[int] = ..., block_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[BlockGroup, _Mapping]]] = ...) -> None: ...

class PoolDescriptor(_message.Message):
    __slots__ = ("pool_id", "pool_bytes", "row_bytes", "num_rows")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROW_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    pool_id: bytes
    pool_bytes: int
    row_bytes: int
    num_rows: int
    def __init__(self, pool_id: _Optional[bytes] = ..., pool_bytes: _Optional[int] = ..., row_bytes: _Optional[int] = ..., num_rows: _Optional[int] = ...) -> None: ...

class PolicyStage(_message.Message):
    __slots__ = ("min_age", "key_threshold", "value_threshold")
    MIN_AGE_FIELD_NUMBER: _ClassVar[int]
    KEY_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    VALUE_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    min_age: int
    key_threshold: float
    value_threshold: float
    def __init__(self, min_age: _Optional[int] = ..., key_threshold: _Optional[float] = ..., value_threshold: _Optional[float] = ...) -> None: ...

class AdaptiveThreshold(_message.Message):
    __slots__ = ("enabled", "min_scale", "max_scale", "low_watermark", "high_watermark")
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    MIN_SCALE_FIELD_NUMBER: _ClassVar[int]
    MAX_SCALE_FIELD_NUMBER: _ClassVar[int]
    LOW_WATERMARK_FIELD_NUMBER: _ClassVar[int]
    HIGH_WATERMARK_FIELD_NUMBER: _ClassVar[int]
    enabled: bool
    min_scale: float
    max_scale: float
    low_watermark: float
    high_watermark: float
    def __init__(self, enabled: _Optional[bool] = ..., min_scale: _Optional[float] = ..., max_scale: _Optional[float] = ..., low_watermark: _Optional[float] = ..., high_watermark: _Optional[float] = ...) -> None: ...

class Policy(_message.Message):
    __slots__ = ("name", "mode", "stages", "protected_tokens", "layer_scale", "fidelity_budget", "adaptive")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    PROTECTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAYER_SCALE_FIELD_NUMBER: _ClassVar[int]
    FIDELITY_BUDGET_FIELD_NUMBER: _ClassVar[int]
    ADAPTIVE_FIELD_NUMBER: _ClassVar[int]
    name: str
    mode: SharingMode
    stages: _containers.RepeatedCompositeFieldContainer[PolicyStage]
    protected_tokens: int
    layer_scale: _containers.RepeatedScalarFieldContainer[float]
    fidelity_budget: float
    adaptive: AdaptiveThreshold
    def __init__(self, name: _Optional[str] = ..., mode: _Optional[_Union[SharingMode, str]] = ..., stages: _Optional[_Iterable[_Union[PolicyStage, _Mapping]]] = ..., protected_tokens: _Optional[int] = ..., layer_scale: _Optional[_Iterable[float]] = ..., fidelity_budget: _Optional[float] = ..., adaptive: _Optional[_Union[AdaptiveThreshold, _Mapping]] = ...) -> None: ...
