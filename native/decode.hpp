// Decode steps: llama_decode, then a token for each row, in one call and without the interpreter.
//
// Owns llama_batch's layout and the end of a run of steps; must not know Python, nor how llama.cpp computes. After a
// decode call, the processor's caches hold weights: every object of the interpreter that a step touches costs 20 times
// what it costs when it is repeated.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "rows.hpp"

namespace llmrun {

// llama.h's, see llama_layout.cpp.
struct LlamaBatch {
    int32_t n_tokens;
    int32_t* token;
    float* embd;
    int32_t* pos;
    int32_t* n_seq_id;
    int32_t** seq_id;
    int8_t* logits;
};

// llama.cpp's functions.
struct Decoder {
    int32_t (*decode)(void* context, LlamaBatch batch);
    float* (*logits)(void* context, int32_t row);  // waits for the computation
    bool (*is_end)(const void* vocabulary, int32_t token);
};

struct RunStep {
    int32_t fed;      // the token that was decoded
    int32_t sampled;  // the one that was sampled then
    double decode_seconds;
    double seconds;  // from the beginning of the run to the sampled token
};

// A run ends with the step in which one of these is reached.
struct RunLimits {
    size_t steps;
    double seconds;
    const std::atomic<bool>& interrupted;
};

struct Run {
    std::vector<RunStep> steps;
    int32_t decode_status = 0;       // of the decode call after the steps, if one failed
    Status status = Status::chosen;  // of the last step; otherwise its token is not sampled
};

// Decodes the batch's only token and samples the next one, again and again, until an end token or a limit. Changes the
// batch.
Run decode_run(const Decoder& decoder, void* context, const void* vocabulary, LlamaBatch& batch, Sampler& sampler,
               const RunLimits& limits);

}  // namespace llmrun
