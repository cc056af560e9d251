#include "gate.hpp"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <utility>

namespace llmrun {
namespace {

constexpr int32_t multiple = 4;          // kernels compute this many rows at once, and handle a remainder badly
constexpr double min_gain = 1.1;         // expected: a table is never quite right
constexpr double allowed_steps = 1.0;    // plain steps that drafts may cost an answer, ...
constexpr double allowed_share = 0.01;   // ... beside this share of its time
constexpr double prior[] = {0.15, 0.3, 0.45, 0.65, 0.8, 0.9};  // after a match of 1, 2, 3-4, 5-8, 9-16, more tokens
constexpr double model_prior = 0.8;                            // of a token that the draft model is sure of
constexpr int32_t model_depths = 16;                           // tokens of a draft with an acceptance rate of their own
constexpr double sure_prior = 0.7;                             // how often the draft model is sure
constexpr int32_t min_outcomes = 8;    // that make an acceptance rate known
constexpr double newest_share = 0.1;                           // minimum weight of the newest outcome
constexpr double forgotten_share = 1.0 / 512;                  // of a rate, with each token that does not teach it
constexpr int32_t min_compared = 15;

// Interpolated between the widths of a table.
double cost_of(std::span<const StepCost> costs, double width) {
    if (width <= costs.front().width) {
        return costs.front().cost;
    }
    for (size_t i = 1; i < costs.size(); ++i) {
        const StepCost &low = costs[i - 1], &high = costs[i];
        if (width <= high.width) {
            return low.cost + (high.cost - low.cost) * (width - low.width) / (high.width - low.width);
        }
    }
    return costs.back().cost;
}

// An upper bound: a wide step takes no longer per row than the widest one in the table.
double prefill_cost(std::span<const StepCost> costs, int32_t n_tokens) {
    return n_tokens * costs.back().cost / costs.back().width;
}

}  // namespace

Gate::Gate(int32_t most, std::vector<StepCost> costs, std::vector<StepCost> draft_costs, bool always)
    : most_(most), always_(always), costs_(std::move(costs)), draft_costs_(std::move(draft_costs)), sure_(sure_prior) {
    if (costs_.empty()) {
        throw std::invalid_argument("a gate needs the costs of steps");
    }
    for (const double each : prior) {
        rates_.emplace_back(each);
    }
    for (int32_t depth = 0; depth < model_depths; ++depth) {
        model_rates_.emplace_back(model_prior);
    }
}

void Gate::set_costs(std::vector<StepCost> costs, std::vector<StepCost> draft_costs) {
    costs_ = std::move(costs);
    draft_costs_ = std::move(draft_costs);
}

bool Gate::AcceptanceRate::is_known() const { return outcomes_ >= prior_weight + min_outcomes; }

void Gate::AcceptanceRate::learn(bool accepted) {
    ++outcomes_;
    value_ += std::max(1.0 / outcomes_, newest_share) * (accepted - value_);
}

void Gate::AcceptanceRate::forget(double prior) {
    value_ += forgotten_share * (prior - value_);
    outcomes_ += forgotten_share * (prior_weight - outcomes_);
}

void Gate::forget_model(int32_t depth) {
    if (depth == 0) {
        sure_.forget(sure_prior);
    }
    for (int32_t i = depth; i < model_depths; ++i) {
        model_rates_[i].forget(model_prior);
    }
}

const Gate::AcceptanceRate& Gate::rate(int32_t match, int32_t depth) const {
    if (match == model) {
        return model_rates_[std::min(depth, model_depths - 1)];
    }
    const size_t last = std::size(prior) - 1;
    return rates_[std::min<size_t>(std::bit_width(static_cast<uint32_t>(match + depth - 1)), last)];
}

DraftChoice Gate::choose(int32_t match, int32_t limit, const StepShape& step) const {
    limit = std::min(limit, most_);
    const double first = rate(match, 0).value();
    if (always_) {
        const int32_t length = (step.rows + limit) / multiple * multiple - step.rows;
        return {length > 0 ? length : limit, first};
    }
    if (match == model ? draft_costs_.empty() : !rate(match, 0).is_known()) {
        return {};
    }
    const double plain = cost_of(costs_, step.rows);
    const double most_cost = plain + credit(match, step);
    const double sure = match == model ? sure_.value() : 1.0;
    DraftChoice best{0, min_gain * step.sampled / plain};
    bool waits = false;
    for (const StepCost& wide : costs_) {
        const int32_t length = wide.width - step.rows;
        if (length <= 0 || length > limit) {
            continue;
        }
        double cost = wide.cost;
        const bool is_dear = cost + (match == model ? draft_cost(step, length) : 0.0) > most_cost;
        if (match == model) {
            cost = sure * cost + (1 - sure) * plain + draft_cost(step, 1 + sure * (length - 1));
        }
        if (step.sampled + sure * first * length > best.rate * cost) {  // an upper bound, quickly computed
            const double rate = (step.sampled + sure * expected(match, length)) / cost;
            if (rate > best.rate && is_dear) {
                waits = true;
            } else if (rate > best.rate) {
                best = {length, rate};
            }
        }
    }
    return best.length > 0 ? best : DraftChoice{0, 0.0, waits};
}

// The step's other answers wait as well, but are slowed down by no more than their tokens' share of it.
double Gate::token_cost(const StepShape& step) const { return cost_of(costs_, step.sampled) / step.sampled; }

double Gate::credit(int32_t match, const StepShape& step) const {
    if (always_) {
        return std::numeric_limits<double>::infinity();
    }
    const double gained = std::min(gain(match), text_gain_ + model_gain_);
    return gained + allowed_share * plain_ + allowed_steps * token_cost(step);
}

double Gate::expected(int32_t match, int32_t length) const {
    double total = 0.0, probability = 1.0, before = 1.0;
    for (int32_t i = 0; i < length; ++i) {
        const AcceptanceRate& next = rate(match, i);
        // There is no hope without experience, and a model is not surer of later tokens.
        before = match != model && next.is_known() ? next.value() : std::min(before, next.value());
        probability *= before;
        total += probability;
    }
    return total;
}

// All sequences of the step take part. The first step of the draft model usually decodes two tokens per sequence.
double Gate::draft_cost(const StepShape& step, double length) const {
    if (draft_costs_.empty()) {
        return 0.0;
    }
    const double first = cost_of(draft_costs_, 2 * step.sampled), other = cost_of(draft_costs_, step.sampled);
    return (first + (length - 1) * other) / step.sampled;
}

double Gate::planned_cost() const {
    return drafting_ + cost_of(costs_, step_.rows + length_) - cost_of(costs_, step_.rows);
}

double Gate::speedup() const {
    const double spent = plain_ - text_gain_ - model_gain_;
    return spent > 0.0 ? plain_ / spent : 1.0;
}

bool Gate::is_worth_prefill(int32_t n_tokens, const StepShape& step) const {
    if (always_) {
        return true;
    }
    const DraftChoice choice = choose(model, most_, step);
    if (choice.length == 0 || draft_costs_.empty()) {
        return false;
    }
    const double saved = 1 - step.sampled / cost_of(costs_, step.rows) / choice.rate;
    return prefill_cost(draft_costs_, n_tokens) <= saved * (prefill_cost(costs_, n_tokens) + plain_);
}

void Gate::learn(int32_t match, int32_t n_accepted, bool missed) {
    for (int32_t i = 0; i < n_accepted + missed; ++i) {
        rate(match, i).learn(i < n_accepted);
    }
}

void Gate::record_step(int32_t match, const StepShape& step, int32_t n_drafted, int32_t n_accepted, double drafting) {
    const double token = token_cost(step);
    double extra = drafting;
    if (n_drafted > 0) {
        extra += cost_of(costs_, step.rows + n_drafted) - cost_of(costs_, step.rows);
    }
    plain_ += (1 + n_accepted) * token;
    double& gained = match == model ? model_gain_ : text_gain_;
    gained += n_accepted * token - extra;
}

size_t Gate::n_compared() const { return static_cast<size_t>(std::max(most_, min_compared)); }

DraftChoice Gate::plan(std::vector<int32_t> drafted, int32_t match, const StepShape& step, int32_t limit) {
    const int32_t most = std::min(limit, static_cast<int32_t>(drafted.size()));
    const DraftChoice choice = match != 0 && most > 0 ? choose(match, most, step) : DraftChoice{};
    drafts_.assign(1, {std::move(drafted), match});
    step_ = step;
    set_length(choice.length, 0.0);
    return choice;
}

void Gate::set_length(int32_t length, double drafting) {
    length_ = length;
    drafting_ = drafting;
}

void Gate::compare(std::span<const int32_t> tokens) {
    if (drafts_.empty() || tokens.empty()) {
        return;
    }
    int32_t n_same = 0, n_of_model = 0;
    for (const Draft& draft : drafts_) {
        const auto shorter = static_cast<int32_t>(std::min(draft.tokens.size(), tokens.size()));
        n_same = 0;
        while (n_same < shorter && draft.tokens[n_same] == tokens[n_same]) {
            ++n_same;
        }
        if (draft.match != 0) {
            learn(draft.match, n_same, n_same < shorter);
        }
        if (draft.match == model) {
            n_of_model = n_same + (n_same < shorter);
        }
    }
    forget_model(n_of_model);
    record_step(drafts_.back().match, step_, length_, std::min(n_same, length_), drafting_);
    drafts_.clear();
}

}  // namespace llmrun
