// read_rate and multiply_add_rate: their figures are this machine's, so only what holds on every one is asked.
#include <cmath>
#include <stdexcept>

#include "check.hpp"
#include "limits.hpp"

using llmrun::multiply_add_rate;
using llmrun::read_rate;

namespace {

template <typename Function>
bool refused(Function function) {
    try {
        function();
    } catch (const std::invalid_argument&) {
        return true;
    }
    return false;
}

void test_read_rate() {
    for (const unsigned threads : {1U, 2U, 3U}) {
        const double rate = read_rate(size_t{4} << 20, threads, 0.01);
        CHECK(std::isfinite(rate) && rate > 1e7 && rate < 1e14);
    }
    CHECK(read_rate(128, 1, 0) > 0);
    CHECK(refused([] { read_rate(127, 1, 0); }));
    CHECK(refused([] { read_rate(size_t{1} << 20, 0, 0); }));
    CHECK(refused([] { read_rate(256, 3, 0); }));  // nothing for the third
}

void test_multiply_add_rate() {
    for (const char* kind : {"half", "single"}) {
        const double rate = multiply_add_rate(kind, 2, 0.005);
        CHECK(std::isfinite(rate) && rate > 1e7 && rate < 1e14);
    }
    CHECK(multiply_add_rate("int8", 1, 0.005) >= 0);  // 0 where there is no instruction for it
    CHECK(refused([] { multiply_add_rate("double", 1, 0); }));
    CHECK(refused([] { multiply_add_rate("int8", 0, 0); }));
}

}  // namespace

int main() {
    test_read_rate();
    test_multiply_add_rate();
    return summary();
}
