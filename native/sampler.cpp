#include "sampler.hpp"

#include <algorithm>
#include <cmath>
#include <sstream>

namespace llmrun {
namespace {

void require(bool condition, const char* complaint) {
    if (!condition) {
        throw std::invalid_argument(complaint);
    }
}

void require_sensible(int32_t vocabulary_size, const SamplerParams& params) {
    require(vocabulary_size >= 1 && vocabulary_size <= largest_vocabulary,
            "vocabulary_size has to be between 1 and 2^24");
    for (const float value :
         {params.temperature, params.temperature_range, params.temperature_exponent, params.top_p,
          params.min_p, params.typical_p, params.top_n_sigma, params.xtc_probability, params.xtc_threshold,
          params.repeat_penalty, params.frequency_penalty, params.presence_penalty, params.dry_multiplier,
          params.dry_base, params.mirostat_tau, params.mirostat_eta}) {
        require(std::isfinite(value), "every sampling parameter has to be finite");
    }
    require(params.repeat_penalty > 0.0f && std::isfinite(1.0f / params.repeat_penalty),
            "repeat_penalty has to be greater than 0");
    require(params.repeat_last_n >= 0 && params.dry_last_n >= 0 && params.dry_allowed_length >= 0,
            "repeat_last_n, dry_last_n and dry_allowed_length must not be negative");
    require(params.mirostat >= 0 && params.mirostat <= 2, "mirostat has to be 0, 1 or 2");
    for (const auto& [token, bias] : params.logit_bias) {
        require(token >= 0 && token < vocabulary_size, "a token of logit_bias is not in the vocabulary");
        require(bias < INFINITY, "a bias is a number or -inf");
    }
}

const SamplerParams& checked(int32_t vocabulary_size, const SamplerParams& params) {
    require_sensible(vocabulary_size, params);
    return params;
}

DryParams dry_params(const SamplerParams& params) {
    return {params.dry_multiplier, params.dry_base, params.dry_allowed_length, params.dry_last_n};
}

// Mirostat's chain has no penalties; what nothing looks at is not kept.
bool uses_penalties(const SamplerParams& params) { return params.mirostat == 0 && params.penalizes(); }
bool uses_dry(const SamplerParams& params) { return params.mirostat == 0 && dry_params(params).enabled(); }

size_t history_length(const SamplerParams& params) {
    const int32_t for_penalties = uses_penalties(params) ? params.repeat_last_n : 0;
    const int32_t for_dry = uses_dry(params) ? params.dry_last_n : 0;
    return static_cast<size_t>(std::max(for_penalties, for_dry));
}

size_t most_changes(int32_t vocabulary_size, const SamplerParams& params) {
    const size_t penalized = uses_penalties(params) ? params.repeat_last_n : 0;
    const size_t by_dry = uses_dry(params) ? params.dry_last_n : 0;
    return std::min<size_t>(vocabulary_size, params.logit_bias.size() + penalized + by_dry);
}

std::string describe(int32_t token, float logit) {
    std::ostringstream text;
    if (logit < 0) {
        text << "no token has a finite logit";
    } else {
        text << "the logit of token " << token << " is " << (std::isnan(logit) ? "NaN" : "infinite");
    }
    return text.str();
}

// A sum of two large numbers may overflow.
void require_usable(int32_t token, float logit) {
    if (!(logit < INFINITY)) {
        throw BadLogits(token, logit);
    }
}

}  // namespace

BadLogits::BadLogits(int32_t token, float logit)
    : std::runtime_error(describe(token, logit)), token(token), logit(logit) {}

Sampler::Sampler(int32_t vocabulary_size, SamplerParams params,
                 const std::vector<std::vector<int32_t>>& dry_breakers, bool exact)
    : vocabulary_size_(vocabulary_size),
      params_(checked(vocabulary_size, params)),
      exact_(exact),
      history_(history_length(params)),
      counts_(vocabulary_size, uses_penalties(params) ? params.repeat_last_n : 0),
      dry_(dry_params(params), dry_breakers),
      random_(params.seed),
      xtc_random_(params.seed),
      mu_(2.0f * params.mirostat_tau),
      peaks_(vocabulary_size),
      changes_(most_changes(vocabulary_size, params)) {}

int32_t Sampler::sample(const float* logits) {
    read(logits);
    change_logits();
    if (params_.mirostat == 0 && !exact_ && shortlist_.fill(params_, logits, peaks_, changes_)) {
        Candidates candidates = shortlist_.candidates();
        return candidates[choose(candidates)].id;
    }
    ++exact_count_;
    Candidates candidates = whole_vocabulary();
    if (params_.mirostat != 0) {
        return candidates[choose_by_mirostat(candidates)].id;
    }
    truncate(candidates);
    return candidates[choose(candidates)].id;
}

void Sampler::accept(int32_t token) {
    require(token >= 0 && token < vocabulary_size_, "the token is not in the vocabulary");
    if (uses_penalties(params_)) {
        const size_t window = params_.repeat_last_n;
        if (history_.size() >= window) {
            counts_.remove(history_.newest(window - 1));
        }
        counts_.add(token);
    }
    history_.push(token);
}

std::string Sampler::random_state() const {
    std::ostringstream text;
    text << random_ << '\n' << xtc_random_;
    return text.str();
}

const std::vector<LogProbability>& Sampler::log_probabilities(const float* logits, int32_t token,
                                                              size_t count) {
    require(token >= 0 && token < vocabulary_size_, "the token is not in the vocabulary");
    read(logits);
    const float largest = peaks_.largest();
    if (largest == -INFINITY) {
        throw BadLogits(0, -INFINITY);
    }
    const double total = largest + std::log(peaks_.add_exponentials().sum);
    const auto value = [&](float logit) { return static_cast<float>(logit - total); };
    log_probabilities_.clear();
    log_probabilities_.push_back({token, value(logits[token])});
    for (const Candidate& candidate : shortlist_.likeliest(peaks_, count)) {
        log_probabilities_.push_back({candidate.id, value(candidate.logit)});
    }
    return log_probabilities_;
}

void Sampler::read(const float* logits) {
    logits_ = logits;
    const int32_t bad = peaks_.read(logits);
    if (bad >= 0) {
        throw BadLogits(bad, logits[bad]);
    }
}

void Sampler::change_logits() {
    changes_.clear();
    apply_logit_bias();
    if (params_.mirostat == 0) {
        apply_penalties();
        apply_dry();
    }
}

void Sampler::apply_logit_bias() {
    for (const auto& [token, bias] : params_.logit_bias) {
        float& changed = logit(token);
        changed += bias;
        require_usable(token, changed);
    }
}

void Sampler::apply_penalties() {
    for (const auto& [token, count] : counts_.distinct()) {
        float& changed = logit(token);
        // Dividing a negative logit would make the token more likely.
        changed = changed <= 0 ? changed * params_.repeat_penalty : changed / params_.repeat_penalty;
        changed -= static_cast<float>(count) * params_.frequency_penalty + params_.presence_penalty;
        require_usable(token, changed);
    }
}

void Sampler::apply_dry() {
    for (const auto& [token, amount] : dry_.penalties(history_)) {
        float& changed = logit(token);
        changed -= amount;
        require_usable(token, changed);
    }
}

// The later steps divide by the largest probability and would make NaN of -inf alone.
Candidates Sampler::whole_vocabulary() {
    buffer_.resize(vocabulary_size_);
    for (int32_t token = 0; token < vocabulary_size_; ++token) {
        buffer_[token] = {token, logits_[token], 0.0f};
    }
    for (const ChangedLogits::Change& change : changes_) {
        buffer_[change.token].logit = change.logit;
    }
    const auto is_possible = [](const Candidate& candidate) { return candidate.logit > -INFINITY; };
    if (std::none_of(buffer_.begin(), buffer_.end(), is_possible)) {
        throw BadLogits(0, -INFINITY);
    }
    return {buffer_.data(), buffer_.size(), false, &scratch_};
}

void Sampler::truncate(Candidates& candidates) {
    top_n_sigma(candidates, params_.top_n_sigma);
    top_k(candidates, params_.top_k);
    typical(candidates, params_.typical_p);
    top_p(candidates, params_.top_p);
    min_p(candidates, params_.min_p);
}

size_t Sampler::choose(Candidates& candidates) {
    exclude_top_choices(candidates, params_.xtc_probability, params_.xtc_threshold, xtc_random_);
    dynamic_temperature(candidates, params_.temperature, params_.temperature_range,
                        params_.temperature_exponent);
    return draw(candidates, random_);
}

size_t Sampler::choose_by_mirostat(Candidates& candidates) {
    temperature(candidates, params_.temperature);
    const MirostatTarget target{params_.mirostat_tau, params_.mirostat_eta};
    if (params_.mirostat == 1) {
        return mirostat_1(candidates, vocabulary_size_, target, mu_, random_);
    }
    return mirostat_2(candidates, target, mu_, random_);
}

}  // namespace llmrun
