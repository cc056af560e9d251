// The steps of the sampler chain as small functions over a list of candidates.
//
// Owns the arithmetic of each step, in llama.cpp's exact rules and expression types (src/llama-sampler.cpp),
// so that the same logits and seed give the same token. Must not know Python, llama.h, or the steps' order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "generator.hpp"

namespace llmrun {

// One token that may still be chosen. Three plain words, so that sorting moves 12 bytes.
struct Candidate {
    int32_t id;
    float logit;
    float p;  // meaningful only after a step that computed probabilities
};

// Memory that some steps need besides the list itself; grows to its largest use and is then kept.
struct Scratch {
    std::vector<Candidate> sorted;
    std::vector<int> buckets;
    std::vector<float> scores;
    std::vector<size_t> order;
};

// What is left of the vocabulary. A view: steps drop candidates by shrinking it.
struct Candidates {
    Candidate* data;
    size_t size;
    bool sorted;  // by logit, largest first
    Scratch* scratch;

    Candidate& operator[](size_t index) { return data[index]; }
    Candidate* begin() { return data; }
    Candidate* end() { return data + size; }
};

// ---- steps that remove candidates ----

// The smallest logit within n standard deviations of the largest; each(f) calls f for every logit in order.
template <typename ForEach>
float smallest_within_sigma(const ForEach& each, float n) {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    float largest = -infinity;
    float sum = 0.0f;
    size_t finite = 0;
    each([&](float logit) {
        if (logit != -infinity) {
            largest = std::max(largest, logit);
            sum += logit;
            ++finite;
        }
    });
    const float mean = finite > 0 ? sum / finite : 0.0f;

    float squares = 0.0f;
    each([&](float logit) {
        if (logit != -infinity) {
            const double distance = logit - mean;
            squares += distance * distance;
        }
    });
    const float deviation = finite > 0 ? std::sqrt(squares / finite) : 0.0f;
    return largest - (n * deviation);
}


// Masks (-inf) logits more than n standard deviations under the largest; the list keeps its length.
void top_n_sigma(Candidates& candidates, float n);
// Keeps the k largest, sorted; k <= 0 keeps all and sorts nothing.
void top_k(Candidates& candidates, int32_t k);
// Keeps the tokens whose surprise is nearest to the entropy until their probability exceeds p; unsorted.
void typical(Candidates& candidates, float p);
// Keeps the shortest sorted prefix whose probability reaches p.
void top_p(Candidates& candidates, float p);
// Keeps tokens at least p times as likely as the likeliest, which always stays.
void min_p(Candidates& candidates, float p);
// XTC: with the given chance removes every token as likely as the threshold but the least likely of them.
void exclude_top_choices(Candidates& candidates, float probability, float threshold, Generator& random);

// Mirostat 1 and 2, https://arxiv.org/abs/2007.14966: sorts, and keeps what is not more surprising than mu
// bits. Version 1 estimates how many that are from a Zipf exponent of the 100 likeliest tokens.
void keep_by_mirostat(Candidates& candidates, int32_t version, int32_t vocabulary_size, float mu);

// ---- steps that change logits ----

// Probabilities from logits, sums in float and in list order as llama.cpp takes them.
void softmax(Candidates& candidates);
// Divides by the temperature; <= 0 leaves only the first largest logit finite.
void temperature(Candidates& candidates, float temperature);
// Temperature within +- range by the entropy of the candidates; range <= 0 is the plain temperature.
void dynamic_temperature(Candidates& candidates, float temperature, float range, float exponent);

// ---- steps that choose; each returns an index into the list ----

// Inverse transform with one uniform draw, also when there is one candidate.
size_t draw(Candidates& candidates, Generator& random);

struct MirostatTarget {
    float tau;  // wanted surprise, bits
    float eta;  // learning rate
};

// Draws, and steers mu towards the wanted surprise.
size_t draw_by_mirostat(Candidates& candidates, MirostatTarget target, float& mu, Generator& random);

}  // namespace llmrun
