"""The native part (native/*.cpp): the sampler chain, drafts, and what llama.cpp's own threads may call.

Describes what native/bindings.cpp defines. Addresses are plain integers for ctypes: `c_void_p(address)`, or
`CALLBACK_TYPE(address)` for functions.
"""

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from mmap import mmap
from typing import Any

class BadLogits(ValueError):  # noqa: N818 - named after what it is about, as in C++
    """A logit is NaN or +inf, or no logit is finite.

    Attributes:
        token: the first one at fault; the first of the vocabulary when no logit is finite.
        logit: its logit; -inf when no logit is finite.
    """

    token: int
    logit: float

class Watermark:
    """A mark that a key leaves in the choice of tokens, the same as transformers leaves and finds.

    One token's candidates are changed behind all steps of the chain: see llmrun/protocol/watermark.py.
    """

    def __init__(self, key: int, *, n_gram: int = 0, share: float = 0.25, bias: float = 2.0) -> None:
        """Take the parameters; they are checked where they are used.

        Args:
            key: 1 to 2**63 - 1.
            n_gram: number of tokens that decide, the candidate being the last; 0: the token before does.
            share: of the vocabulary that is green.
            bias: added to the logits of green tokens.
        """

    def count(self, vocabulary_size: int, tokens: Sequence[int], repeats: bool = False) -> tuple[int, int]:
        """Look through a text; the GIL is released meanwhile.

        Args:
            repeats: count an n-gram again where it occurs again, as transformers does; it is no new evidence.

        Returns:
            The number of tokens that could be judged, and the number of green ones among them.

        Raises:
            ValueError: a parameter is out of its bounds, or a token not in the vocabulary.
        """

def permuted(seed: int, size: int, count: int) -> list[int]:
    """The first of torch.randperm(size) with a CPU generator that has this seed, 0 to 2**32 - 1; for tests."""

class Sampler:
    """One sequence's sampler: llama.cpp's chain, token for token and random draw for random draw.

    Two exceptions: top-p without top-k that leaves over 1024 tokens, of which a few have equal logits, may
    choose another one of those equals; and a token whose logit is -inf is never chosen, whatever overflowed.
    For one thread at a time, which need not be the one that made it.
    """

    def __init__(
        self,
        vocabulary_size: int,
        *,
        seed: int = 0,
        logit_bias: Sequence[tuple[int, float]] = ...,
        dry_breakers: Sequence[Sequence[int]] = ...,
        order: Sequence[str] = ...,
        watermark: Watermark | None = None,
        remember: int = 0,
        exact: bool = False,
        **numbers: Any,
    ) -> None:
        """Take the parameters of llmrun/protocol/params.py, which says what they mean; `numbers` are the other ones.

        Args:
            vocabulary_size: how many logits there are, 1 to 2**24.
            seed: 0 to 2**32 - 1, each of them definite.
            dry_breakers: token sequences that DRY follows no repeat across.
            order: of the steps, by default llama.cpp's, whose names are params.STEPS. One that is missing is off.
                Biases come before all steps, the draw after them. Another order of steps that are on is slower.
                Mirostat has its own chain.
            watermark: comes behind all steps. A greedy answer takes the largest logit behind its bias, and no step
                truncates before it. Not with mirostat.
            remember: how many of the last `sample` calls `explain` can be asked about, each for
                4 * vocabulary_size bytes, taken at its first use.
            exact: do every step on the whole vocabulary, always; for tests.

        Raises:
            TypeError: a value has the wrong type, or there is no parameter of a name.
            ValueError: a value makes no sense, a step is unknown or in the order twice, or a biased token is not
                in the vocabulary.
        """

    def sample(self, address: int, allowed: int | None = None, banned: Iterable[int] = (), accept: bool = False) -> int:
        """Choose the next token; the GIL is released meanwhile.

        With `allowed` or `banned` the result is that of a row in which all other logits are -inf. What the row
        has there is not looked at, NaN neither.

        Args:
            address: of `vocabulary_size` floats, which are only read.
            allowed: address of ceil(vocabulary_size / 32) 32-bit words, which are only read: bit t % 32 of word
                t // 32 is set when token t may be chosen. None and 0 allow all.
            banned: tokens that may not be chosen, whatever their bits.
            accept: add the token to the history, as `accept` does.

        Raises:
            BadLogits: nothing can be sampled from these; the random generators have not moved. `logit` is -inf
                when nothing that is allowed is possible.
            ValueError: an address can't be right, or a banned token is not in the vocabulary.
        """

    def explain(self, back: int, count: int) -> tuple[int, list[tuple[str, int, list[tuple[int, float]]]]]:
        """Tell what each step did in one of the last `sample` calls. Moves nothing.

        Args:
            back: how many calls ago, 0 is the last one. Calls that raised are not counted.
            count: how many of the likeliest tokens to show, of the model's own distribution and of the final one.

        Returns:
            The token that was chosen, and the steps, each (name, remaining, probabilities). The first step is
            "model", where nothing has been done yet; then come, in their order, those that can do anything with
            these parameters: "mask" (`allowed` and `banned`), "logit_bias", and the names of `order`; with
            mirostat "temperature" and "mirostat"; with a watermark "green" is the last. `remaining` is how many tokens
            could be chosen after the step. `probabilities` are [(token, probability)] after the step, of the same
            tokens in the same order in each step: the `count` likeliest at both ends and the chosen one, the model's
            likeliest first. From the step that cut a token on, it has exactly 0.0. The token was drawn from the last
            step's.

        Raises:
            ValueError: that call is not remembered.
        """

    def rewind(self, dropped: int, tokens: Sequence[int]) -> None:
        """Forget the last `dropped` remembered calls, and make `tokens` all that was ever accepted.

        The random generators and mirostat's state go on as they are.

        Raises:
            ValueError: a token is not in the vocabulary; nothing has changed then.
        """

    def undraw(self, count: int) -> None:
        """Take the random generators and mirostat's state back to before the last sample() calls, at most 64."""

    def accept(self, token: int) -> None:
        """Add a token of the answer to the history that the penalties and a watermark look at.

        Raises:
            ValueError: the token is not in the vocabulary.
        """

    def accept_many(self, tokens: Sequence[int]) -> None:
        """Add the tokens that stand before the answer, in one call; the GIL is released meanwhile.

        Raises:
            ValueError: one is not in the vocabulary; nothing has changed then.
        """

    def log_probabilities(self, address: int, token: int, count: int) -> list[tuple[int, float]]:
        """Natural logarithms of the probabilities that the model itself gives, before any step of the chain.

        Args:
            address: as in `sample`.
            token: listed first, whatever its probability.
            count: how many of the likeliest tokens follow, likeliest first (equals by id); fewer when not as
                many are possible. `token` may be among them again.

        Raises:
            BadLogits: these logits give no probabilities.
            ValueError: the token is not in the vocabulary, or the address can't be that of a float.
        """

    def copy(self) -> Sampler:
        """Make an independent sampler that goes on identically; what is remembered is copied too."""

    def random_state(self) -> str:
        """Show the state of the chain's and of XTC's generator; for tests."""

    @property
    def vocabulary_size(self) -> int: ...
    @property
    def exact_count(self) -> int:
        """How many tokens took every step on the whole vocabulary, because a shortlist could not tell."""

    @property
    def bytes_read(self) -> int:
        """Bytes of logits that the last `sample`, if without mask, read: whole cache lines; without its own lists."""

class Status(IntEnum):
    """What became of a row of sample_rows()."""

    CHOSEN = 0
    NOT_A_NUMBER = 1
    """A logit is NaN."""
    INFINITE = 2
    """A logit is +inf."""
    IMPOSSIBLE = 3
    """No logit is finite, of those that the mask and the bans allow."""
    NO_MEMORY = 4

def sample_rows(
    samplers: Sequence[Sampler], addresses: Sequence[int], masks: Sequence[int | None], bans: Sequence[Iterable[int]]
) -> list[tuple[int, int]]:
    """Let each sampler choose a token from its row of logits and accept it; the GIL is released meanwhile.

    The outcome is that of `sample` for one row after the other. From 8 rows on a few threads share the work; they are
    started at the first such call and sleep between calls. In a forked child the calling thread does all of it.

    Args:
        samplers: no two the same.
        addresses: `address` of each.
        masks: `allowed` of each.
        bans: `banned` of each.

    Returns:
        (token, status) of each row, status being a `Status`. Where it is not CHOSEN, token is the first one at fault,
        nothing was accepted, and the row's random generators have not moved; the other rows are not affected.

    Raises:
        TypeError, ValueError: an argument is wrong, or they don't match up; nothing was sampled.
    """

cpu_level: str
"""Which instructions the sampler uses on this CPU: "avx512", "avx2", or "baseline"."""

def skip_strings(data: bytes | mmap, position: int, count: int) -> int:
    """Return the position after some strings of a GGUF file; beyond the data if it ends before them."""

def end_tokens(is_end: int, vocabulary: int, n_tokens: int) -> list[int]:
    """Return the tokens that end an answer; the GIL is released meanwhile.

    Args:
        is_end: address of llama_vocab_is_eog.
        vocabulary: address of the llama_vocab.
    """

def tokens_with(attributes: int, vocabulary: int, n_tokens: int, bits: int) -> list[int]:
    """Return the tokens that have any of some attributes; the GIL is released meanwhile.

    Args:
        attributes: address of llama_vocab_get_attr.
        vocabulary: address of the llama_vocab.
        bits: of enum llama_token_attr.
    """

class Decoder:
    """Decodes and samples without the interpreter, by addresses of llama.cpp's functions.

    Args:
        decode: of llama_decode.
        logits: of llama_get_logits_ith.
        is_end: of llama_vocab_is_eog.
    """

    def __init__(self, decode: int, logits: int, is_end: int) -> None: ...
    def run(
        self,
        context: int,
        vocabulary: int,
        batch: int,
        rows: Sequence[tuple[tuple[int, int, int, bool], Sampler, SuffixAutomaton | None, Gate | None]],
        steps: int,
        seconds: float,
        interrupted: CancelFlag,
        take: Callable[[list[tuple[tuple[int, ...], float, float]]], float] | None = None,
        overlaps: bool = False,
    ) -> tuple[int, int, list[int], list[tuple[tuple[int, ...], float, float]]]:
        """Decode an entry of each sequence and sample the next tokens, again and again; the GIL is released meanwhile.

        Ends with an end token, a failure, the step in which a limit is reached, or before a step in which a draft may
        pay.

        Args:
            context, vocabulary, batch: addresses of a llama_context, a llama_vocab and a llama_batch, which is changed.
            rows: of each sequence, a token with its position and the sequence's id; the sampler, all different, which
                accepts all sampled tokens; and what drafts tokens and decides about drafts, up to this token, or None.
            steps: maximum number of steps, at least 1.
            seconds: maximum time; with take, the time until that is called first.
            interrupted: ends the run when it is set.
            take: takes the steps so far; returns the seconds until it takes the next ones, a negative number to end.

        Returns:
            The status of the last llama_decode; the number of steps, perhaps 0; the rows for which the last one could
            sample no token; and the steps that were not taken: sampled tokens, seconds of llama_decode, and seconds
            from the beginning to these tokens.
        """

class CancelFlag:
    """Stops llama.cpp's work, and shows how far a load has come.

    Must outlive whatever was given its address.
    """

    def __init__(self) -> None: ...
    def set(self) -> None:
        """Make the abort callback answer "abort" and the progress callback "stop"."""

    def clear(self) -> None: ...
    @property
    def is_set(self) -> bool: ...
    @property
    def progress(self) -> float:
        """The last progress reported, 0 to 1."""

    @property
    def n_computed(self) -> int:
        """The operations of graphs that were computed on a processor: calls of the abort callback, never reset."""

    layer: int
    """The layer of an encoder that is being computed, as eval_callback_address has noted it; at first -1."""

    @property
    def address(self) -> int:
        """The callbacks' data pointer."""

abort_callback_address: int
"""bool (void *flag), for llama_set_abort_callback: true once the flag is set."""

eval_callback_address: int
"""bool (void *tensor, bool ask, void *flag), for mtmd_context_params.cb_eval: false once the flag is set.

Notes the layer of a tensor whose name ends in "-" and a number.
"""

progress_callback_address: int
"""bool (float progress, void *flag), for llama_model_params.progress_callback: false stops the load."""

log_callback_address: int
"""void (int level, const char *text, void *verbose), for llama_log_set: whole lines to file descriptor 2.

Only warnings and errors, or all when the pointer `verbose` is not null.
"""

def graph_nodes() -> int:
    """Return the number of nodes of the graph that llama.cpp has last reserved memory for; 0 if its log did not tell.

    Some of them are views, for which there is no operation.
    """

def exit_when_closed(fd: int) -> None:
    """End this process with status 0 as soon as the other end of a pipe or socket is closed.

    No matter who holds the GIL: a native thread watches a duplicate of fd for hang-up. Data not yet read
    does not delay it. On Windows this does nothing.

    Raises:
        OSError: fd is not open.
    """

def available_kernels() -> list[str]:
    """Return the instruction sets that our matrix kernels can use on this processor, the best one last."""

def install_kernels(buffer_type: int, is_host: int, barrier: int, name: str) -> None:
    """Let our kernels compute the products they can, in the processor's backend that has this extra buffer type.

    Args:
        buffer_type: ggml's pointer. Its layout is not checked. It is changed, so only once.
        is_host, barrier: addresses of ggml_backend_buffer_is_host and ggml_barrier.
        name: one of available_kernels().

    Raises:
        ValueError: this processor has no such kernels.
    """

def enable_kernels(are_on: bool) -> None:
    """Switch installed kernels on or off, while nothing computes."""

def products_computed() -> int:
    """Return the number of products that our kernels have computed in this process."""

def can_attend(key_type: int, value_type: int, key_length: int, value_length: int) -> bool:
    """Return whether our kernels compute attention over a KV cache of these types (ggml's numbers) and head lengths."""

def attentions_computed() -> int:
    """Return the number of attention operations that our kernels have computed in this process."""

def read_rate(n_bytes: int, threads: int, seconds: float) -> float:
    """Bytes/s that so many threads read from a buffer of that size, the best of the passes within so many seconds.

    A buffer that fits into a cache is read from there. Two passes are made at least; the GIL is released.

    Raises:
        ValueError: there is nothing to read, or nobody to read it.
        MemoryError: there is no memory for the buffer.
    """

def multiply_add_rate(kind: str, threads: int, seconds: float) -> float:
    """Multiply-adds/s of so many threads, the best of the rounds within so many seconds; the GIL is released.

    Args:
        kind: "int8", of 8-bit integers, as quantized weights are computed with; "half", of 16-bit floats, or of 32-bit
            ones where the processor is faster with those; "single", of 32-bit floats.

    Returns:
        0.0 where the processor has no instruction for it that we know.

    Raises:
        ValueError: there is no such kind, or no thread.
    """

class SuffixAutomaton:
    """Finds where the end of a sequence has occurred in it before: suits llmrun.engine.core.drafts.Drafter.

    A token costs amortised constant time and at most about 130 bytes. For one thread at a time.
    """

    def __init__(self) -> None: ...
    def __len__(self) -> int:
        """How many tokens the sequence has."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens behind the sequence; the GIL is released meanwhile.

        Negative ones, of images and audio, are never drafted, and count as equal.
        """

    def rewind(self, length: int) -> None:
        """Keep only the first so many tokens. The next draft() takes as long as to extend by all of those."""

    def draft(self, most: int) -> tuple[list[int], int]:
        """Tell what followed when the longest possible end of the sequence occurred before, and how long that is.

        Returns:
            `most` tokens, which may repeat themselves, and the length; none and 0 when the last token is new.
        """

    @property
    def draft_begin(self) -> int:
        """Index of the token that the last draft begins with, unless it begins in itself; -1 without a draft."""

class StepShape:
    """A decode step to which a draft may be added.

    Attributes:
        rows: tokens that it decodes without drafts.
        sampled: tokens that it yields without drafts: one per sequence.
    """

    rows: int
    sampled: int

    def __init__(self, rows: int, sampled: int) -> None: ...

class DraftChoice:
    """The number of tokens to draft, and the expected number of tokens for the cost of a plain step.

    Attributes:
        waits: a draft would pay, but drafts have cost too much so far.
    """

    length: int
    rate: float
    waits: bool

class Gate:
    """The draft lengths of one answer, by the cost of decode steps and the acceptance rates so far.

    A cost is relative to the time of a step of one row. Every token of the answer teaches acceptance: whether it was
    drafted rightly, verified or not. By the costs, drafts never take more of an answer than one plain step and 1 % of
    the time of plain decoding. For one thread at a time.

    Args:
        most: maximum length.
        costs: (rows, cost) of the model's steps, ascending; not empty.
        draft_costs: those of the draft model.
        always: drafts are as long as possible, whatever they cost.

    Attributes:
        n_compared: tokens of a draft that are compared with the answer.
        planned_cost: of the planned step, beyond the same step without a draft.
        speedup: expected speed of the answer so far, relative to plain decoding.
    """

    MODEL: int
    """Instead of the length of a match, for drafts of a draft model."""
    n_compared: int
    planned_cost: float
    speedup: float

    def __init__(
        self,
        most: int,
        costs: Sequence[tuple[int, float]],
        draft_costs: Sequence[tuple[int, float]],
        always: bool = False,
    ) -> None: ...
    def set_costs(self, costs: Sequence[tuple[int, float]], draft_costs: Sequence[tuple[int, float]]) -> None:
        """Set what the next steps cost."""

    def choose(self, match: int, limit: int, step: StepShape) -> DraftChoice:
        """Choose the number of tokens to draft, up to `limit`.

        Args:
            match: the number of last tokens that the draft has followed before, or MODEL.
        """

    def credit(self, match: int, step: StepShape) -> float:
        """Return what drafts of this source may cost in a step; infinite if they are always made.

        Args:
            match: as in choose().
        """

    def expected(self, match: int, length: int) -> float:
        """Return the expected number of accepted tokens of a draft."""

    def draft_cost(self, step: StepShape, length: float) -> float:
        """Return one sequence's share of what a draft of this length costs the draft model."""

    def is_worth_prefill(self, n_tokens: int, step: StepShape) -> bool:
        """Return whether the draft model should prefill tokens that it has not seen."""

    def learn(self, match: int, n_accepted: int, missed: bool) -> None:
        """Learn from a draft: its first n_accepted tokens were right, and if missed, the next one was wrong."""

    def learn_sureness(self, sure: bool) -> None:
        """Learn whether the draft model was sure of the first token of a draft."""

    def record_step(self, match: int, step: StepShape, n_drafted: int, n_accepted: int, drafting: float = 0.0) -> None:
        """Account for a step with a draft of this source, and for what it has cost the draft model."""

    def plan(self, drafted: Sequence[int], match: int, step: StepShape, limit: int) -> DraftChoice:
        """Plan a step with a draft; choose how many of its tokens to verify, up to `limit`.

        Args:
            drafted, match: as from SuffixAutomaton.draft().
        """

    def add_model_draft(self, drafted: Sequence[int]) -> None:
        """Add the draft model's draft to the planned step."""

    def set_length(self, length: int, drafting: float) -> None:
        """Set how many tokens the planned step verifies, and what they cost the draft model."""

    def compare(self, tokens: Sequence[int]) -> None:
        """Learn from the planned step and the tokens that came since, if any."""

    def forget(self) -> None:
        """Drop the planned step."""
