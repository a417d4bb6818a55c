// The kernels, which are compiled once per instruction set ("level").
#pragma once

#include <cstdint>

#include "kernels.h"

namespace mm {

// The weights that resize one axis: output i is the weighted sum of count[i] inputs from first[i] on. Weights are
// stored as pairs of int16, the first in the low half. Weights of more than 16 bits have two parts,
// (weight << LOW_BITS) + low.
struct Axis {
    static constexpr int LOW_BITS = 11;
    int64_t pairs = 0;  // pairs of weights per output, padded with zeros
    int32_t* first = nullptr;
    int32_t* count = nullptr;
    int32_t* weights = nullptr;
    int32_t* low = nullptr;  // null if the weights have one part
    int shift = 0;           // fractional bits of a sum
};

// The Paeth predictor (PNG, 9.4): the one of the three neighbours that is nearest to left + up - corner.
inline int paeth(int left, int up, int corner) {
    const int across = up - corner, down = left - corner, both = across + down;
    const int to_left = across < 0 ? -across : across, to_up = down < 0 ? -down : down;
    const int to_corner = both < 0 ? -both : both;
    return to_left <= to_up && to_left <= to_corner ? left : to_up <= to_corner ? up : corner;
}

struct Level {
    const char* name;
    int64_t rows_per_pass;  // rows that the horizontal pass resizes at a time
    void (*resize_and_patchify)(const mm_patchify_request& request, const Axis* horizontal, const Axis* vertical,
                                uint8_t* scratch);
    bool (*unfilter)(const uint8_t* data, int64_t height, int64_t row_bytes, int64_t pixel_bytes, uint8_t* out);
};

// Offsets of a request's buffers in its scratch memory.
struct Layout {
    int64_t columns, ring, lines, rows, total;
    int64_t ring_rows, ring_stride;
    int64_t plane;  // bytes of one channel of a canvas row
    Layout(const mm_patchify_request& request, const Axis* horizontal, const Axis* vertical, int64_t rows_per_pass);
};

extern const Level plain;
#if defined(__x86_64__)
extern const Level avx2, avx512;
#endif

}  // namespace mm
