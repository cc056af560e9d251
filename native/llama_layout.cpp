// Where llama.cpp's and ggml's structs have the fields that Python reads and writes by ctypes: checked by the compiler,
// nothing here runs. Needs the headers of the pinned llama-cpp-python; tests/upstream compares the same numbers with
// the structs written down in llmrun/engine/llama/.
#include <cstddef>

#include "ggml.h"
#include "ggml_kernels.hpp"
#include "llama.h"

#define SIZE(structure, bytes) static_assert(sizeof(structure) == (bytes), #structure " has another size")
#define FIELD(structure, field, place, bytes)                                                          \
  static_assert(offsetof(structure, field) == (place), #structure "." #field " is at another offset"); \
  static_assert(sizeof(structure::field) == (bytes), #structure "." #field " has another size")

#if SIZE_MAX > 0xffffffff  // the engine refuses to start on 32-bit machines

// ggml.py
SIZE(ggml_tensor, 336);
FIELD(ggml_tensor, type, 0, 4);
FIELD(ggml_tensor, buffer, 8, 8);
FIELD(ggml_tensor, ne, 16, 32);
FIELD(ggml_tensor, nb, 48, 32);
FIELD(ggml_tensor, op, 80, 4);
FIELD(ggml_tensor, op_params, 84, 64);
FIELD(ggml_tensor, flags, 148, 4);
FIELD(ggml_tensor, src, 152, 80);
FIELD(ggml_tensor, view_src, 232, 8);
FIELD(ggml_tensor, view_offs, 240, 8);
FIELD(ggml_tensor, data, 248, 8);
FIELD(ggml_tensor, name, 256, 64);
FIELD(ggml_tensor, extra, 320, 8);
FIELD(ggml_tensor, padding, 328, 8);

// ggml_kernels.hpp
static_assert(sizeof(llmrun::ggml::Tensor) == sizeof(ggml_tensor) && offsetof(llmrun::ggml::Tensor, extra) == 320);
static_assert(llmrun::ggml::f16 == GGML_TYPE_F16 && llmrun::ggml::flash_attn_ext == GGML_OP_FLASH_ATTN_EXT);
static_assert(llmrun::ggml::f32 == GGML_TYPE_F32 && llmrun::ggml::mul_mat == GGML_OP_MUL_MAT && llmrun::ggml::mul_mat_id == GGML_OP_MUL_MAT_ID);

// quants.py, which needs no more than the beginning
FIELD(ggml_type_traits, type_name, 0, 8);
FIELD(ggml_type_traits, blck_size, 8, 8);
FIELD(ggml_type_traits, blck_size_interleave, 16, 8);
FIELD(ggml_type_traits, type_size, 24, 8);
FIELD(ggml_type_traits, is_quantized, 32, 1);
FIELD(ggml_type_traits, to_float, 40, 8);

// ggml.py, for timing
SIZE(ggml_init_params, 24);
FIELD(ggml_init_params, mem_size, 0, 8);
FIELD(ggml_init_params, mem_buffer, 8, 8);
FIELD(ggml_init_params, no_alloc, 16, 1);

// What llama-cpp-python mirrors, and library.py and quantization.py use
SIZE(llama_model_params, 80);
FIELD(llama_model_params, devices, 0, 8);
FIELD(llama_model_params, tensor_buft_overrides, 8, 8);
FIELD(llama_model_params, n_gpu_layers, 16, 4);
FIELD(llama_model_params, split_mode, 20, 4);
FIELD(llama_model_params, load_mode, 24, 4);
FIELD(llama_model_params, lazy_mode, 28, 4);
FIELD(llama_model_params, main_gpu, 32, 4);
FIELD(llama_model_params, tensor_split, 40, 8);
FIELD(llama_model_params, progress_callback, 48, 8);
FIELD(llama_model_params, progress_callback_user_data, 56, 8);
FIELD(llama_model_params, kv_overrides, 64, 8);
FIELD(llama_model_params, vocab_only, 72, 1);
FIELD(llama_model_params, check_tensors, 73, 1);
FIELD(llama_model_params, use_extra_bufts, 74, 1);
FIELD(llama_model_params, no_host, 75, 1);
FIELD(llama_model_params, no_alloc, 76, 1);
FIELD(llama_model_params, load_mtp, 77, 1);

SIZE(llama_context_params, 160);
FIELD(llama_context_params, n_ctx, 0, 4);
FIELD(llama_context_params, n_batch, 4, 4);
FIELD(llama_context_params, n_ubatch, 8, 4);
FIELD(llama_context_params, n_seq_max, 12, 4);
FIELD(llama_context_params, n_rs_seq, 16, 4);
FIELD(llama_context_params, n_outputs_max, 20, 4);
FIELD(llama_context_params, n_outputs_max_per_seq, 24, 4);
FIELD(llama_context_params, n_threads, 28, 4);
FIELD(llama_context_params, n_threads_batch, 32, 4);
FIELD(llama_context_params, ctx_type, 36, 4);
FIELD(llama_context_params, rope_scaling_type, 40, 4);
FIELD(llama_context_params, pooling_type, 44, 4);
FIELD(llama_context_params, attention_type, 48, 4);
FIELD(llama_context_params, flash_attn_type, 52, 4);
FIELD(llama_context_params, rope_freq_base, 56, 4);
FIELD(llama_context_params, rope_freq_scale, 60, 4);
FIELD(llama_context_params, yarn_ext_factor, 64, 4);
FIELD(llama_context_params, yarn_attn_factor, 68, 4);
FIELD(llama_context_params, yarn_beta_fast, 72, 4);
FIELD(llama_context_params, yarn_beta_slow, 76, 4);
FIELD(llama_context_params, yarn_orig_ctx, 80, 4);
FIELD(llama_context_params, defrag_thold, 84, 4);
FIELD(llama_context_params, cb_eval, 88, 8);
FIELD(llama_context_params, cb_eval_user_data, 96, 8);
FIELD(llama_context_params, type_k, 104, 4);
FIELD(llama_context_params, type_v, 108, 4);
FIELD(llama_context_params, abort_callback, 112, 8);
FIELD(llama_context_params, abort_callback_data, 120, 8);
FIELD(llama_context_params, embeddings, 128, 1);
FIELD(llama_context_params, offload_kqv, 129, 1);
FIELD(llama_context_params, no_perf, 130, 1);
FIELD(llama_context_params, op_offload, 131, 1);
FIELD(llama_context_params, swa_full, 132, 1);
FIELD(llama_context_params, kv_unified, 133, 1);
FIELD(llama_context_params, samplers, 136, 8);
FIELD(llama_context_params, n_samplers, 144, 8);
FIELD(llama_context_params, ctx_other, 152, 8);

SIZE(llama_batch, 56);
FIELD(llama_batch, n_tokens, 0, 4);
FIELD(llama_batch, token, 8, 8);
FIELD(llama_batch, embd, 16, 8);
FIELD(llama_batch, pos, 24, 8);
FIELD(llama_batch, n_seq_id, 32, 8);
FIELD(llama_batch, seq_id, 40, 8);
FIELD(llama_batch, logits, 48, 8);

SIZE(llama_model_quantize_params, 64);
FIELD(llama_model_quantize_params, nthread, 0, 4);
FIELD(llama_model_quantize_params, ftype, 4, 4);
FIELD(llama_model_quantize_params, output_tensor_type, 8, 4);
FIELD(llama_model_quantize_params, token_embedding_type, 12, 4);
FIELD(llama_model_quantize_params, allow_requantize, 16, 1);
FIELD(llama_model_quantize_params, quantize_output_tensor, 17, 1);
FIELD(llama_model_quantize_params, only_copy, 18, 1);
FIELD(llama_model_quantize_params, pure, 19, 1);
FIELD(llama_model_quantize_params, keep_split, 20, 1);
FIELD(llama_model_quantize_params, dry_run, 21, 1);
FIELD(llama_model_quantize_params, imatrix, 24, 8);
FIELD(llama_model_quantize_params, kv_overrides, 32, 8);
FIELD(llama_model_quantize_params, tt_overrides, 40, 8);
FIELD(llama_model_quantize_params, prune_layers, 48, 8);
FIELD(llama_model_quantize_params, max_buf_size, 56, 8);

SIZE(llama_model_imatrix_data, 24);
FIELD(llama_model_imatrix_data, name, 0, 8);
FIELD(llama_model_imatrix_data, data, 8, 8);
FIELD(llama_model_imatrix_data, size, 16, 8);

SIZE(llama_model_tensor_override, 16);
FIELD(llama_model_tensor_override, pattern, 0, 8);
FIELD(llama_model_tensor_override, type, 8, 4);

SIZE(llama_model_kv_override, 264);
FIELD(llama_model_kv_override, tag, 0, 4);
FIELD(llama_model_kv_override, key, 4, 128);
FIELD(llama_model_kv_override, val_str, 136, 128);

#endif
