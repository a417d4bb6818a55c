// The kernels as they are compiled once for each instruction set.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace mm {

// How one side is resized: output i is the weighted sum of count[i] inputs from first[i] on. Weights are pairs
// of int16, the first in the low half; where those are too short, in two parts: weight << LOW_BITS plus low.
struct Axis {
    static constexpr int LOW_BITS = 11;
    int64_t pairs = 0;  // of weights of one output, the last ones zero
    int32_t* first = nullptr;
    int32_t* count = nullptr;
    int32_t* weights = nullptr;
    int32_t* low = nullptr;  // null where there is one part
    int shift = 0;           // of the sum's fixed point
};

// Paeth's choice (PNG, 9.4): of the three neighbours the one nearest to left + up - corner.
inline int paeth(int left, int up, int corner) {
    const int across = up - corner, down = left - corner, both = across + down;
    const int to_left = across < 0 ? -across : across, to_up = down < 0 ? -down : down;
    const int to_corner = both < 0 ? -both : both;
    return to_left <= to_up && to_left <= to_corner ? left : to_up <= to_corner ? up : corner;
}

struct Level {
    const char* name;
    int64_t rows_per_pass;  // of the horizontal pass
    void (*resize_and_patchify)(const mm_patchify_request& request, const Axis* horizontal, const Axis* vertical,
                                uint8_t* scratch);
    bool (*unfilter)(const uint8_t* data, int64_t height, int64_t row_bytes, int64_t pixel_bytes, uint8_t* out);
};

// Where in `scratch` each of the buffers of a request begins.
struct Layout {
    int64_t columns, ring, lines, rows, total;
    int64_t ring_rows, ring_stride;
    int64_t plane;  // bytes of one channel of a line of the canvas
    Layout(const mm_patchify_request& request, const Axis* horizontal, const Axis* vertical, int64_t rows_per_pass);
};

extern const Level plain;
#if defined(__x86_64__)
extern const Level avx2, avx512;
#endif

}  // namespace mm
