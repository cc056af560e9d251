#include "sampler.hpp"

#include <algorithm>
#include <cmath>
#include <sstream>
#include <stdexcept>

#include "chain.hpp"

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
    require(params.mirostat == 0 || !params.watermark, "mirostat and a watermark exclude each other");
    for (const auto& [token, bias] : params.logit_bias) {
        require(token >= 0 && token < vocabulary_size, "a token of logit_bias is not in the vocabulary");
        require(bias < INFINITY, "a bias is a number or -inf");
    }
}

bool takes_largest_behind_bias(const SamplerParams& params) {
    return params.watermark && params.is_greedy();
}

std::optional<Watermark> watermark_of(int32_t vocabulary_size, const SamplerParams& params) {
    if (!params.watermark) {
        return std::nullopt;
    }
    return Watermark(vocabulary_size, *params.watermark, takes_largest_behind_bias(params));
}

// In place of the steps that truncate, which decide nothing in a greedy answer: what a bias can't make the largest.
void leave_what_can_win(SamplerParams& params) {
    constexpr float rounding = 0.99f;
    const WatermarkParams& watermark = *params.watermark;
    for (const Step step : default_order()) {
        if (step > Step::dry) {
            params.switch_off(step);
        }
    }
    params.order = default_order();
    if (watermark.n_gram > 0) {
        params.top_k = static_cast<int32_t>(GreenList::most_tried);
    } else {
        params.min_p = std::exp(-watermark.bias) * rounding;
    }
}

// With every step that is not in the order switched off; mirostat's chain has its own steps.
SamplerParams checked(int32_t vocabulary_size, SamplerParams params) {
    require_sensible(vocabulary_size, params);
    if (params.mirostat == 0) {
        for (const Step step : default_order()) {
            if (std::find(params.order.begin(), params.order.end(), step) == params.order.end()) {
                params.switch_off(step);
            }
        }
    }
    if (takes_largest_behind_bias(params)) {
        leave_what_can_win(params);
    }
    return params;
}

std::vector<Step> working_steps(const SamplerParams& params) {
    std::vector<Step> steps = params.order;
    std::erase_if(steps, [&](Step step) { return !params.switches_on(step); });
    return steps;
}

DryParams dry_params(const SamplerParams& params) {
    return {params.dry_multiplier, params.dry_base, params.dry_allowed_length, params.dry_last_n};
}

// Mirostat's chain has no penalties; what nothing looks at is not kept.
bool uses_penalties(const SamplerParams& params) { return params.mirostat == 0 && params.penalizes(); }
bool uses_dry(const SamplerParams& params) { return params.mirostat == 0 && params.breaks_repeats(); }

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

// Sampling from fewer tokens than this without looking at the rest is quicker than masking a row.
constexpr size_t few_tokens = 256;

constexpr size_t known_draws = 64;  // as many as a run of decode steps may have drawn in vain

bool in_default_order(const std::vector<Step>& steps) { return std::is_sorted(steps.begin(), steps.end()); }

bool has_equals(const Candidates& candidates, std::vector<float>& logits) {
    logits.clear();
    for (size_t i = 0; i < candidates.size; ++i) {
        logits.push_back(candidates.data[i].logit);
    }
    std::sort(logits.begin(), logits.end());
    return std::adjacent_find(logits.begin(), logits.end()) != logits.end();
}

}  // namespace

Sampler::Sampler(int32_t vocabulary_size, SamplerParams params,
                 const std::vector<std::vector<int32_t>>& dry_breakers, bool exact, size_t remember)
    : vocabulary_size_(vocabulary_size),
      watermark_(watermark_of(vocabulary_size, params)),
      params_(checked(vocabulary_size, std::move(params))),
      steps_(working_steps(params_)),
      exact_(exact || params_.mirostat != 0 || !in_default_order(steps_)),
      needs_no_impossible_(!exact_ && params_.typical_p >= 1.0f && !params_.may_exclude_top_choices() &&
                           !params_.adapts_temperature()),
      history_(history_length(params_)),
      counts_(vocabulary_size, uses_penalties(params_) ? params_.repeat_last_n : 0),
      dry_(dry_params(params_), dry_breakers),
      random_(params_.seed),
      xtc_random_(params_.seed),
      mu_(2.0f * params_.mirostat_tau),
      peaks_(vocabulary_size),
      changes_(most_changes(vocabulary_size, params_)),
      masked_row_(vocabulary_size),
      memory_(remember) {}

int32_t Sampler::sample(const float* logits, const Mask& mask) {
    if (!mask.allows_everything()) {
        require_known(mask.banned);
        masked_row_.set(mask);
    }
    if (memory_.capacity() > 0) {
        remember(logits, mask);
    }
    const Drawn before{random_.count(), xtc_random_.count(), mu_};
    const int32_t token = mask.allows_everything() ? choose(logits) : choose_allowed(logits);
    if (drawn_.size() >= 2 * known_draws) {
        drawn_.erase(drawn_.begin(), drawn_.end() - known_draws);
    }
    drawn_.push_back(before);
    if (memory_.capacity() > 0) {
        memory_.next().chosen = token;
        memory_.keep();
    }
    return token;
}

void Sampler::accept(int32_t token) {
    require_known({&token, 1});
    remember_said(token);
    if (watermark_) {
        watermark_->accept(token);
    }
}

void Sampler::accept_many(std::span<const int32_t> tokens) {
    require_known(tokens);
    for (const int32_t token : tokens) {
        remember_said(token);
    }
    if (watermark_) {
        watermark_->rewind(tokens);
    }
}

void Sampler::remember_said(int32_t token) {
    if (uses_penalties(params_)) {
        const size_t window = params_.repeat_last_n;
        if (history_.size() >= window) {
            counts_.remove(history_.newest(window - 1));
        }
        counts_.add(token);
    }
    history_.push(token);
}

void Sampler::rewind(size_t dropped, std::span<const int32_t> tokens) {
    require_known(tokens);
    memory_.drop(dropped);
    history_.clear();
    counts_.clear();
    for (const int32_t token : tokens.last(std::min(tokens.size(), history_length(params_)))) {
        remember_said(token);
    }
    if (watermark_) {
        watermark_->rewind(tokens);
    }
}

void Sampler::undraw(size_t count) {
    count = std::min(count, drawn_.size());
    if (count > 0) {
        const Drawn before = drawn_[drawn_.size() - count];
        random_.go_back(before.words);
        xtc_random_.go_back(before.xtc_words);
        mu_ = before.mu;
        drawn_.resize(drawn_.size() - count);
    }
}

Explanation Sampler::explain(size_t back, size_t count) const {
    require(back < memory_.size(), "that call is not remembered");
    return llmrun::explain(memory_.last(back), params_, steps_, dry_, watermark_, count);
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
    peaks_.weigh(largest, scratch_.scores);
    const double total = largest + std::log(peaks_.add_at_least(scratch_.scores, 0.0f));
    const auto value = [&](float logit) { return static_cast<float>(logit - total); };
    log_probabilities_.clear();
    log_probabilities_.push_back({token, value(logits[token])});
    for (const Candidate& candidate : shortlist_.likeliest(peaks_, count)) {
        log_probabilities_.push_back({candidate.id, value(candidate.logit)});
    }
    return log_probabilities_;
}

void Sampler::require_known(std::span<const int32_t> tokens) const {
    for (const int32_t token : tokens) {
        require(token >= 0 && token < vocabulary_size_, "the token is not in the vocabulary");
    }
}

void Sampler::remember(const float* logits, const Mask& mask) {
    RememberedCall& call = memory_.next();
    call.logits.assign(logits, logits + vocabulary_size_);
    call.allowed.clear();
    if (!mask.allows_everything()) {
        call.allowed = masked_row_.words();
    }
    history_.write_to(call.history);
    call.xtc_random = xtc_random_;
    call.mu = mu_;
    call.watermark = watermark_ ? watermark_->context() : std::vector<int32_t>{};
}

int32_t Sampler::choose(const float* logits) {
    read(logits);
    if (exact_) {
        return choose_exactly();
    }
    change_logits();
    if (!shortlist_.fill(params_, logits, peaks_, changes_)) {
        return choose_exactly();
    }
    Candidates candidates = shortlist_.candidates();
    exclude_top_choices(candidates, params_.xtc_probability, params_.xtc_threshold, xtc_random_);
    dynamic_temperature(candidates, params_.temperature, params_.temperature_range,
                        params_.temperature_exponent);
    return draw_marked(candidates);
}

int32_t Sampler::choose_allowed(const float* logits) {
    if (needs_no_impossible_ && masked_row_.count() <= few_tokens) {
        if (const std::optional<int32_t> token = choose_of_few(logits)) {
            return *token;
        }
    }
    return choose(masked_row_.apply(logits));
}

// All steps on a list of the allowed tokens alone. Nothing when some have equal logits, which a sort could put
// in another order than in a longer list.
std::optional<int32_t> Sampler::choose_of_few(const float* logits) {
    masked_row_.collect(logits, buffer_);
    Candidates candidates{buffer_.data(), buffer_.size(), false, &scratch_};
    for (const Candidate& candidate : candidates) {
        require_usable(candidate.id, candidate.logit);
    }
    require_possible(candidates);
    apply_logit_bias(candidates, params_);
    const Surroundings surroundings{params_, counts_, history_, dry_, xtc_random_};
    auto step = steps_.begin();
    for (; step != steps_.end() && *step <= Step::dry; ++step) {
        apply(*step, candidates, surroundings);
    }
    require_possible(candidates);
    if (has_equals(candidates, scratch_.scores)) {
        return std::nullopt;
    }
    for (; step != steps_.end(); ++step) {
        apply(*step, candidates, surroundings);
    }
    return draw_marked(candidates);
}

int32_t Sampler::choose_exactly() {
    ++exact_count_;
    Candidates candidates = whole_vocabulary();
    apply_logit_bias(candidates, params_);
    require_possible(candidates);
    if (params_.mirostat != 0) {
        return candidates[draw_by_mirostat(candidates)].id;
    }
    Generator xtc_random = xtc_random_;  // stays as it is if a later step fails
    for (const Step step : steps_) {
        apply(step, candidates, {params_, counts_, history_, dry_, xtc_random});
    }
    xtc_random_ = xtc_random;
    return draw_marked(candidates);
}

int32_t Sampler::draw_marked(Candidates& candidates) {
    if (watermark_) {
        watermark_->apply(candidates, watermark_->context());
    }
    return candidates[draw(candidates, random_)].id;
}

void Sampler::read(const float* logits) {
    logits_ = logits;
    const int32_t bad = peaks_.read(logits);
    if (bad >= 0) {
        throw BadLogits(bad, logits[bad]);
    }
}

// Biases, penalties and DRY on the few logits that they change; the exact way is in chain.cpp.
void Sampler::change_logits() {
    changes_.clear();
    for (const auto& [token, bias] : params_.logit_bias) {
        float& changed = logit(token);
        changed += bias;
        require_usable(token, changed);
    }
    for (const auto& [token, count] : counts_.distinct()) {
        float& changed = logit(token);
        changed = penalized(changed, count, params_);
        require_usable(token, changed);
    }
    for (const auto& [token, amount] : dry_.penalties(history_)) {
        float& changed = logit(token);
        changed -= amount;
        require_usable(token, changed);
    }
}

Candidates Sampler::whole_vocabulary() {
    buffer_.resize(vocabulary_size_);
    for (int32_t token = 0; token < vocabulary_size_; ++token) {
        buffer_[token] = {token, logits_[token], 0.0f};
    }
    return {buffer_.data(), buffer_.size(), false, &scratch_};
}

size_t Sampler::draw_by_mirostat(Candidates& candidates) {
    temperature(candidates, params_.temperature);
    keep_by_mirostat(candidates, params_.mirostat, vocabulary_size_, mu_);
    return llmrun::draw_by_mirostat(candidates, {params_.mirostat_tau, params_.mirostat_eta}, mu_, random_);
}

}  // namespace llmrun
