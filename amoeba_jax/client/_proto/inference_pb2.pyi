from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]

class ServerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVER_STATE_UNSPECIFIED: _ClassVar[ServerState]
    SERVER_STATE_LOADING: _ClassVar[ServerState]
    SERVER_STATE_READY: _ClassVar[ServerState]
    SERVER_STATE_DRAINING: _ClassVar[ServerState]
    SERVER_STATE_DEAD: _ClassVar[ServerState]

class PlacementModules(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLACEMENT_MODULES_LAYER: _ClassVar[PlacementModules]
    PLACEMENT_MODULES_ATTENTION: _ClassVar[PlacementModules]
    PLACEMENT_MODULES_FFN: _ClassVar[PlacementModules]
    PLACEMENT_MODULES_KV: _ClassVar[PlacementModules]

class TransformVariant(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSFORM_VARIANT_UNSPECIFIED: _ClassVar[TransformVariant]
    TRANSFORM_VARIANT_IN_PLACE_OVERLAPPED: _ClassVar[TransformVariant]
    TRANSFORM_VARIANT_IN_PLACE: _ClassVar[TransformVariant]

class RunningRequests(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUNNING_REQUESTS_MIGRATE: _ClassVar[RunningRequests]
    RUNNING_REQUESTS_PAUSE: _ClassVar[RunningRequests]
    RUNNING_REQUESTS_WAIT: _ClassVar[RunningRequests]

class ChangeOrder(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHANGE_ORDER_LAYER: _ClassVar[ChangeOrder]
    CHANGE_ORDER_MEMORY_FIRST: _ClassVar[ChangeOrder]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
SERVER_STATE_UNSPECIFIED: ServerState
SERVER_STATE_LOADING: ServerState
SERVER_STATE_READY: ServerState
SERVER_STATE_DRAINING: ServerState
SERVER_STATE_DEAD: ServerState
PLACEMENT_MODULES_LAYER: PlacementModules
PLACEMENT_MODULES_ATTENTION: PlacementModules
PLACEMENT_MODULES_FFN: PlacementModules
PLACEMENT_MODULES_KV: PlacementModules
TRANSFORM_VARIANT_UNSPECIFIED: TransformVariant
TRANSFORM_VARIANT_IN_PLACE_OVERLAPPED: TransformVariant
TRANSFORM_VARIANT_IN_PLACE: TransformVariant
RUNNING_REQUESTS_MIGRATE: RunningRequests
RUNNING_REQUESTS_PAUSE: RunningRequests
RUNNING_REQUESTS_WAIT: RunningRequests
CHANGE_ORDER_LAYER: ChangeOrder
CHANGE_ORDER_MEMORY_FIRST: ChangeOrder

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "logit_bias", "allowed_token_ids", "bad_words", "skip_special_tokens", "priority", "ttft_slo_s", "tpot_slo_s", "structured")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    N_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TTFT_SLO_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_SLO_S_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_FIELD_NUMBER: _ClassVar[int]
    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    max_tokens: int
    min_tokens: int
    logprobs: int
    prompt_logprobs: int
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: TokenIds
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    skip_special_tokens: bool
    priority: int
    ttft_slo_s: float
    tpot_slo_s: float
    structured: StructuredOutput
    def __init__(self, n: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., include_stop_str_in_output: _Optional[bool] = ..., ignore_eos: _Optional[bool] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., bad_words: _Optional[_Iterable[str]] = ..., skip_special_tokens: _Optional[bool] = ..., priority: _Optional[int] = ..., ttft_slo_s: _Optional[float] = ..., tpot_slo_s: _Optional[float] = ..., structured: _Optional[_Union[StructuredOutput, _Mapping]] = ...) -> None: ...

class StructuredOutput(_message.Message):
    __slots__ = ("json_schema", "json_object", "regex", "grammar", "choice")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    json_object: bool
    regex: str
    grammar: str
    choice: Choices
    def __init__(self, json_schema: _Optional[str] = ..., json_object: _Optional[bool] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ..., choice: _Optional[_Union[Choices, _Mapping]] = ...) -> None: ...

class Choices(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "model", "text", "token_ids", "chat", "params", "cache_salt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    text: str
    token_ids: TokenIds
    chat: Chat
    params: SamplingParams
    cache_salt: str
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., params: _Optional[_Union[SamplingParams, _Mapping]] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "rank", "decoded_token")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    DECODED_TOKEN_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    rank: int
    decoded_token: str
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., rank: _Optional[int] = ..., decoded_token: _Optional[str] = ...) -> None: ...

class PositionLogprobs(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, tokens: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class Completion(_message.Message):
    __slots__ = ("index", "text", "token_ids", "logprobs", "finish_reason", "stop_string", "stop_token_id")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    index: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[PositionLogprobs]
    finish_reason: FinishReason
    stop_string: str
    stop_token_id: int
    def __init__(self, index: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[PositionLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., stop_string: _Optional[str] = ..., stop_token_id: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens", "queue_s", "ttft_s", "tpot_s", "e2e_s", "preemptions")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    E2E_S_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    queue_s: float
    ttft_s: float
    tpot_s: float
    e2e_s: float
    preemptions: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ..., ttft_s: _Optional[float] = ..., tpot_s: _Optional[float] = ..., e2e_s: _Optional[float] = ..., preemptions: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "completions", "usage", "prompt_logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    completions: _containers.RepeatedCompositeFieldContainer[Completion]
    usage: Usage
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PositionLogprobs]
    def __init__(self, request_id: _Optional[str] = ..., completions: _Optional[_Iterable[_Union[Completion, _Mapping]]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PositionLogprobs, _Mapping]]] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "text", "chat", "add_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    chat: Chat
    add_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., add_special_tokens: _Optional[bool] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("model", "token_ids", "skip_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    skip_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., skip_special_tokens: _Optional[bool] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("model", "server_version", "max_model_len", "vocab_size", "has_tokenizer", "has_chat_template", "eos_token_ids", "bos_token_id", "limits")
    class LimitsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    HAS_TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    model: str
    server_version: str
    max_model_len: int
    vocab_size: int
    has_tokenizer: bool
    has_chat_template: bool
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bos_token_id: int
    limits: _containers.ScalarMap[str, int]
    def __init__(self, model: _Optional[str] = ..., server_version: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., has_tokenizer: _Optional[bool] = ..., has_chat_template: _Optional[bool] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., bos_token_id: _Optional[int] = ..., limits: _Optional[_Mapping[str, int]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("aborted",)
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    aborted: bool
    def __init__(self, aborted: _Optional[bool] = ...) -> None: ...

class GetClusterRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchClusterRequest(_message.Message):
    __slots__ = ("interval_s",)
    INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    interval_s: float
    def __init__(self, interval_s: _Optional[float] = ...) -> None: ...

class Instance(_message.Message):
    __slots__ = ("id", "devices", "tensor_parallel_size", "running", "kv_used_pages", "kv_total_pages", "kv_cached_pages", "paused", "paused_degree", "phase", "placement")
    ID_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    KV_USED_PAGES_FIELD_NUMBER: _ClassVar[int]
    KV_TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    KV_CACHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    PAUSED_DEGREE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    id: int
    devices: _containers.RepeatedScalarFieldContainer[int]
    tensor_parallel_size: int
    running: int
    kv_used_pages: int
    kv_total_pages: int
    kv_cached_pages: int
    paused: int
    paused_degree: int
    phase: str
    placement: Placement
    def __init__(self, id: _Optional[int] = ..., devices: _Optional[_Iterable[int]] = ..., tensor_parallel_size: _Optional[int] = ..., running: _Optional[int] = ..., kv_used_pages: _Optional[int] = ..., kv_total_pages: _Optional[int] = ..., kv_cached_pages: _Optional[int] = ..., paused: _Optional[int] = ..., paused_degree: _Optional[int] = ..., phase: _Optional[str] = ..., placement: _Optional[_Union[Placement, _Mapping]] = ...) -> None: ...

class DeviceMemory(_message.Message):
    __slots__ = ("device", "budget_bytes", "weight_bytes", "kv_bytes", "kv_used_bytes")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    device: int
    budget_bytes: int
    weight_bytes: int
    kv_bytes: int
    kv_used_bytes: int
    def __init__(self, device: _Optional[int] = ..., budget_bytes: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., kv_used_bytes: _Optional[int] = ...) -> None: ...

class Cluster(_message.Message):
    __slots__ = ("state", "instances", "devices", "waiting", "accepted", "degrees", "transformations", "placements")
    STATE_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DEGREES_FIELD_NUMBER: _ClassVar[int]
    TRANSFORMATIONS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    state: ServerState
    instances: _containers.RepeatedCompositeFieldContainer[Instance]
    devices: _containers.RepeatedCompositeFieldContainer[DeviceMemory]
    waiting: int
    accepted: int
    degrees: _containers.RepeatedCompositeFieldContainer[DegreePrograms]
    transformations: _containers.RepeatedCompositeFieldContainer[TransformStatus]
    placements: _containers.RepeatedCompositeFieldContainer[PlacementStatus]
    def __init__(self, state: _Optional[_Union[ServerState, str]] = ..., instances: _Optional[_Iterable[_Union[Instance, _Mapping]]] = ..., devices: _Optional[_Iterable[_Union[DeviceMemory, _Mapping]]] = ..., waiting: _Optional[int] = ..., accepted: _Optional[int] = ..., degrees: _Optional[_Iterable[_Union[DegreePrograms, _Mapping]]] = ..., transformations: _Optional[_Iterable[_Union[TransformStatus, _Mapping]]] = ..., placements: _Optional[_Iterable[_Union[PlacementStatus, _Mapping]]] = ...) -> None: ...

class LayerRange(_message.Message):
    __slots__ = ("first", "end")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    first: int
    end: int
    def __init__(self, first: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Home(_message.Message):
    __slots__ = ("devices",)
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    devices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, devices: _Optional[_Iterable[int]] = ...) -> None: ...

class PlacementStage(_message.Message):
    __slots__ = ("layers", "modules", "homes")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    MODULES_FIELD_NUMBER: _ClassVar[int]
    HOMES_FIELD_NUMBER: _ClassVar[int]
    layers: LayerRange
    modules: PlacementModules
    homes: _containers.RepeatedCompositeFieldContainer[Home]
    def __init__(self, layers: _Optional[_Union[LayerRange, _Mapping]] = ..., modules: _Optional[_Union[PlacementModules, str]] = ..., homes: _Optional[_Iterable[_Union[Home, _Mapping]]] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("head", "stages")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    head: Home
    stages: _containers.RepeatedCompositeFieldContainer[PlacementStage]
    def __init__(self, head: _Optional[_Union[Home, _Mapping]] = ..., stages: _Optional[_Iterable[_Union[PlacementStage, _Mapping]]] = ...) -> None: ...

class PlacementStatus(_message.Message):
    __slots__ = ("kind", "instance", "device", "layers", "state", "layers_switched")
    KIND_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_SWITCHED_FIELD_NUMBER: _ClassVar[int]
    kind: str
    instance: int
    device: int
    layers: LayerRange
    state: str
    layers_switched: int
    def __init__(self, kind: _Optional[str] = ..., instance: _Optional[int] = ..., device: _Optional[int] = ..., layers: _Optional[_Union[LayerRange, _Mapping]] = ..., state: _Optional[str] = ..., layers_switched: _Optional[int] = ...) -> None: ...

class TransformStatus(_message.Message):
    __slots__ = ("tensor_parallel_size", "devices", "state", "programs_left", "estimated_s", "layers_switched", "num_layers")
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROGRAMS_LEFT_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_S_FIELD_NUMBER: _ClassVar[int]
    LAYERS_SWITCHED_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    tensor_parallel_size: int
    devices: _containers.RepeatedScalarFieldContainer[int]
    state: str
    programs_left: int
    estimated_s: float
    layers_switched: int
    num_layers: int
    def __init__(self, tensor_parallel_size: _Optional[int] = ..., devices: _Optional[_Iterable[int]] = ..., state: _Optional[str] = ..., programs_left: _Optional[int] = ..., estimated_s: _Optional[float] = ..., layers_switched: _Optional[int] = ..., num_layers: _Optional[int] = ...) -> None: ...

class DegreePrograms(_message.Message):
    __slots__ = ("tensor_parallel_size", "ready", "num_programs", "num_ready")
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    NUM_PROGRAMS_FIELD_NUMBER: _ClassVar[int]
    NUM_READY_FIELD_NUMBER: _ClassVar[int]
    tensor_parallel_size: int
    ready: bool
    num_programs: int
    num_ready: int
    def __init__(self, tensor_parallel_size: _Optional[int] = ..., ready: _Optional[bool] = ..., num_programs: _Optional[int] = ..., num_ready: _Optional[int] = ...) -> None: ...

class TransformRequest(_message.Message):
    __slots__ = ("tensor_parallel_size", "devices", "variant", "release_weights", "layers_per_step", "wait_for_programs", "running", "order")
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    VARIANT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    WAIT_FOR_PROGRAMS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    tensor_parallel_size: int
    devices: _containers.RepeatedScalarFieldContainer[int]
    variant: TransformVariant
    release_weights: bool
    layers_per_step: int
    wait_for_programs: bool
    running: RunningRequests
    order: ChangeOrder
    def __init__(self, tensor_parallel_size: _Optional[int] = ..., devices: _Optional[_Iterable[int]] = ..., variant: _Optional[_Union[TransformVariant, str]] = ..., release_weights: _Optional[bool] = ..., layers_per_step: _Optional[int] = ..., wait_for_programs: _Optional[bool] = ..., running: _Optional[_Union[RunningRequests, str]] = ..., order: _Optional[_Union[ChangeOrder, str]] = ...) -> None: ...

class TransformResponse(_message.Message):
    __slots__ = ("tensor_parallel_size", "variant", "seconds", "prepare_s", "moved_bytes", "extra_bytes", "steps", "tokens", "paused", "resumed", "awaited_programs", "waited_s")
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    VARIANT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREPARE_S_FIELD_NUMBER: _ClassVar[int]
    MOVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXTRA_BYTES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    AWAITED_PROGRAMS_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    tensor_parallel_size: int
    variant: TransformVariant
    seconds: float
    prepare_s: float
    moved_bytes: int
    extra_bytes: int
    steps: int
    tokens: int
    paused: int
    resumed: int
    awaited_programs: int
    waited_s: float
    def __init__(self, tensor_parallel_size: _Optional[int] = ..., variant: _Optional[_Union[TransformVariant, str]] = ..., seconds: _Optional[float] = ..., prepare_s: _Optional[float] = ..., moved_bytes: _Optional[int] = ..., extra_bytes: _Optional[int] = ..., steps: _Optional[int] = ..., tokens: _Optional[int] = ..., paused: _Optional[int] = ..., resumed: _Optional[int] = ..., awaited_programs: _Optional[int] = ..., waited_s: _Optional[float] = ...) -> None: ...

class GetPlacementRequest(_message.Message):
    __slots__ = ("instance",)
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    instance: int
    def __init__(self, instance: _Optional[int] = ...) -> None: ...

class ReplicateRequest(_message.Message):
    __slots__ = ("layers", "device", "instance", "modules")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    MODULES_FIELD_NUMBER: _ClassVar[int]
    layers: LayerRange
    device: int
    instance: int
    modules: PlacementModules
    def __init__(self, layers: _Optional[_Union[LayerRange, _Mapping]] = ..., device: _Optional[int] = ..., instance: _Optional[int] = ..., modules: _Optional[_Union[PlacementModules, str]] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("layers", "device", "instance", "modules")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    MODULES_FIELD_NUMBER: _ClassVar[int]
    layers: LayerRange
    device: int
    instance: int
    modules: PlacementModules
    def __init__(self, layers: _Optional[_Union[LayerRange, _Mapping]] = ..., device: _Optional[int] = ..., instance: _Optional[int] = ..., modules: _Optional[_Union[PlacementModules, str]] = ...) -> None: ...

class MigrateRequest(_message.Message):
    __slots__ = ("layers", "device", "instance", "modules", "move_kv")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    MODULES_FIELD_NUMBER: _ClassVar[int]
    MOVE_KV_FIELD_NUMBER: _ClassVar[int]
    layers: LayerRange
    device: int
    instance: int
    modules: PlacementModules
    move_kv: bool
    def __init__(self, layers: _Optional[_Union[LayerRange, _Mapping]] = ..., device: _Optional[int] = ..., instance: _Optional[int] = ..., modules: _Optional[_Union[PlacementModules, str]] = ..., move_kv: _Optional[bool] = ...) -> None: ...

class ScaleOutRequest(_message.Message):
    __slots__ = ("device", "instance")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    device: int
    instance: int
    def __init__(self, device: _Optional[int] = ..., instance: _Optional[int] = ...) -> None: ...

class ScaleInRequest(_message.Message):
    __slots__ = ("device", "instance")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    device: int
    instance: int
    def __init__(self, device: _Optional[int] = ..., instance: _Optional[int] = ...) -> None: ...

class PlacementReport(_message.Message):
    __slots__ = ("kind", "instance", "device", "layers", "seconds", "copied_bytes", "shared_bytes", "kv_moved_bytes", "device_bytes_delta", "steps", "recomputed")
    KIND_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    COPIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_MOVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_DELTA_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_FIELD_NUMBER: _ClassVar[int]
    kind: str
    instance: int
    device: int
    layers: LayerRange
    seconds: float
    copied_bytes: int
    shared_bytes: int
    kv_moved_bytes: int
    device_bytes_delta: _containers.RepeatedScalarFieldContainer[int]
    steps: int
    recomputed: int
    def __init__(self, kind: _Optional[str] = ..., instance: _Optional[int] = ..., device: _Optional[int] = ..., layers: _Optional[_Union[LayerRange, _Mapping]] = ..., seconds: _Optional[float] = ..., copied_bytes: _Optional[int] = ..., shared_bytes: _Optional[int] = ..., kv_moved_bytes: _Optional[int] = ..., device_bytes_delta: _Optional[_Iterable[int]] = ..., steps: _Optional[int] = ..., recomputed: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_s",)
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    timeout_s: float
    def __init__(self, timeout_s: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("aborted",)
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    aborted: int
    def __init__(self, aborted: _Optional[int] = ...) -> None: ...

class SetPolicyRequest(_message.Message):
    __slots__ = ("policy",)
    POLICY_FIELD_NUMBER: _ClassVar[int]
    policy: str
    def __init__(self, policy: _Optional[str] = ...) -> None: ...

class SetPolicyResponse(_message.Message):
    __slots__ = ("previous_policy",)
    PREVIOUS_POLICY_FIELD_NUMBER: _ClassVar[int]
    previous_policy: str
    def __init__(self, previous_policy: _Optional[str] = ...) -> None: ...
