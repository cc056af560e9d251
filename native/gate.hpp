// How many tokens to draft, by the cost of decode steps and the acceptance rates so far.
//
// Knows neither models nor clocks: the decision depends on tables of what steps cost, whose unit is the time of a step of
// one row, and on the tokens so far.
//
// The first token of a draft after a match of m tokens is accepted with probability p(m), the second with p(m + 1), and
// so on. Every token of the answer teaches these: it shows of any draft, verified or not, whether it was right. So none
// is verified before it is known how often such drafts are right. The n-th token of a draft model has a probability of
// its own, since the first ones are the likeliest to be right; its steps cost time, even if it turns out to be unsure.
// What it is not asked for is forgotten slowly, since the text changes, so it is tried again.
//
// By the table, drafts never cost an answer more than one plain step and 1 % of the time of plain decoding: a draft is
// only verified if that holds even when all of it is wrong. It holds for each source alone, too, so that none spends what
// another one gains. Not counted is what a draft model takes to read the prompt.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <span>
#include <vector>

namespace llmrun {

// A decode step to which a draft may be added.
struct StepShape {
    int32_t rows;     // tokens that it decodes without drafts
    int32_t sampled;  // tokens that it yields without drafts: one per sequence
};

// What a decode step with this many rows costs.
struct StepCost {
    int32_t width;
    double cost;
};

// The number of tokens to draft, and the expected number of tokens for the cost of a plain step.
struct DraftChoice {
    int32_t length = 0;
    double rate = 0.0;
    bool waits = false;  // a draft would pay, but drafts have cost too much so far
};

// The draft lengths of one answer.
class Gate {
  public:
    static constexpr int32_t model = -1;  // the length of a match, for drafts of a draft model

    // costs: by ascending width; draft_costs: of the draft model.
    // always: drafts are as long as possible, whatever they cost.
    Gate(int32_t most, std::vector<StepCost> costs, std::vector<StepCost> draft_costs, bool always = false);

    // Sets what the next steps cost.
    void set_costs(std::vector<StepCost> costs, std::vector<StepCost> draft_costs);

    // match: the number of last tokens that the draft has followed before, or model.
    DraftChoice choose(int32_t match, int32_t limit, const StepShape& step) const;

    // What drafts of this source may cost in a step; match as in choose().
    double credit(int32_t match, const StepShape& step) const;

    // The expected number of accepted tokens of a draft.
    double expected(int32_t match, int32_t length) const;

    // One sequence's share of what a draft of this length costs the draft model.
    double draft_cost(const StepShape& step, double length) const;

    // What the planned step costs beyond the same step without a draft.
    double planned_cost() const;

    // The expected speed of the answer so far, relative to plain decoding.
    double speedup() const;

    // Whether the draft model should prefill tokens that it has not seen. The answer is expected to take as long again
    // as it took so far, prefill included; what drafts gain in that time has to pay for the prefill.
    bool is_worth_prefill(int32_t n_tokens, const StepShape& step) const;

    // Learns from a draft: its first n_accepted tokens were right, and if missed, the next one was wrong.
    void learn(int32_t match, int32_t n_accepted, bool missed);

    // Learns whether the draft model was sure of the first token of a draft.
    void learn_sureness(bool sure) { sure_.learn(sure); }

    // Accounts for a step with a draft of this source, and for what it has cost the draft model.
    void record_step(int32_t match, const StepShape& step, int32_t n_drafted, int32_t n_accepted, double drafting);

    // How many tokens of a draft are compared with the answer, verified by a step or not.
    size_t n_compared() const;

    // Plans a step with a draft, and chooses how many of its tokens to verify.
    DraftChoice plan(std::vector<int32_t> drafted, int32_t match, const StepShape& step,
                     int32_t limit = std::numeric_limits<int32_t>::max());

    // Adds the draft model's draft to the planned step.
    void add_model_draft(std::vector<int32_t> drafted) { drafts_.push_back({std::move(drafted), model}); }

    // The planned step verifies this many tokens; drafting costs the draft model some time.
    void set_length(int32_t length, double drafting);

    // Compares the drafts of the planned step with the tokens that came since, if any.
    void compare(std::span<const int32_t> tokens);

    // Forgets the planned step.
    void forget() { drafts_.clear(); }

  private:
    struct Draft {
        std::vector<int32_t> tokens;
        int32_t match;
    };
    class AcceptanceRate {
      public:
        explicit AcceptanceRate(double prior) : value_(prior) {}
        double value() const { return value_; }
        bool is_known() const;
        void learn(bool accepted);
        void forget(double prior);

      private:
        static constexpr double prior_weight = 4;

        double value_;
        double outcomes_ = prior_weight;
    };

    // Of a draft's token at this depth, from 0, given that those before it are right.
    const AcceptanceRate& rate(int32_t match, int32_t depth) const;
    AcceptanceRate& rate(int32_t match, int32_t depth) {
        return const_cast<AcceptanceRate&>(std::as_const(*this).rate(match, depth));
    }
    double gain(int32_t match) const { return match == model ? model_gain_ : text_gain_; }
    // What a token costs by plain decoding.
    double token_cost(const StepShape& step) const;
    // Forgets a little of the draft model's rates from this depth on.
    void forget_model(int32_t depth);

    int32_t most_;
    bool always_;
    std::vector<StepCost> costs_;
    std::vector<StepCost> draft_costs_;
    std::vector<AcceptanceRate> rates_;        // by the length of the match
    std::vector<AcceptanceRate> model_rates_;  // by depth
    AcceptanceRate sure_;
    // This answer's share of what the steps cost: its tokens by plain decoding, and what drafts gained, by source.
    double plain_ = 0.0;
    double text_gain_ = 0.0;
    double model_gain_ = 0.0;
    // The planned step; the last draft is the one of which tokens are verified.
    std::vector<Draft> drafts_;
    StepShape step_{1, 1};
    int32_t length_ = 0;
    double drafting_ = 0.0;
};

}  // namespace llmrun
