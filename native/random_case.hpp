// What random cases of the native tests are made of.
#pragma once

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "sampler.hpp"

using Floats = std::vector<float>;

// Each draw depends on nothing but the seed.
class Draw {
  public:
    explicit Draw(uint32_t seed) : random_(seed) {}

    int below(int bound) { return static_cast<int>(random_() % static_cast<uint32_t>(bound)); }
    bool chance(int percent) { return below(100) < percent; }
    float between(float low, float high) {
        return low + (high - low) * (static_cast<float>(random_() >> 8) / 16777216.0f);
    }
    float normal() { return between(-1, 1) + between(-1, 1) + between(-1, 1); }

    int vocabulary_size() {
        constexpr int sizes[] = {1, 2, 15, 16, 17, 100, 255, 256, 257, 300, 511, 512, 700};
        return chance(1) ? 4000 + below(3000) : sizes[below(13)];
    }

    Floats logits(int size) {
        Floats row(size);
        const int kind = below(8);
        const float scale = between(0.1f, 6.0f);
        for (float& logit : row) {
            logit = normal() * scale;
            logit = kind == 1 ? std::round(logit) : logit;
            logit = kind == 2 && chance(60) ? -INFINITY : logit;
            logit = kind == 3 ? 1.5f : logit;
            logit = kind == 4 ? logit * 1e-39f : logit;
            logit = kind == 5 ? logit * 1e37f : logit;
            logit = kind == 6 && !chance(5) ? logit - 50.0f : logit;
        }
        if (kind == 7) {
            std::sort(row.begin(), row.end());
        }
        if (chance(2)) {
            row[below(size)] = chance(50) ? NAN : INFINITY;
        }
        return row;
    }

    llmrun::SamplerParams params(int size) {
        llmrun::SamplerParams params;
        params.seed = random_();
        params.temperature = chance(15) ? 0.0f : between(0.1f, 2.0f);
        params.temperature_range = chance(10) ? between(0.0f, 1.0f) : 0.0f;
        params.top_k = chance(40) ? 0 : 1 + below(chance(80) ? 50 : 400);
        params.top_p = chance(30) ? 1.0f : between(0.0f, 1.0f);
        params.min_p = chance(30) ? 0.0f : between(0.0f, chance(95) ? 0.3f : 1.5f);
        params.typical_p = chance(8) ? between(0.1f, 1.0f) : 1.0f;
        params.top_n_sigma = chance(10) ? between(0.1f, 3.0f) : -1.0f;
        params.xtc_probability = chance(10) ? between(0.0f, 1.0f) : 0.0f;
        params.repeat_penalty = chance(30) ? between(0.7f, 1.5f) : 1.0f;
        params.presence_penalty = chance(10) ? between(-1.0f, 1.0f) : 0.0f;
        params.dry_multiplier = chance(10) ? between(0.1f, 2.0f) : 0.0f;
        for (int i = chance(20) ? below(20) : 0; i > 0; --i) {
            params.logit_bias.emplace_back(below(size), chance(50) ? -INFINITY : between(-5.0f, 5.0f));
        }
        if (chance(5)) {
            params.mirostat = 1 + below(2);
        }
        if (chance(25)) {
            std::shuffle(params.order.begin(), params.order.end(), random_);
            params.order.resize(params.order.size() - (chance(50) ? below(4) : 0));
        }
        if (params.mirostat == 0 && chance(15)) {
            params.watermark = watermark();
        }
        return params;
    }

    llmrun::WatermarkParams watermark() {
        // With an n-gram a sampler begins with a table of a million numbers, which takes longer than the case itself.
        llmrun::WatermarkParams params{.key = 1 + below(1 << 20), .n_gram = chance(20) ? 1 + below(2) : 0};
        params.share = between(0.1f, 0.9f);
        params.bias = between(0.1f, 5.0f);
        return params;
    }

    // Words of a mask that allows few tokens, many, or nearly all.
    std::vector<uint32_t> mask(int size) {
        const int share = chance(30) ? 100 : chance(50) ? below(100) : 1;
        std::vector<uint32_t> words((size + 31) / 32);
        for (int token = 0; token < static_cast<int>(words.size()) * 32; ++token) {
            words[token / 32] |= uint32_t{chance(share)} << token % 32;
        }
        return words;
    }

    std::vector<int32_t> tokens(int size, int most) {
        std::vector<int32_t> tokens(below(most + 1));
        for (int32_t& token : tokens) {
            token = below(size);
        }
        return tokens;
    }

  private:
    std::mt19937 random_;
};
