// Passes over a vocabulary, in memory or in a file. It has 50,000 to 260,000 tokens: one by one through Python, they take
// up to a tenth of a second of each start. Must not know Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace llmrun {

// The tokens for which a test of llama.cpp's holds.
template <class Test>
std::vector<int32_t> tokens_where(int32_t n_tokens, Test test) {
    std::vector<int32_t> found;
    for (int32_t token = 0; token < n_tokens; ++token) {
        if (test(token)) {
            found.push_back(token);
        }
    }
    return found;
}

// The position behind some strings of a GGUF file, each after its length in 64 bits, little-endian; beyond the data if it
// ends before them.
inline uint64_t skip_strings(std::span<const unsigned char> data, uint64_t position, uint64_t count) {
    const auto sum = [](uint64_t first, uint64_t second) {
        constexpr uint64_t most = std::numeric_limits<uint64_t>::max();
        return second > most - first ? most : first + second;
    };
    for (uint64_t done = 0; done < count; ++done) {
        uint64_t length = 0;
        if (position > data.size() || data.size() - position < sizeof length) {
            return sum(position, sizeof length);  // not even the length is there
        }
        for (size_t byte = 0; byte < sizeof length; ++byte) {
            length |= uint64_t{data[position + byte]} << 8 * byte;
        }
        position = sum(position, sum(sizeof length, length));
    }
    return position;
}

}  // namespace llmrun
