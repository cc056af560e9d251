#include "chain.hpp"

#include <algorithm>

#include "bad_logits.hpp"

namespace llmrun {
namespace {

// Whether these tokens are still where their ids say, as before anything was sorted or cut.
template <typename Items>
bool in_place(Candidates& candidates, const Items& items) {
    return std::all_of(items.begin(), items.end(), [&](const auto& item) {
        const auto place = static_cast<size_t>(item.token);
        return place < candidates.size && candidates[place].id == item.token;
    });
}

void apply_penalties(Candidates& candidates, const Surroundings& surroundings) {
    const auto penalize = [&](Candidate& candidate, int32_t count) {
        candidate.logit = penalized(candidate.logit, count, surroundings.params);
        require_usable(candidate.id, candidate.logit);
    };
    const TokenCounts& counts = surroundings.counts;
    if (in_place(candidates, counts.distinct())) {
        for (const auto& [token, count] : counts.distinct()) {
            penalize(candidates[token], count);
        }
    } else {
        for (Candidate& candidate : candidates) {
            const int32_t count = counts.count(candidate.id);
            if (count > 0) {
                penalize(candidate, count);
            }
        }
    }
    candidates.sorted = false;
    require_possible(candidates);
}

void apply_dry(Candidates& candidates, const Surroundings& surroundings) {
    const std::vector<Dry::Penalty>& penalties = surroundings.dry.penalties(surroundings.history);
    if (!surroundings.dry.searched()) {
        return;
    }
    const auto penalize = [](Candidate& candidate, const Dry::Penalty& penalty) {
        candidate.logit -= penalty.amount;
        require_usable(candidate.id, candidate.logit);
    };
    if (in_place(candidates, penalties)) {
        for (const Dry::Penalty& penalty : penalties) {
            penalize(candidates[penalty.token], penalty);
        }
    } else {
        for (Candidate& candidate : candidates) {
            const auto found =
                std::lower_bound(penalties.begin(), penalties.end(), candidate.id,
                                 [](const Dry::Penalty& penalty, int32_t id) { return penalty.token < id; });
            if (found != penalties.end() && found->token == candidate.id) {
                penalize(candidate, *found);
            }
        }
    }
    candidates.sorted = false;
    require_possible(candidates);
}

}  // namespace

float penalized(float logit, int32_t count, const SamplerParams& params) {
    // Dividing a negative logit would make the token more likely.
    logit = logit <= 0 ? logit * params.repeat_penalty : logit / params.repeat_penalty;
    return logit - (static_cast<float>(count) * params.frequency_penalty + params.presence_penalty);
}

void apply_logit_bias(Candidates& candidates, const SamplerParams& params) {
    for (const auto& [token, bias] : params.logit_bias) {
        const auto precedes = [](const Candidate& candidate, int32_t id) { return candidate.id < id; };
        Candidate* found = std::lower_bound(candidates.begin(), candidates.end(), token, precedes);
        if (found != candidates.end() && found->id == token) {
            found->logit += bias;
            require_usable(token, found->logit);
        }
    }
}

void apply(Step step, Candidates& candidates, const Surroundings& surroundings) {
    const SamplerParams& params = surroundings.params;
    switch (step) {
        case Step::penalties: apply_penalties(candidates, surroundings); break;
        case Step::dry: apply_dry(candidates, surroundings); break;
        case Step::top_n_sigma: top_n_sigma(candidates, params.top_n_sigma); break;
        case Step::top_k: top_k(candidates, params.top_k); break;
        case Step::typical_p: typical(candidates, params.typical_p); break;
        case Step::top_p: top_p(candidates, params.top_p); break;
        case Step::min_p: min_p(candidates, params.min_p); break;
        case Step::xtc:
            exclude_top_choices(candidates, params.xtc_probability, params.xtc_threshold,
                                surroundings.xtc_random);
            break;
        case Step::temperature:
            dynamic_temperature(candidates, params.temperature, params.temperature_range,
                                params.temperature_exponent);
            break;
    }
}

void require_possible(Candidates& candidates) {
    const auto is_possible = [](const Candidate& candidate) { return candidate.logit > -INFINITY; };
    if (std::none_of(candidates.begin(), candidates.end(), is_possible)) {
        throw BadLogits(0, -INFINITY);
    }
}

}  // namespace llmrun
