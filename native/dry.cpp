#include "dry.hpp"

#include <algorithm>
#include <cmath>

namespace llmrun {

Dry::Dry(DryParams params, const std::vector<std::vector<int32_t>>& breakers) : params_(params) {
    if (!params_.enabled()) {
        return;
    }
    for (const std::vector<int32_t>& breaker : breakers) {
        if (!breaker.empty()) {
            breaker_tails_[breaker.front()].emplace_back(breaker.begin() + 1, breaker.end());
        }
    }
    repeats_.reserve(params_.last_n);
    extensions_.reserve(params_.last_n);
    penalties_.reserve(params_.last_n);
}

const std::vector<Dry::Penalty>& Dry::penalties(const History& history) {
    penalties_.clear();
    searched_ = false;
    const int window = static_cast<int>(std::min(history.size(), static_cast<size_t>(params_.last_n)));
    if (!params_.enabled() || window <= params_.allowed_length) {
        return penalties_;
    }
    const int limit = repeat_limit(history, window);
    if (limit < params_.allowed_length) {
        return penalties_;
    }
    searched_ = true;
    count_repeats(history, window, limit);
    collect_extensions(history, window);

    // base^length must stay a float.
    constexpr float log_of_largest_float = 88.7228391f;
    const int largest_exponent =
        params_.base > 1.000001f ? static_cast<int>(log_of_largest_float / std::log(params_.base)) : 0;
    for (const Extension& extension : extensions_) {
        if (is_breaker(extension.token)) {
            continue;
        }
        int exponent = extension.length - params_.allowed_length;
        if (largest_exponent > 0) {
            exponent = std::min(exponent, largest_exponent);
        }
        // The product is taken in double, the penalty is a float.
        const double growth = std::pow(static_cast<double>(params_.base), exponent);
        penalties_.push_back({extension.token, static_cast<float>(params_.multiplier * growth)});
    }
    return penalties_;
}

// The longest tail of a breaker that begins `position` tokens before the newest; -1 where none begins.
int Dry::longest_breaker_tail(const History& history, int position) const {
    const auto found = breaker_tails_.find(history.newest(position));
    if (found == breaker_tails_.end()) {
        return -1;
    }
    int longest = -1;
    for (const std::vector<int32_t>& tail : found->second) {
        const int length = static_cast<int>(tail.size());
        if (length <= longest || length > position) {
            continue;
        }
        bool matches = true;
        for (int i = 0; i < length && matches; ++i) {
            matches = tail[i] == history.newest(position - i - 1);
        }
        if (matches) {
            longest = length;
        }
    }
    return longest;
}

// How many of the last tokens come after the last breaker: no repeat may be longer.
int Dry::repeat_limit(const History& history, int window) const {
    for (int position = 0; position < window; ++position) {
        const int tail = longest_breaker_tail(history, position);
        if (tail >= 0) {
            return position - tail;
        }
    }
    return window;
}

// The Z algorithm, run backwards from the newest token: linear although the loops look nested.
//   last tokens:  a b c c b c y a b c
//   repeats_:     0 0 3 1 0 2 0 0 0 0     the 3: "a b c", the end of the text, also ends here
void Dry::count_repeats(const History& history, int window, int limit) {
    repeats_.assign(window, 0);
    const int last = window - 1;
    const auto matching_from = [&](int position, int offset) {
        while (position < window && history.newest(position) == history.newest(position - offset)) {
            ++position;
        }
        return position - offset;
    };

    int left = 0;  // the box: the furthest reaching repeat found, in tokens before the end
    int right = 0;
    for (int k = 1; k < window; ++k) {
        if (k > right) {
            const int length = matching_from(k, k);
            repeats_[last - k] = std::min(length, limit);
            if (length > 0) {
                left = k;
                right = k + length - 1;
            }
            continue;
        }
        const int known = repeats_[last - (k - left)];
        if (known < right - k + 1) {
            repeats_[last - k] = known;
        } else {
            const int length = matching_from(right + 1, k);
            repeats_[last - k] = std::min(length, limit);
            left = k;
            right = k + length - 1;
        }
    }
}

// Each token that followed a long enough repeat, once, with the longest.
void Dry::collect_extensions(const History& history, int window) {
    extensions_.clear();
    for (int i = 0; i + 1 < window; ++i) {
        if (repeats_[i] >= params_.allowed_length) {
            extensions_.push_back({history.newest(window - 2 - i), repeats_[i]});
        }
    }
    std::sort(extensions_.begin(), extensions_.end(), [](const Extension& a, const Extension& b) {
        return a.token != b.token ? a.token < b.token : a.length > b.length;
    });
    const auto end = std::unique(extensions_.begin(), extensions_.end(),
                                 [](const Extension& a, const Extension& b) { return a.token == b.token; });
    extensions_.erase(end, extensions_.end());
}

bool Dry::is_breaker(int32_t token) const {
    const auto found = breaker_tails_.find(token);
    if (found == breaker_tails_.end()) {
        return false;
    }
    const auto& tails = found->second;
    return std::any_of(tails.begin(), tails.end(), [](const auto& tail) { return tail.empty(); });
}

}  // namespace llmrun
