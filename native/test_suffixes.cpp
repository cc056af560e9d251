// SuffixAutomaton against a naive twin that looks through the whole sequence.
#include <algorithm>
#include <cstdlib>
#include <random>

#include "check.hpp"
#include "suffixes.hpp"

using llmrun::SuffixAutomaton;
using Tokens = std::vector<int32_t>;

namespace {

// How many tokens up to index `end` are those at the end of the sequence.
size_t common_end(const Tokens& tokens, size_t end) {
    size_t length = 0;
    while (length <= end && tokens[end - length] == tokens[tokens.size() - 1 - length]) {
        ++length;
    }
    return length;
}

size_t longest_match(const Tokens& tokens) {
    size_t longest = 0;
    for (size_t end = 0; end + 1 < tokens.size(); ++end) {
        longest = std::max(longest, common_end(tokens, end));
    }
    return longest;
}

// Whether this followed where `length` tokens at the end occurred before.
bool followed(const Tokens& tokens, size_t length, const Tokens& draft) {
    Tokens all = tokens;
    all.insert(all.end(), draft.begin(), draft.end());
    for (size_t end = 0; end + 1 < tokens.size(); ++end) {
        if (common_end(tokens, end) == length && std::equal(draft.begin(), draft.end(), all.begin() + end + 1)) {
            return true;
        }
    }
    return false;
}

void test_random_operations(int count) {
    std::mt19937 random(1);
    const auto below = [&](size_t bound) { return static_cast<size_t>(random() % bound); };
    SuffixAutomaton automaton;
    Tokens tokens;
    size_t alphabet = 2;
    size_t most = 40;
    for (int i = 0; i < count; ++i) {
        const size_t kind = below(100);
        if (tokens.size() > most) {
            automaton.rewind(0);
            tokens.clear();
            alphabet = 1 + below(8);
            most = 1 + below(80);
        } else if (kind < 60) {
            Tokens added(below(10) == 0 ? below(12) : 1);
            for (int32_t& token : added) {
                token = static_cast<int32_t>(below(20) == 0 ? below(1 << 30) : below(alphabet));
            }
            automaton.extend(added);
            tokens.insert(tokens.end(), added.begin(), added.end());
        } else if (kind < 65) {
            const size_t length = tokens.size() - std::min(tokens.size(), below(6));
            automaton.rewind(length);
            tokens.resize(length);
        } else {
            const size_t wanted = below(20);
            const auto [draft, length] = automaton.draft(wanted);
            CHECK(length == longest_match(tokens));
            CHECK(draft.size() == (length > 0 ? wanted : 0));
            CHECK(draft.empty() || followed(tokens, length, draft));
        }
        CHECK(automaton.size() == tokens.size());
    }
}

void test_the_latest_occurrence_is_continued() {
    SuffixAutomaton automaton;
    automaton.extend(Tokens{1, 2, 7, 1, 2, 8, 1, 2});
    CHECK(automaton.draft(3) == std::pair(Tokens({8, 1, 2}), size_t{2}));
    automaton.extend(Tokens{7, 2});
    CHECK(automaton.draft(2) == std::pair(Tokens({7, 2}), size_t{1}));
}

void test_a_repeat_goes_on() {
    SuffixAutomaton automaton;
    automaton.extend(Tokens{5, 6, 7, 6, 7});
    CHECK(automaton.draft(5) == std::pair(Tokens({6, 7, 6, 7, 6}), size_t{2}));
}

void test_what_is_no_text_is_not_drafted() {
    SuffixAutomaton automaton;
    automaton.extend(Tokens{5, 6, 7, -1, -900, 8, 5, 6});
    CHECK(automaton.draft(5) == std::pair(Tokens({7}), size_t{2}));
    automaton.extend(Tokens{7});
    CHECK(automaton.draft(5) == std::pair(Tokens(), size_t{0}));
    automaton.extend(Tokens{-3, -4, 8, 5, 6});
    CHECK(automaton.draft(5) == std::pair(Tokens({7}), size_t{8}));
}

}  // namespace

int main(int count, char** arguments) {
    test_random_operations(count > 1 ? std::atoi(arguments[1]) : 1'000'000);
    test_the_latest_occurrence_is_continued();
    test_a_repeat_goes_on();
    test_what_is_no_text_is_not_drafted();
    return summary();
}
