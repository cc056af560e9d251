// What the native tests are written with: a check that counts its failures and goes on.
#pragma once

#include <cstdio>

inline int failures = 0;

#define CHECK(condition)                                                \
    do {                                                                \
        if (!(condition)) {                                             \
            std::printf("%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            ++failures;                                                 \
        }                                                               \
    } while (false)

// The test program's exit status, said as well.
inline int summary() {
    std::printf(failures == 0 ? "all passed\n" : "%d checks failed\n", failures);
    return failures == 0 ? 0 : 1;
}
