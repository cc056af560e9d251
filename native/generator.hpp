// A random generator that can go back: std::mt19937, and how many words it has given.
#pragma once

#include <cstdint>
#include <ostream>
#include <random>

namespace llmrun {

class Generator {
  public:
    using result_type = std::mt19937::result_type;

    explicit Generator(uint32_t seed) : seed_(seed), engine_(seed) {}

    static constexpr result_type min() { return std::mt19937::min(); }
    static constexpr result_type max() { return std::mt19937::max(); }

    result_type operator()() {
        ++count_;
        return engine_();
    }

    uint64_t count() const { return count_; }

    // Take the state after so many words, in a time that grows with them.
    void go_back(uint64_t count) {
        engine_.seed(seed_);
        engine_.discard(count);
        count_ = count;
    }

    friend std::ostream& operator<<(std::ostream& out, const Generator& generator) { return out << generator.engine_; }

  private:
    uint32_t seed_;
    uint64_t count_ = 0;
    std::mt19937 engine_;
};

}  // namespace llmrun
