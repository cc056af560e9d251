"""Tiny GGUF models with a multi-token-prediction (NextN) head, by hand-made weights.

The text is a deterministic function of the history. x -> next(x) is one of three random maps A, B, C of the last token:
  C(x) if a recency-weighted mean of a token feature r2 is positive (full attention over the whole history),
  else B(x) if an exponential mean of a feature r is positive (state of the gated delta net; its convolution mixes in
  the token before, so both recurrent states matter),
  else A(x).                                          (without recurrent layers: only C or A)
So a wrong KV cell, a stale recurrent state, or a lost cell of the head changes the text or the drafts.

The head computes the same from the hidden state (the mean of r is in it) and its own attention (the mean of r2), and
hands on a hidden state of the same meaning, so that one head can be used repeatedly. Its output matrix is wrong for a
share 1 - RATE of the tokens: about that share of drafted tokens is rejected (the text repeats itself after about 100
tokens, so the rate depends on the seed: 65 to 90 % at rate 0.7). Rate 0 makes every draft wrong.

qwen35: hybrid (layers 0-2 recurrent, 3 full attention), all feed-forward networks dense.
glm4moe: full attention; llama.cpp wants experts there: the routed ones are zero, a shared one works.
step35: full attention (and one idle sliding-window layer), dense; chained heads.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFWriter, TokenType

D, M = 256, 80  # n_embd; width of a token's random code
CONST, R, R2, MEAN_R, MEAN_R2 = 3 * M, 3 * M + 1, 3 * M + 2, 3 * M + 3, 3 * M + 4  # other dimensions
SLOTS = 0, M, 2 * M  # code; code if the mean of r is positive; code if the mean of r2 is positive
C = 20.0  # the constant; it dominates every norm, so that all scales are known
UNIT = C / np.sqrt(D)  # a normalized value times this is the raw value
HEADS, HEAD = 2, 64  # query heads; head size. One key head
FF, STEEP = 4 * M, 300.0
STATE, KERNEL = 32, 4
BETA = 0.1  # weight of the newest token in the mean of r
SHARPNESS = 0.6  # of attention: how much newer tokens count more in the mean of r2
VALUE, GATE = 20.0, 4.0
N_TRUNK = 4
PRIORITY = 1.0, 3.0, 9.0
GAIN = 3.0


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def byte_letters() -> list[str]:
    """GPT-2's printable characters of the 256 bytes."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in keep else chr(next(others)) for byte in range(256)]


def small_vocabulary(writer: GGUFWriter) -> tuple[list[str], list[int]]:
    letters = byte_letters()
    merges = [f"{a} {b}" for a in "bcdfghjklmnpqrstvwxyz" for b in "aeiou"]
    merges += [f"{letters[32]} {a}" for a in "abcdefghijklmnopqrstuvwxyz"]
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*letters, *(merge.replace(" ", "") for merge in merges), *specials]
    types = [TokenType.NORMAL] * (len(tokens) - 3) + [TokenType.CONTROL] * 3
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(len(tokens) - 3)
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_add_bos_token(False)
    writer.add_chat_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return tokens, [int(each) for each in types]


class Model:
    def __init__(self, tokens: list[str], types: list[int], rate: float, rng: np.random.Generator) -> None:
        self.n = len(tokens)
        shown = [each for each in range(self.n) if types[each] == TokenType.NORMAL and _is_plain(tokens[each])]
        self.shown = np.array(shown)  # the text consists of these; others only occur in prompts
        self.codes = rng.standard_normal((self.n, M)).astype(np.float32)
        self.codes /= np.linalg.norm(self.codes, axis=1, keepdims=True)
        self.features = (rng.uniform(0.3, 1, (self.n, 2)) * rng.choice([-1, 1], (self.n, 2))).astype(np.float32)
        # Each map leads to tokens that turn its mean around: otherwise the text soon ends in a short cycle.
        r, r2 = self.features.T > 0
        self.maps = [self._map(self.shown[each[shown]], rng) for each in (r & r2, ~r & r2, ~r2)]
        self.after = dict(zip(shown, np.roll(shown, 1), strict=True))  # what the head drafts instead
        order = np.array(sorted(shown, key=lambda each: (r[each], r2[each], rng.random())))
        n_wrong = round((1 - rate) * len(shown))  # equally many of each kind
        self.wrong = order[np.linspace(0, len(shown) - 1, n_wrong).astype(int)]

    def _map(self, ends: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """token -> one of the ends, equally many to each."""
        to = np.zeros(self.n, np.int64)
        to[self.shown] = rng.permutation(np.resize(rng.permutation(ends), len(self.shown)))
        return to

    def embeddings(self) -> np.ndarray:
        rows = zeros(self.n, D)
        rows[:, :M], rows[:, CONST] = self.codes, C
        rows[:, R], rows[:, R2] = self.features.T
        return rows

    def output(self, *, drafts: bool) -> np.ndarray:
        rows = zeros(self.n, D)
        for start, to, priority in zip(SLOTS, self.maps, PRIORITY, strict=True):
            drawn = to.copy()
            if drafts:
                drawn[self.wrong] = [self.after[each] for each in to[self.wrong]]
            np.add.at(rows[:, start : start + M], drawn[self.shown], GAIN * priority * self.codes[self.shown])
        return rows


def _is_plain(token: str) -> bool:
    return bool(token) and all(each == "Ġ" or (each.isascii() and (each.isalnum() or each in ",.")) for each in token)


def feed_forward(*, hybrid: bool, active: bool) -> dict[str, np.ndarray]:
    gate, up, down = zeros(FF, D), zeros(FF, D), zeros(D, FF)
    if active:
        cases = [(MEAN_R, SLOTS[1], 0)] if hybrid else []
        for mean, slot, start in [*cases, (MEAN_R2, SLOTS[2], 2 * M)]:
            for j in range(M):
                for sign, unit in ((1, start + j), (-1, start + M + j)):  # silu(y + 1/2) - silu(y - 1/2): a step
                    gate[unit, mean], gate[unit, CONST] = STEEP * UNIT, sign * 0.5 / np.sqrt(D)
                    up[unit, j], down[slot + j, unit] = UNIT, sign
    return {"ffn_gate": gate, "ffn_up": up, "ffn_down": down}


def attention(n_rot: int, *, gated: bool, normed: bool, active: bool) -> dict[str, np.ndarray]:
    """Query and key are constant: the score depends only on the distance, by RoPE."""
    n_pairs = n_rot // 2
    query, key, value, out = zeros(HEADS, HEAD * (1 + gated), D), zeros(HEAD, D), zeros(HEAD, D), zeros(D, HEADS * HEAD)
    size = np.sqrt(HEAD / n_pairs) * (1 if normed else SHARPNESS)  # 1: RMS 1
    query[:, :n_pairs, CONST] = key[:n_pairs, CONST] = size / np.sqrt(D)
    value[0, R2] = UNIT
    if active:
        out[MEAN_R2, [0, HEAD]] = (2 if gated else 1) / HEADS  # the gate is sigmoid(0)
    names = {"attn_q": query.reshape(-1, D), "attn_k": key, "attn_v": value, "attn_output": out}
    return names | ({"attn_q_norm": zeros(HEAD) + SHARPNESS, "attn_k_norm": zeros(HEAD) + SHARPNESS} if normed else {})


def delta_net(*, active: bool) -> dict[str, np.ndarray]:
    per_const = 1 / np.sqrt(D)
    qkv, conv = zeros(3 * STATE, D), zeros(3 * STATE, KERNEL)
    qkv[0, CONST] = qkv[STATE, CONST] = 10 * per_const  # one key, always the same
    qkv[2 * STATE, CONST] = VALUE * per_const
    qkv[2 * STATE + 1, R], qkv[2 * STATE + 2, R] = UNIT, -UNIT  # silu(u) - silu(-u) = u
    conv[:, -1] = 1
    conv[2 * STATE + 1 : 2 * STATE + 3, -2:] = 0.5
    gate, beta, out = zeros(STATE, D), zeros(1, D), zeros(D, STATE)
    gate[:, CONST] = GATE * per_const
    beta[:, CONST] = np.log(BETA / (1 - BETA)) * per_const
    if active:
        size = VALUE / np.sqrt(STATE) * (1 + np.exp(-GATE)) / GATE
        out[MEAN_R, 1:3] = size, -size
    return {
        "attn_qkv": qkv,
        "attn_gate": gate,
        "ssm_conv1d": conv,
        "ssm_dt.bias": zeros(1),
        "ssm_a.": zeros(1),
        "ssm_beta": beta,
        "ssm_alpha": zeros(1, D),
        "ssm_norm": zeros(STATE) + 1,
        "ssm_out": out,
    }


def join(*, hybrid: bool) -> np.ndarray:
    """eh_proj: the token's embedding, and the mean of r carried on from the hidden state."""
    matrix = zeros(D, 2 * D)
    for each in (*range(M), CONST, R, R2):
        matrix[each, each] = UNIT
    if hybrid:
        matrix[MEAN_R, D + MEAN_R] = (1 - BETA) * UNIT
        matrix[MEAN_R, R] = matrix[MEAN_R, D + R] = BETA * UNIT / 2
    return matrix


def write_mtp_model(
    path: Path, arch: str, rate: float, *, heads: int = 1, part: str = "all", seed: int = 4, n_ctx: int = 4096
) -> Path:
    """Write a model.

    Args:
        arch: "qwen35", "glm4moe" or "step35".
        rate: share of the drafted tokens that are right, about.
        part: "all", "trunk" (without heads), or "mtp" (nothing but heads).
    """
    hybrid, rng = arch == "qwen35", np.random.default_rng(seed)
    n_heads = 0 if part == "trunk" else heads
    n_layers = N_TRUNK + n_heads
    writer = GGUFWriter(path, arch)
    tokens, types = small_vocabulary(writer)
    model = Model(tokens, types, rate, rng)

    writer.add_name(f"tiny {arch} with NextN")
    writer.add_block_count(n_layers)
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(D)
    writer.add_feed_forward_length(FF)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(100.0)
    writer.add_rope_dimension_count(HEAD)
    if n_heads:
        writer.add_uint32(f"{arch}.nextn_predict_layers", n_heads)
    if hybrid:
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        writer.add_ssm_conv_kernel(KERNEL)
        writer.add_ssm_inner_size(STATE)
        writer.add_ssm_state_size(STATE)
        writer.add_ssm_time_step_rank(1)
        writer.add_ssm_group_count(1)
        writer.add_uint32(f"{arch}.full_attention_interval", N_TRUNK)
    if arch == "glm4moe":
        writer.add_expert_count(2)
        writer.add_expert_used_count(1)
        writer.add_expert_shared_count(1)
        writer.add_expert_feed_forward_length(FF)
        writer.add_leading_dense_block_count(N_TRUNK)
    if arch == "step35":
        writer.add_expert_feed_forward_length(FF)
        writer.add_sliding_window(64)
        writer.add_array(f"{arch}.attention.sliding_window_pattern", [int(i == 1) for i in range(n_layers)])
        writer.add_rope_freq_base_swa(100.0)

    def add(prefix: str, tensors: dict[str, np.ndarray]) -> None:
        for name, tensor in tensors.items():
            suffix = "" if "." in name else ".weight"
            writer.add_tensor(prefix + (name + suffix).removesuffix("."), np.ascontiguousarray(tensor, np.float32))

    ones = zeros(D) + 1
    ffn_norm = "ffn_norm" if arch == "step35" else "post_attention_norm"
    n_rot = HEAD // 2 if arch == "step35" else HEAD  # llama.cpp halves it in full-attention layers
    add("", {"token_embd": model.embeddings(), "output_norm": ones, "output": model.output(drafts=False)})
    last = N_TRUNK - 1
    for i in range(N_TRUNK if part != "mtp" else 0):
        add(f"blk.{i}.", {"attn_norm": ones, ffn_norm: ones})
        if hybrid and i < last:
            add(f"blk.{i}.", delta_net(active=i == 0))
        else:
            add(f"blk.{i}.", attention(n_rot, gated=hybrid, normed=hybrid, active=i == last))
        add(f"blk.{i}.", feed_forward(hybrid=hybrid, active=i == last))
    for i in range(N_TRUNK, n_layers):
        add(f"blk.{i}.", {"attn_norm": ones, ffn_norm: ones})
        add(f"blk.{i}.", attention(n_rot, gated=hybrid, normed=hybrid, active=True))
        ffn = feed_forward(hybrid=hybrid, active=True)
        if arch == "glm4moe":
            shapes = {"ffn_gate_exps": (2, FF, D), "ffn_up_exps": (2, FF, D), "ffn_down_exps": (2, D, FF)}
            add(f"blk.{i}.", {name: zeros(*shape) for name, shape in shapes.items()})
            add(f"blk.{i}.", {"ffn_gate_inp": zeros(2, D), "exp_probs_b.bias": zeros(2)})
            ffn = {f"{name}_shexp": tensor for name, tensor in ffn.items()}
        add(f"blk.{i}.", ffn)
        nextn = {"eh_proj": join(hybrid=hybrid), "enorm": ones, "hnorm": ones, "shared_head_norm": ones}
        nextn["shared_head_head"] = model.output(drafts=True)
        add(f"blk.{i}.nextn.", nextn)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
