#include "suffixes.hpp"

#include <algorithm>
#include <bit>

namespace llmrun {

namespace {

// An occurrence is noted for so many of the ends that are shorter, too. For all would be as many as there are tokens,
// where one of them is repeated.
constexpr int noted = 16;

}  // namespace

void SuffixAutomaton::clear() {
    states_.assign(1, {0, none, none, none, none, none});
    edges_.clear();
    slots_.assign(64, none);
    whole_ = match_length_ = 0;
    match_end_ = none;
    is_stale_ = false;
}

void SuffixAutomaton::extend(std::span<const int32_t> tokens) {
    const size_t before = tokens_.size();
    for (const int32_t token : tokens) {
        tokens_.push_back(token < 0 ? separator : token);
    }
    const std::span<const int32_t> added = std::span(tokens_).subspan(before);
    if (!is_stale_) {
        std::ranges::for_each(added, [this](int32_t token) { push(token); });
    }
}

void SuffixAutomaton::rewind(size_t length) {
    if (length < tokens_.size()) {
        tokens_.resize(length);
        is_stale_ = true;
    }
}

void SuffixAutomaton::rebuild() {
    clear();
    for (const int32_t token : tokens_) {
        push(token);
    }
}

std::pair<std::vector<int32_t>, size_t> SuffixAutomaton::draft(size_t most) {
    if (is_stale_) {
        rebuild();
    }
    std::vector<int32_t> drafted;
    if (match_length_ > 0) {
        const size_t begin = static_cast<size_t>(match_end_) + 1;
        if (tokens_[begin] < 0) {
            return {{}, 0};
        }
        for (size_t i = begin; i < begin + most; ++i) {
            const int32_t token = i < tokens_.size() ? tokens_[i] : drafted[i - tokens_.size()];
            if (token < 0) {
                break;
            }
            drafted.push_back(token);
        }
    }
    return {std::move(drafted), match_length_};
}

void SuffixAutomaton::push(int32_t token) {
    const int32_t length = states_[whole_].length + 1;
    const int32_t whole = add_state({length, 0, length - 1, none, none, none});
    int32_t state = whole_;
    int32_t* found = nullptr;
    while (state != none && (found = target(state, token)) == nullptr) {
        add_edge(state, token, whole);
        state = states_[state].link;
    }
    whole_ = whole;
    if (state != none) {
        int32_t match = *found;
        if (states_[match].length != states_[state].length + 1) {
            const int32_t longer = match;
            match = split(longer, states_[state].length + 1);
            while (state != none && (found = target(state, token)) != nullptr && *found == longer) {
                *found = match;
                state = states_[state].link;
            }
        }
        states_[whole].link = match;
    }
    const State& match = states_[states_[whole].link];
    match_length_ = match.length;
    match_end_ = match.last;
    note_occurrence(states_[whole].link, length - 1);
}

int32_t SuffixAutomaton::add_state(const State& state) {
    states_.push_back(state);
    return static_cast<int32_t>(states_.size() - 1);
}

// The ends of a state up to a length get a state of their own, because they occur in one more place now.
int32_t SuffixAutomaton::split(int32_t state, int32_t length) {
    State shorter = states_[state];
    shorter.length = length;
    shorter.more = none;
    const int32_t added = add_state(shorter);
    for (int32_t edge = states_[state].more; edge != none; edge = edges_[edge].next) {
        add_edge(added, edges_[edge].token, edges_[edge].target);
    }
    states_[state].link = added;
    return added;
}

void SuffixAutomaton::note_occurrence(int32_t state, int32_t end) {
    for (int i = 0; i < noted && state > 0; ++i) {
        states_[state].last = end;
        state = states_[state].link;
    }
}

// Where a token leads to; null where it has not followed.
int32_t* SuffixAutomaton::target(int32_t state, int32_t token) {
    State& from = states_[state];
    if (from.token == token) {
        return &from.target;
    }
    if (from.more == none) {
        return nullptr;
    }
    const int32_t edge = slots_[slot_of(state, token)];
    return edge == none ? nullptr : &edges_[edge].target;
}

void SuffixAutomaton::add_edge(int32_t state, int32_t token, int32_t target) {
    State& from = states_[state];
    if (from.token == none) {
        from.token = token;
        from.target = target;
        return;
    }
    if (2 * (edges_.size() + 1) > slots_.size()) {
        grow_slots();
    }
    const auto edge = static_cast<int32_t>(edges_.size());
    edges_.push_back({state, token, target, from.more});
    from.more = edge;
    slots_[slot_of(state, token)] = edge;
}

void SuffixAutomaton::grow_slots() {
    slots_.assign(2 * slots_.size(), none);
    for (size_t edge = 0; edge < edges_.size(); ++edge) {
        slots_[slot_of(edges_[edge].state, edges_[edge].token)] = static_cast<int32_t>(edge);
    }
}

// Fibonacci hashing.
size_t SuffixAutomaton::slot_of(int32_t state, int32_t token) const {
    const uint64_t key = static_cast<uint64_t>(static_cast<uint32_t>(state)) << 32 | static_cast<uint32_t>(token);
    size_t slot = (key * 0x9E3779B97F4A7C15u) >> (64 - std::countr_zero(slots_.size()));
    while (slots_[slot] != none && (edges_[slots_[slot]].state != state || edges_[slots_[slot]].token != token)) {
        slot = (slot + 1) & (slots_.size() - 1);
    }
    return slot;
}

}  // namespace llmrun
