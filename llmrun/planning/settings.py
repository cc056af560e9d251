"""The settings of an engine that change its speed, as one value.

Owns how they get into a Load and into the engine's environment, their names in words, and which of them can change
answers too; must not know which are fast.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace

from llmrun.planning.plan import LoadPreferences
from llmrun.protocol.loading import Load

SPINS = 8000
"""How often an idle thread of libgomp looks for work before it sleeps, as the engine has it: part of a millisecond."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How an engine computes.

    Other kernels round otherwise, and where two tokens are nearly as likely as each other that changes a greedy answer:
    flash attention, repack, and with flash attention the threads of decode. A quantized KV cache loses precision, too.

    Attributes:
        threads: for decode.
        threads_batch: for prefill.
        n_ubatch: most tokens that are computed at once in prefill.
        flash_attention: as in Load.
        kv_type: of keys and values in the KV cache.
        repack: as in Load.
        mmap: as in Load.
        spins: of libgomp's threads, see SPINS.
        huge_pages: memory comes in pages of 2 MiB (glibc's malloc asks for them).
    """

    threads: int
    threads_batch: int
    n_ubatch: int = 512
    flash_attention: str = "auto"
    kv_type: str = "f16"
    repack: bool = True
    mmap: bool = True
    spins: int = SPINS
    huge_pages: bool = False

    @classmethod
    def of(cls, load: Load) -> EngineSettings:
        """What a Load says."""
        return cls(
            threads=load.threads,
            threads_batch=load.threads_batch or load.threads,
            n_ubatch=load.n_ubatch,
            flash_attention=load.flash_attention,
            kv_type=load.kv_type_k,
            repack=load.repack,
            mmap=load.mmap,
        )

    def applied(self, load: Load) -> Load:
        """The same Load with these settings."""
        return replace(
            load,
            threads=self.threads,
            threads_batch=self.threads_batch,
            n_ubatch=self.n_ubatch,
            flash_attention=self.flash_attention,
            kv_type_k=self.kv_type,
            kv_type_v=self.kv_type,
            repack=self.repack,
            mmap=self.mmap,
        )

    def wished(self, load: Load, wishes: LoadPreferences, *, without_flash: bool) -> Load:
        """The same Load with these settings, as far as the user did not say otherwise and there is memory for them.

        Args:
            without_flash: there is, for attention without flash attention.
        """
        found = self.applied(load)
        if wishes.threads is not None:
            found = replace(found, threads=load.threads, threads_batch=load.threads_batch)
        keeps_flash = wishes.flash_attention != "auto" or (found.flash_attention == "off" and not without_flash)
        if keeps_flash or (wishes.cache_type_k, wishes.cache_type_v) != ("f16", "f16"):
            flash, type_k, type_v = load.flash_attention, load.kv_type_k, load.kv_type_v
            found = replace(found, flash_attention=flash, kv_type_k=type_k, kv_type_v=type_v)
        return found

    @property
    def environment(self) -> dict[str, str]:
        """Variables that the engine process needs from its start on; none by default."""
        variables = {}
        if self.spins != SPINS:
            variables["GOMP_SPINCOUNT"] = str(self.spins)
        if self.huge_pages:
            others = [os.environ.get("GLIBC_TUNABLES", ""), "glibc.malloc.hugetlb=1"]
            variables["GLIBC_TUNABLES"] = ":".join(filter(None, others))
        return variables

    @property
    def loads_as_usual(self) -> bool:
        """Whether weights that were loaded before anybody asked for these settings will do."""
        return self.repack and self.mmap and not self.environment

    def changes(self, default: EngineSettings, *, in_answers: bool = False) -> tuple[str, ...]:
        """What differs from other settings, in words, e.g. ("repack off", "2 batch threads").

        Args:
            in_answers: only what a greedy answer can depend on.
        """
        names = _ROUNDING if in_answers else [field.name for field in fields(self)]
        return tuple(
            words(name, getattr(self, name)) for name in names if getattr(self, name) != getattr(default, name)
        )


_ROUNDING = ("threads", "flash_attention", "kv_type", "repack")


_WORDS = {"flash_attention": "flash attention", "kv_type": "KV cache", "huge_pages": "huge pages"}
_COUNTS = {"threads": "thread", "threads_batch": "batch thread"}


def words(name: str, value: object) -> str:
    """A setting as people say it, e.g. "repack off", "1 thread", "ubatch 256"."""
    if name in _COUNTS:
        return f"{value} {_COUNTS[name]}{'' if value == 1 else 's'}"
    if name == "n_ubatch":
        return f"ubatch {value}"
    if name == "spins":
        return f"idle threads spin {value:,} times" if value else "idle threads sleep at once"
    shown = ("on" if value else "off") if isinstance(value, bool) else str(value)
    return f"{_WORDS.get(name, name)} {shown}"
