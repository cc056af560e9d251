#include "explain.hpp"

#include <algorithm>
#include <cmath>

#include "chain.hpp"

namespace llmrun {
namespace {

bool is_possible(const Candidate& candidate) { return candidate.logit > -INFINITY; }

// A copy of the list, as it was between two steps.
struct Snapshot {
    std::string_view name;
    std::vector<Candidate> list;
};

std::vector<Candidate> whole_vocabulary(const std::vector<float>& logits) {
    std::vector<Candidate> list;
    list.reserve(logits.size());
    for (size_t token = 0; token < logits.size(); ++token) {
        // A token that is not allowed may have any logit. NaN and +inf are no probability.
        const float logit = logits[token] < INFINITY ? logits[token] : -INFINITY;
        list.push_back({static_cast<int32_t>(token), logit, 0.0f});
    }
    return list;
}

void apply_mask(Candidates& candidates, const std::vector<uint32_t>& allowed) {
    for (Candidate& candidate : candidates) {
        if (!(allowed[candidate.id / 32] >> candidate.id % 32 & 1)) {
            candidate.logit = -INFINITY;
        }
    }
}

// Does the call again and notes the list after each step.
class Replay {
  public:
    Replay(const RememberedCall& call, const SamplerParams& params)
        : call_(call),
          params_(params),
          list_(whole_vocabulary(call.logits)),
          candidates_{list_.data(), list_.size(), false, &scratch_} {
        note("model");
        if (!call.allowed.empty()) {
            apply_mask(candidates_, call.allowed);
            note("mask");
        }
        if (!params.logit_bias.empty()) {
            apply_logit_bias(candidates_, params);
            note("logit_bias");
        }
    }

    void run(const std::vector<Step>& order, Dry& dry) {
        History history(call_.history.size());
        TokenCounts counts(call_.logits.size(), params_.repeat_last_n);
        for (size_t i = 0; i < call_.history.size(); ++i) {
            history.push(call_.history[i]);
            const auto window = static_cast<size_t>(params_.repeat_last_n);
            if (params_.penalizes() && call_.history.size() - i <= window) {
                counts.add(call_.history[i]);
            }
        }
        Generator xtc_random = call_.xtc_random;
        for (const Step step : order) {
            apply(step, candidates_, {params_, counts, history, dry, xtc_random});
            note(name_of(step));
        }
    }

    void mark(const Watermark& watermark) {
        watermark.apply(candidates_, call_.watermark);
        note("green");
    }

    void run_mirostat() {
        if (params_.temperature != 1.0f) {
            temperature(candidates_, params_.temperature);
            note(name_of(Step::temperature));
        }
        const auto vocabulary_size = static_cast<int32_t>(call_.logits.size());
        keep_by_mirostat(candidates_, params_.mirostat, vocabulary_size, call_.mu);
        note("mirostat");
    }

    const std::vector<Snapshot>& snapshots() const { return snapshots_; }

  private:
    void note(std::string_view name) {
        snapshots_.push_back({name, {candidates_.begin(), candidates_.end()}});
    }

    const RememberedCall& call_;
    const SamplerParams& params_;
    Scratch scratch_;
    std::vector<Candidate> list_;
    Candidates candidates_;
    std::vector<Snapshot> snapshots_;
};

void add_likeliest(std::vector<Candidate> list, size_t count, std::vector<int32_t>& tokens) {
    std::erase_if(list, [](const Candidate& candidate) { return !is_possible(candidate); });
    const auto end = list.begin() + static_cast<std::ptrdiff_t>(std::min(count, list.size()));
    std::partial_sort(list.begin(), end, list.end(), [](const Candidate& a, const Candidate& b) {
        return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
    });
    std::for_each(list.begin(), end, [&](const Candidate& candidate) { tokens.push_back(candidate.id); });
}

std::vector<int32_t> tokens_shown(const std::vector<Snapshot>& snapshots, int32_t chosen, size_t count) {
    std::vector<int32_t> tokens{chosen};
    add_likeliest(snapshots.front().list, count, tokens);
    add_likeliest(snapshots.back().list, count, tokens);
    const std::vector<Candidate>& model = snapshots.front().list;  // by id
    std::sort(tokens.begin(), tokens.end(), [&](int32_t a, int32_t b) {
        return model[a].logit != model[b].logit ? model[a].logit > model[b].logit : a < b;
    });
    tokens.erase(std::unique(tokens.begin(), tokens.end()), tokens.end());
    return tokens;
}

ExplainedStep measured(const Snapshot& snapshot, const std::vector<int32_t>& tokens) {
    float largest = -INFINITY;
    for (const Candidate& candidate : snapshot.list) {
        largest = std::max(largest, candidate.logit);
    }
    double total = 0.0;
    ExplainedStep step{snapshot.name, 0, std::vector<double>(tokens.size(), 0.0)};
    for (const Candidate& candidate : snapshot.list) {
        if (!is_possible(candidate)) {
            continue;
        }
        ++step.remaining;
        // The difference would be NaN where a tiny temperature has made several infinite.
        const bool is_largest = candidate.logit == largest;
        const double weight = is_largest ? 1.0 : std::exp(static_cast<double>(candidate.logit) - largest);
        total += weight;
        const auto shown = std::find(tokens.begin(), tokens.end(), candidate.id);
        if (shown != tokens.end()) {
            step.probabilities[shown - tokens.begin()] = weight;
        }
    }
    for (double& probability : step.probabilities) {
        probability /= total;
    }
    return step;
}

}  // namespace

Explanation explain(const RememberedCall& call, const SamplerParams& params, const std::vector<Step>& order,
                    Dry dry, const std::optional<Watermark>& watermark, size_t count) {
    Replay replay(call, params);
    if (params.mirostat != 0) {
        replay.run_mirostat();
    } else {
        replay.run(order, dry);
    }
    if (watermark) {
        replay.mark(*watermark);
    }
    const std::vector<Snapshot>& snapshots = replay.snapshots();
    Explanation explanation{call.chosen, tokens_shown(snapshots, call.chosen, count), {}};
    for (const Snapshot& snapshot : snapshots) {
        explanation.steps.push_back(measured(snapshot, explanation.tokens));
    }
    return explanation;
}

}  // namespace llmrun
