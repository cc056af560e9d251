#include "green.hpp"

#include <algorithm>
#include <functional>
#include <numeric>
#include <random>
#include <stdexcept>

namespace llmrun {
namespace {

constexpr int32_t numbers_size = 1'000'003;

// key * token mod 2^64 - 1, where 2^64 is 1.
uint64_t folded_product(uint64_t key, uint64_t token) {
    const uint64_t high = (key >> 32) * token;  // of 2^32 each; a token has 24 bits
    const uint64_t parts[] = {high << 32, (key & 0xFFFFFFFF) * token, high >> 32};
    uint64_t sum = 0;
    for (const uint64_t part : parts) {
        sum += part;
        sum += sum < part ? 1 : 0;
    }
    return sum == UINT64_MAX ? 0 : sum;
}

// std::mt19937 in words of 32 bits, with which it takes half the time.
using Random = std::mersenne_twister_engine<uint32_t, 32, 624, 397, 31, 0x9908b0dfu, 11, 0xffffffffu, 7, 0x9d2c5680u,
                                            15, 0xefc60000u, 18, 1812433253u>;

// The swaps of torch.randperm(size) for its first `count` places, by Fisher and Yates from the front: a place is final
// after its swap. Ends when swap(place, other) gives true, and so does this.
template <typename Swap>
bool each_swap(uint32_t seed, int32_t size, int32_t count, const Swap& swap) {
    Random random(seed);
    for (int32_t place = 0; place < std::min(count, size - 1); ++place) {
        if (swap(place, place + static_cast<int32_t>(random() % static_cast<uint32_t>(size - place)))) {
            return true;
        }
    }
    return false;
}

void permute(uint32_t seed, int32_t size, int32_t count, std::vector<int32_t>& places) {
    places.resize(size);
    std::iota(places.begin(), places.end(), 0);
    each_swap(seed, size, count, [&](int32_t place, int32_t other) {
        std::swap(places[place], places[other]);
        return false;
    });
    places.resize(count);
}

// A logit that at most `count` of the candidates, or a few more that are equal, reach.
float reached_by(Candidates& candidates, size_t count) {
    std::vector<float>& logits = candidates.scratch->scores;
    logits.resize(candidates.size);
    std::transform(candidates.begin(), candidates.end(), logits.begin(),
                   [](const Candidate& candidate) { return candidate.logit; });
    const auto last = logits.begin() + static_cast<std::ptrdiff_t>(std::min(count, logits.size()) - 1);
    std::nth_element(logits.begin(), last, logits.end(), std::greater<>());
    return *last;
}

}  // namespace

std::vector<int32_t> permuted(uint32_t seed, int32_t size, int32_t count) {
    if (count < 0 || count > size) {
        throw std::invalid_argument("only as many places can be taken as there are");
    }
    std::vector<int32_t> places;
    permute(seed, size, count, places);
    return places;
}

GreenList::GreenList(int32_t vocabulary_size, int64_t key, double share, float bias, int32_t self_hash)
    : vocabulary_size_(vocabulary_size),
      count_(static_cast<int32_t>(vocabulary_size * share)),
      key_(key),
      bias_(bias),
      self_hash_(self_hash) {
    if (self_hash > 0) {
        numbers_ = std::make_shared<const std::vector<int32_t>>(
            permuted(static_cast<uint32_t>(key), numbers_size, std::min(vocabulary_size, numbers_size)));
    }
}

uint32_t GreenList::seed(std::span<const int32_t> before, int32_t token) const {
    if (self_hash_ == 0) {
        return static_cast<uint32_t>(folded_product(key_, before.back()));
    }
    const auto number = [&](int32_t each) { return uint64_t((*numbers_)[each % numbers_size]) + 1; };
    const uint64_t factor = static_cast<uint64_t>(key_) * number(token);
    auto least = static_cast<int64_t>(factor * number(token));
    for (const int32_t each : before) {
        least = std::min(least, static_cast<int64_t>(factor * number(each)));
    }
    const auto bits = static_cast<uint64_t>(least);
    return static_cast<uint32_t>(least < 0 ? bits - 1 : bits);  // mod 2^64 - 1
}

// Follows the one token through the permutation, which takes no memory.
bool GreenList::contains(std::span<const int32_t> before, int32_t token) const {
    int32_t where = token;
    return each_swap(seed(before, token), vocabulary_size_, count_, [&](int32_t place, int32_t other) {
        const bool is_final = where == other;
        where = where == place ? other : where;
        return is_final;
    });
}

void GreenList::add_bias(Candidates& candidates, std::span<const int32_t> before) const {
    if (self_hash_ > 0) {
        const float least = reached_by(candidates, most_tried);
        for (Candidate& candidate : candidates) {
            if (candidate.logit >= least && contains(before, candidate.id)) {
                candidate.logit += bias_;
            }
        }
    } else {
        std::vector<int32_t>& green = candidates.scratch->buckets;
        permute(seed(before, 0), vocabulary_size_, count_, green);
        std::vector<bool> is_green(vocabulary_size_);
        for (const int32_t token : green) {
            is_green[token] = true;
        }
        for (Candidate& candidate : candidates) {
            candidate.logit += is_green[candidate.id] ? bias_ : 0.0f;
        }
    }
    candidates.sorted = false;
}

}  // namespace llmrun
