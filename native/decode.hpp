// Decode steps: llama_decode, then a token for each row, in one call and without the interpreter.
//
// Owns llama_batch's layout and the end of a run of steps; must not know Python, nor how llama.cpp computes. After a
// decode call, the processor's caches hold weights: every object of the interpreter that a step touches costs 20 times
// what it costs when it is repeated.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "gate.hpp"
#include "rows.hpp"
#include "suffixes.hpp"

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

// A sequence's part of a batch: the token to decode, and what samples the next one.
struct RunRow {
    Sampler* sampler;  // no two rows have the same one
    int32_t token;
    int32_t position;
    int32_t sequence;
    // What drafts its next tokens, and whether drafts pay; null without drafts.
    SuffixAutomaton* lookup = nullptr;
    Gate* gate = nullptr;
};

struct RunStep {
    double decode_seconds;
    double seconds;  // from the beginning of the run to the sampled tokens
};

struct Run {
    size_t n_steps = 0;            // in total
    std::vector<RunStep> steps;    // those that were not taken
    std::vector<int32_t> sampled;  // [steps][rows]
    int32_t decode_status = 0;     // of the decode call after the steps, if one failed
    std::vector<size_t> failed;    // rows whose token of the last step is not sampled
};

// A run ends with the step in which one of these is reached.
struct RunLimits {
    size_t steps;
    double seconds;
    const std::atomic<bool>& interrupted;
    // If any, it takes the steps so far when the seconds have passed, and returns the seconds until it takes the next
    // ones; a negative number ends the run.
    std::function<double(const Run&)> take;
    // decode() returns before it has computed: steps are taken while the next one is computed. If that ends the run, it
    // ends with the next one.
    bool overlaps = false;
};

// Decodes a token of each row and samples the next ones, again and again, until an end token, a limit, or before a step
// in which a draft may pay; there may be no step before that.
//
// batch: its arrays hold at least as many tokens, each in one sequence; overwritten.
Run decode_run(const Decoder& decoder, void* context, const void* vocabulary, LlamaBatch& batch,
               std::span<const RunRow> rows, const RunLimits& limits);

}  // namespace llmrun
