// Where the end of a sequence has occurred in it before, and what followed: the drafts of speculation.
//
// Owns a suffix automaton (Blumer et al. 1985) over tokens, built as they come. Knows neither models nor samplers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace llmrun {

// A token takes amortised constant time and at most about 130 bytes, whatever the vocabulary.
class SuffixAutomaton {
  public:
    SuffixAutomaton() { clear(); }

    // Negative tokens, those of images and audio, are never drafted, and all count as equal.
    void extend(std::span<const int32_t> tokens);

    // Keep only the first `length` tokens. Rare, so that all is built again, when it is next needed.
    void rewind(size_t length);

    size_t size() const { return tokens_.size(); }

    // `most` tokens that followed when the longest possible end of the sequence occurred before, and how long that is.
    // What followed may reach into the draft itself, as in a repeat. No tokens, and 0, when the last token is new.
    std::pair<std::vector<int32_t>, size_t> draft(size_t most);

    // Index of the token that the last draft begins with, unless it begins in itself; -1 without a draft.
    int32_t draft_begin() const { return match_length_ > 0 ? match_end_ + 1 : none; }

  private:
    // All ends of the sequence's beginnings that occur in exactly the same places; the first state is the empty one.
    struct State {
        int32_t length;  // of the longest of them
        int32_t link;    // the state of the longest end that occurs elsewhere, too
        int32_t last;    // index of the token with which an occurrence ends: one of the latest
        int32_t token;   // most states are followed by one token only,
        int32_t target;  // which leads here;
        int32_t more;    // the others are a list of edges
    };
    struct Edge {
        int32_t state;
        int32_t token;
        int32_t target;
        int32_t next;
    };
    static constexpr int32_t none = -1;
    static constexpr int32_t separator = -2;  // every token of an image or audio; never drafted

    void clear();
    void rebuild();
    void push(int32_t token);
    int32_t add_state(const State& state);
    int32_t split(int32_t state, int32_t length);
    void note_occurrence(int32_t state, int32_t end);
    int32_t* target(int32_t state, int32_t token);
    void add_edge(int32_t state, int32_t token, int32_t target);
    void grow_slots();
    size_t slot_of(int32_t state, int32_t token) const;

    std::vector<int32_t> tokens_;
    std::vector<State> states_;
    std::vector<Edge> edges_;
    std::vector<int32_t> slots_;  // hash table of indexes into edges_; a power of two of them, at most half taken
    int32_t whole_;               // the state of the whole sequence
    int32_t match_length_;        // of its longest end that occurred before,
    int32_t match_end_;           // with this token as its last
    bool is_stale_;
};

}  // namespace llmrun
