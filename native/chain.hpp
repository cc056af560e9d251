// The chain done step by step on a list of candidates, in any order: the slow way, which is right by its
// simplicity.
//
// Owns what each named step does to a list, in llama.cpp's rules for lists that are sorted or cut already.
// Must not know random draws of tokens, nor the fast way.
#pragma once

#include "dry.hpp"
#include "generator.hpp"
#include "history.hpp"
#include "params.hpp"
#include "stages.hpp"

namespace llmrun {

// A logit after the penalties for a token that occurred `count` times.
float penalized(float logit, int32_t count, const SamplerParams& params);

// What the steps of one call look at besides the list.
struct Surroundings {
    const SamplerParams& params;
    const TokenCounts& counts;
    const History& history;
    Dry& dry;
    Generator& xtc_random;
};

// The first of all steps: the list has to be ascending by id. Throws BadLogits.
void apply_logit_bias(Candidates& candidates, const SamplerParams& params);

// Throws BadLogits when a penalty leaves a logit that is no number, or none that is finite.
void apply(Step step, Candidates& candidates, const Surroundings& surroundings);

// The later steps divide by the largest probability and would make NaN of -inf alone: throws BadLogits then.
void require_possible(Candidates& candidates);

}  // namespace llmrun
