#include "watermark.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <set>
#include <stdexcept>

namespace llmrun {
namespace {

constexpr int32_t longest_n_gram = 64;

void require(bool condition, const char* complaint) {
    if (!condition) {
        throw std::invalid_argument(complaint);
    }
}

void require_sensible(int32_t vocabulary_size, const WatermarkParams& params) {
    require(vocabulary_size >= 1, "a watermark needs a vocabulary");
    require(!params.keys.empty() && (params.is_synthid || params.keys.size() == 1),
            "a watermark needs a key, and green one alone");
    require(std::all_of(params.keys.begin(), params.keys.end(), [](int64_t key) { return key > 0; }),
            "a watermark's keys have to be greater than 0");
    require(params.n_gram >= (params.is_synthid ? 2 : 0) && params.n_gram <= longest_n_gram,
            "a watermark's n-gram has 64 tokens at most, and for synthid 2 at least");
    require(params.share > 0.0 && params.share < 1.0, "a watermark's share has to be between 0 and 1");
    require(std::isfinite(params.bias) && params.bias > 0.0f, "a watermark's bias has to be greater than 0");
}

}  // namespace

Watermark::Watermark(int32_t vocabulary_size, const WatermarkParams& params, bool takes_largest)
    : vocabulary_size_(vocabulary_size), takes_largest_(takes_largest) {
    require_sensible(vocabulary_size, params);
    if (params.is_synthid) {
        tournament_.emplace(params.keys, params.n_gram);
    } else {
        green_.emplace(vocabulary_size, params.keys[0], params.share, params.bias, params.n_gram);
    }
    forget();
}

size_t Watermark::context_length() const {
    return green_ ? green_->context_length() : tournament_->context_length();
}

// Of an answer alone, what stands before it are zeros.
void Watermark::forget() {
    recent_.assign(tournament_ ? context_length() : 0, 0);
    seen_.assign(tournament_ ? remembered : 0, 0);
    next_ = 0;
}

void Watermark::push(int32_t token) {
    recent_.push_back(token);
    if (recent_.size() > context_length()) {
        recent_.erase(recent_.begin());
    }
}

void Watermark::begin(std::span<const int32_t> prompt) {
    prompt_length_ = prompt.size();
    rewind(prompt);
}

void Watermark::accept(int32_t token) {
    if (tournament_) {
        seen_[next_] = Tournament::hash(recent_);
        next_ = (next_ + 1) % remembered;
    }
    push(token);
}

void Watermark::rewind(std::span<const int32_t> tokens) {
    forget();
    const size_t before = std::min(prompt_length_, tokens.size());
    if (green_) {
        for (const int32_t token : tokens.first(before).last(std::min(before, context_length()))) {
            push(token);
        }
    }
    for (const int32_t token : tokens.subspan(before)) {
        accept(token);
    }
}

Watermark::Context Watermark::context() const {
    const bool repeats = std::find(seen_.begin(), seen_.end(), Tournament::hash(recent_)) != seen_.end();
    return {recent_, repeats};
}

void Watermark::apply(Candidates& candidates, const Context& context) const {
    const bool decides =
        candidates.size > 1 && context.tokens.size() == context_length() && !context.is_repeated;
    if (decides && green_) {
        green_->add_bias(candidates, context.tokens);
    } else if (decides) {
        tournament_->play(candidates, Tournament::hash(context.tokens));
    }
    if (takes_largest_) {
        temperature(candidates, 0.0f);
    }
}

WatermarkCount Watermark::count(std::span<const int32_t> text, bool repeats) const {
    require(std::all_of(text.begin(), text.end(),
                        [&](int32_t token) { return token >= 0 && token < vocabulary_size_; }),
            "the token is not in the vocabulary");
    WatermarkCount found;
    const size_t first = std::min(context_length(), text.size());
    Watermark reader = *this;
    reader.forget();
    reader.recent_.assign(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(first));
    std::set<std::vector<int32_t>> known;  // n-grams
    for (const int32_t token : text.subspan(first)) {
        Context context = reader.context();
        reader.accept(token);
        std::vector<int32_t> n_gram = context.tokens;
        n_gram.push_back(token);
        const bool is_new = known.insert(std::move(n_gram)).second;
        if (green_ && (is_new || repeats)) {
            ++found.judged;
            ++found.trials;
            found.hits += green_->contains(context.tokens, token) ? 1 : 0;
        } else if (tournament_ && !context.is_repeated) {
            ++found.judged;
            found.trials += tournament_->rounds();
            const uint64_t before = Tournament::hash(context.tokens);
            for (size_t round = 0; round < tournament_->rounds(); ++round) {
                found.hits += tournament_->wins(before, token, round) ? 1 : 0;
            }
        }
    }
    return found;
}

}  // namespace llmrun
