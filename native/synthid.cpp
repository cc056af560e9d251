#include "synthid.hpp"

#include <bitset>
#include <cmath>
#include <random>

namespace llmrun {
namespace {

constexpr size_t table_size = 1 << 16;

uint64_t add(uint64_t hash, uint64_t number) { return (hash + number) * 6364136223846793005u + 1; }

// torch.randint(0, 2, (table_size,)) on a CPU whose generator has the seed 0.
const std::bitset<table_size>& coins() {
    static const std::bitset<table_size> table = [] {
        std::bitset<table_size> made;
        std::mt19937 random(0);
        for (size_t i = 0; i < table_size; ++i) {
            made[i] = random() & 1;
        }
        return made;
    }();
    return table;
}

}  // namespace

Tournament::Tournament(std::vector<int64_t> keys, int32_t n_gram)
    : keys_(keys.begin(), keys.end()), n_gram_(n_gram) {}

uint64_t Tournament::hash(std::span<const int32_t> before) {
    uint64_t hash = 1;
    for (const int32_t token : before) {
        hash = add(hash, token);
    }
    return hash;
}

bool Tournament::wins(uint64_t before, int32_t token, size_t round) const {
    return coins()[add(add(before, token), keys_[round]) % table_size];
}

void Tournament::play(Candidates& candidates, uint64_t before) const {
    softmax(candidates);
    if (std::isnan(candidates[0].p)) {  // a logit has overflowed: there are no probabilities to compete with
        return;
    }
    std::vector<float>& won = candidates.scratch->scores;
    won.resize(candidates.size);
    for (size_t round = 0; round < keys_.size(); ++round) {
        float sum = 0.0f;
        for (size_t i = 0; i < candidates.size; ++i) {
            won[i] = wins(before, candidates[i].id, round) ? 1.0f : 0.0f;
            sum += won[i] * candidates[i].p;
        }
        for (size_t i = 0; i < candidates.size; ++i) {
            candidates[i].p *= 1.0f + won[i] - sum;
        }
    }
    for (Candidate& candidate : candidates) {
        candidate.logit = candidate.p > 0.0f ? std::log(candidate.p) : -INFINITY;
    }
    candidates.sorted = false;
}

}  // namespace llmrun
