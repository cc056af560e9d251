// What can be wrong with logits.
#pragma once

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace llmrun {

// The logits can't be sampled from: one of them is NaN or +inf, or none is finite.
class BadLogits : public std::runtime_error {
  public:
    BadLogits(int32_t token, float logit)
        : std::runtime_error(logit < 0 ? std::string("no token has a finite logit")
                                       : "the logit of token " + std::to_string(token) +
                                             (std::isnan(logit) ? " is NaN" : " is infinite")),
          token(token),
          logit(logit) {}

    int32_t token;  // the first one at fault; the first of the vocabulary when no logit is finite
    float logit;
};

// A sum of two large numbers may overflow.
inline void require_usable(int32_t token, float logit) {
    if (!(logit < INFINITY)) {
        throw BadLogits(token, logit);
    }
}

}  // namespace llmrun
