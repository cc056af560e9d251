// What this machine can do at most: bytes read from memory, and multiply-adds, per second, as measured.
//
// Owns loops that do one thing as often as the processor lets them. Knows neither Python nor models.
#pragma once

#include <cstddef>
#include <string_view>

namespace llmrun {

// Bytes per second that the threads together read, the best of the passes over a buffer of that many bytes.
// A buffer that fits into a cache is read from there. Makes at least two passes, and stops after `seconds`.
// Throws std::invalid_argument when there is nothing to read or nobody to read it, std::bad_alloc without memory.
double read_rate(size_t bytes, unsigned threads, double seconds);

// Multiply-adds per second of the threads together, the best of several rounds within `seconds`.
//   "int8"    products of 8-bit integers, added up in 32 bits: what quantized weights are computed with
//   "half"    products of 16-bit floats, or of 32-bit ones where the processor is faster with those
//   "single"  products of 32-bit floats
// 0 where the processor has no instruction that we know. Throws std::invalid_argument for another kind or no threads.
double multiply_add_rate(std::string_view kind, unsigned threads, double seconds);

}  // namespace llmrun
