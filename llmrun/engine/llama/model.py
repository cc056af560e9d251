"""The weights of one model file: loading, progress, metadata, and the sizes of the buffers that llama.cpp allocates."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrun import _native
from llmrun.engine.llama.devices import DeviceParameters, add_workers, gpus
from llmrun.engine.llama.library import import_llama, kernels, use_variant
from llmrun.engine.llama.vocabulary import SPACE_CHANGES, STRIPS_ACCENTS, LlamaVocabulary
from llmrun.errors import BadModelError, CancelledError
from llmrun.protocol.settings import DEFAULTS, EngineSettings
from llmrun.system import file_identity

if TYPE_CHECKING:  # loading the weights does not wait for these imports
    from llmrun.gguf.header import Header
    from llmrun.protocol.adapters import Adapter
    from llmrun.protocol.loading import DeviceBuffer, Load


_KV_BOOL = 2  # llama_model_kv_override_type
_SPACE_RULE = b"llmrun.tokenizer.space_prefix"  # metadata.SPACE_PREFIX, for which the weights would wait
_RULES_WITHIN = 1 << 20  # bytes of a file before its vocabulary, generously
# Lines of llama.cpp's log about buffers, whose sizes its C API does not tell.
_SIZE = re.compile(r"(\S+) +(\w+)(?: state)? buffer size = +([\d.]+) MiB")
_WEIGHTS = "model"
_FAILURE = re.compile(r"failed to allocate (\S+) buffer of size (\d+)")
_MIB = 1 << 20
_installed: list[Any] = []  # the callback that llama.cpp has now


def experts_of(layers: tuple[int, ...]) -> str:
    """Return the pattern of the names of these layers' experts, as llama.cpp's --n-cpu-moe has it."""
    return rf"blk\.({'|'.join(map(str, layers))})\.ffn_(up|down|gate|gate_up)_(ch|)exps"


def _has_text_rules(path: Path) -> bool:
    """Return whether a file has rules for its text, so that llama.cpp is not to change spaces.

    The key stands before the vocabulary. Reading all of the header would hold up the weights.
    """
    with suppress(OSError), path.open("rb") as file:
        return _SPACE_RULE in file.read(_RULES_WITHIN)
    return False


class BufferLog:
    """llama.cpp's log on its way to the native filter, and the sizes of buffers that it tells."""

    def __init__(self) -> None:
        self.failed: DeviceBuffer | None = None
        """The buffer that the last context failed to allocate."""
        self._sizes: dict[tuple[str, str], int] = {}  # device, purpose -> bytes
        self._forward = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(
            _native.log_callback_address
        )

    def install(self, llama: Any, *, verbose: bool) -> None:
        """Make llama.cpp log here; without GPUs directly to the filter, because a callback in Python slows starts."""
        receiver = self.add if gpus() else _native.log_callback_address
        callback = llama.llama_log_callback(receiver)
        llama.llama_log_set(callback, ctypes.c_void_p(int(verbose)))
        _installed[:] = [callback]  # lives as long as llama.cpp may log, longer than this model

    def add(self, level: int, text: bytes, verbose: Any) -> None:
        if b"buffer" in text:
            self.read(text.decode("utf-8", "replace"))
        self._forward(level, text, verbose)

    def read(self, line: str) -> None:
        if match := _SIZE.search(line):
            device, purpose, size = match.groups()
            key = device.removesuffix("_Mapped"), purpose
            self._sizes[key] = self._sizes.get(key, 0) + round(float(size) * _MIB)
        elif match := _FAILURE.search(line):
            from llmrun.protocol.loading import DeviceBuffer

            self.failed = DeviceBuffer(match[1], int(match[2]))

    def begin_context(self, llama: Any, *, verbose: bool) -> None:
        """Forget all buffers but the weights', and receive the log again: another model may have taken it."""
        self.install(llama, verbose=verbose)
        self.failed = None
        self._sizes = {key: size for key, size in self._sizes.items() if key[1] == _WEIGHTS}

    @property
    def buffers(self) -> tuple[DeviceBuffer, ...]:
        """The bytes of each device, or of host memory such as "CPU" and "CUDA_Host"."""
        from llmrun.protocol.loading import DeviceBuffer

        devices = dict.fromkeys(device for device, _ in self._sizes)
        return tuple(
            DeviceBuffer(device, sum(size for (name, _), size in self._sizes.items() if name == device))
            for device in devices
        )


class LlamaModel:
    """Weights and vocabulary of one model file; the load options are attributes too.

    Attributes:
        description: llama.cpp's, e.g. "llama 135M Q4_1".
        chat_template: Jinja text from the file, or None.
        identities: path -> file_identity() of each file that was read: a file may be replaced while it is in use.
    """

    def __init__(
        self,
        path: str,
        gpu_layers: int,
        flag: _native.CancelFlag,
        *,
        verbose: bool = False,
        repack: bool = True,
        mmap: bool = True,
        cpu_experts: tuple[int, ...] = (),
        workers: tuple[str, ...] = (),
        layer_counts: tuple[int, ...] = (),
        settings: EngineSettings = DEFAULTS,
        draft_heads: bool = False,
        cpu_variant: str = "",
        vocabulary_only: bool = False,
    ) -> None:
        """Load the weights.

        Args:
            flag: setting it stops the load; it also reports the progress.
            verbose: send llama.cpp's whole log to stderr, not only its warnings.
            repack: allow weights to be repacked for this processor's kernels.
            cpu_experts: layers whose experts stay in RAM although the rest of the layer is on a GPU.
            workers, layer_counts, cpu_variant: as in Load; the last one only describes.
            settings: those of DEVICE_SETTINGS.
            draft_heads: as in Load.
            vocabulary_only: load no weights; nothing can be computed then.

        Raises:
            BadModelError: llama.cpp refuses the file; its log has the reason.
            CancelledError: the flag was set.
            UsageError: the settings name a device that does not exist.
        """
        self.llama = llama = import_llama()
        self.path, self.gpu_layers, self.flag = path, gpu_layers, flag
        self.repack, self.mmap, self.cpu_experts = repack, mmap, cpu_experts
        self.workers, self.layer_counts, self.draft_heads = workers, layer_counts, draft_heads
        self.cpu_variant = cpu_variant
        self._devices = DeviceParameters(settings, experts_of(cpu_experts) if cpu_experts else "", layer_counts)
        self.identities: dict[str, str] = {}
        for name in _files_of(Path(path).name):
            self._identify(str(Path(path).with_name(name)))
        self.buffer_log = BufferLog()
        self.buffer_log.install(llama, verbose=verbose)  # looks at free memory before the weights take some
        llama.llama_backend_init()
        if workers:
            add_workers(workers)
        self.pointer = self._load(vocabulary_only=vocabulary_only)
        if flag.is_set:
            raise CancelledError("loading was cancelled")
        if not self.pointer:
            raise BadModelError(f"llama.cpp can't load {Path(path).name}")
        self.vocabulary = LlamaVocabulary(llama, self.pointer)
        self._read_facts()
        self._adapters: dict[str, Any] = {}  # path -> llama_adapter_lora; llama.cpp frees them with the model

    def _read_facts(self) -> None:
        """Set the attributes that llama.cpp reads from the file."""
        llama = self.llama
        self.n_ctx_train = int(llama.llama_model_n_ctx_train(self.pointer))
        self.sliding_window = int(llama.llama_model_n_swa(self.pointer))
        buffer = ctypes.create_string_buffer(256)
        llama.llama_model_desc(self.pointer, buffer, len(buffer))
        self.description = buffer.value.decode("utf-8", "replace")
        template = llama.llama_model_chat_template(self.pointer, None)
        self.chat_template = template.decode("utf-8", "replace") if template else None

    def _load(self, *, vocabulary_only: bool) -> Any:
        """Return the llama_model, null if it can't be loaded."""
        llama = self.llama
        params = llama.llama_model_default_params()
        params.n_gpu_layers = self.gpu_layers
        params.use_extra_bufts = self.repack
        params.vocab_only, params.load_mtp = vocabulary_only, self.draft_heads
        # The vocabulary does it: llama.cpp strips spacing marks too, i.e. vowels of Tamil and Bengali.
        keys = [STRIPS_ACCENTS, *(SPACE_CHANGES if _has_text_rules(Path(self.path)) else ())]
        overrides = (llama.llama_model_kv_override * (len(keys) + 1))()  # ends with an entry of zeros
        for override, key in zip(overrides, keys, strict=False):
            override.key, override.tag, override.value.val_bool = key, _KV_BOOL, False
        params.kv_overrides = overrides
        self._devices.apply(llama, params, Path(self.path))
        # llama.cpp's advice: copies to a GPU are faster from read memory.
        if not self.mmap or self._devices.moves_tensors:
            params.load_mode = llama.LLAMA_LOAD_MODE_NONE
        params.progress_callback = llama.llama_progress_callback(_native.progress_callback_address)
        params.progress_callback_user_data = self.flag.address
        return llama.llama_model_load_from_file(os.fsencode(self.path), params)

    @classmethod
    def of(cls, load: Load, flag: _native.CancelFlag) -> LlamaModel:
        """Load the weights as `load` describes, its variant first; raises as the constructor.

        No other model may be open, but one of the same variant.
        """
        use_variant(load.cpu_variant)
        if load.verbose:
            used = kernels()
            sys.stderr.write(f"llmrun: matrix kernels: {used.name or f'ggml alone, {used.problem}'}\n")
        return cls(
            load.path,
            load.gpu_layers,
            flag,
            verbose=load.verbose,
            repack=load.repack,
            mmap=load.mmap,
            cpu_experts=load.cpu_experts,
            workers=load.workers,
            layer_counts=load.layer_counts,
            settings=load,
            draft_heads=load.draft_heads,
            cpu_variant=load.cpu_variant,
        )

    @cached_property
    def header(self) -> Header:
        from llmrun.gguf.reader import read_header

        return read_header(Path(self.path))

    @cached_property
    def rope_depends_on_window(self) -> bool:
        """Position encoding that changes with the size of the context window (LongRoPE)."""
        return self.header.rope_depends_on_window

    @property
    def is_recurrent(self) -> bool:
        """Layers with a recurrent state instead of keys and values for each token."""
        llama = self.llama
        return bool(llama.llama_model_is_recurrent(self.pointer) or llama.llama_model_is_hybrid(self.pointer))

    @property
    def rerank_template(self) -> str:
        """The template that joins a query and a document for reranking; "" if the file has none."""
        template = self.llama.llama_model_chat_template(self.pointer, b"rerank")
        return template.decode("utf-8", "replace") if template else ""

    @property
    def translates(self) -> bool:
        """An encoder-decoder architecture."""
        llama = self.llama
        return bool(llama.llama_model_has_encoder(self.pointer) and llama.llama_model_has_decoder(self.pointer))

    @property
    def buffers(self) -> tuple[DeviceBuffer, ...]:
        """The memory that llama.cpp allocated for the weights and the last context."""
        return self._devices.by_device(self.buffer_log.buffers)

    @property
    def n_bytes(self) -> int:
        return int(self.llama.llama_model_size(self.pointer))

    @property
    def n_params(self) -> int:
        return int(self.llama.llama_model_n_params(self.pointer))

    @property
    def n_layers(self) -> int:
        return int(self.llama.llama_model_n_layer(self.pointer))

    def is_for(self, load: Load) -> bool:
        """Return whether these weights were loaded with the same options."""
        names = ("path", "gpu_layers", "repack", "mmap", "cpu_experts", "workers", "layer_counts", "cpu_variant")
        if load.draft_heads and not self.draft_heads:
            return False
        return self._devices.are_of(load) and all(getattr(self, name) == getattr(load, name) for name in names)

    def adapter(self, adapter: Adapter) -> Any:
        """Return the llama_adapter_lora of a file, which is read once.

        Raises:
            BadModelError: llama.cpp refuses the file; its log has the reason.
        """
        if adapter.path not in self._adapters:
            self._identify(adapter.path)
            pointer = self.llama.llama_adapter_lora_init(self.pointer, os.fsencode(adapter.path))
            if not pointer:
                raise BadModelError(f"llama.cpp can't use the adapter {Path(adapter.path).name}")
            self._adapters[adapter.path] = pointer
        return self._adapters[adapter.path]

    def _identify(self, path: str) -> None:
        with suppress(OSError):  # llama.cpp reports it
            self.identities[path] = file_identity(Path(path))

    def close(self) -> None:
        self.llama.llama_model_free(self.pointer)


def _files_of(name: str) -> tuple[str, ...]:
    """Return the names of a model's files."""
    if "-of-" not in name:  # an import less, which the weights would wait for
        return (name,)
    from llmrun.gguf.filenames import all_parts

    return all_parts(name)
