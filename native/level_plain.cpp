// The kernels for any CPU that the library is compiled for.

#include <cstdint>
#include <cstring>

#include "levels.h"

namespace mm {
namespace level_plain {

// Loops of constant length, which compilers vectorise for the target machine.
constexpr int LANES = 16, VECTORS = 3;

struct Ints {
    uint32_t v[LANES];  // int32 values: partial sums may wrap, the total does not
};
struct Pairs {
    const uint8_t *a, *b;
};

inline Ints broadcast(int32_t value) {
    Ints result;
    for (int i = 0; i < LANES; i++) result.v[i] = static_cast<uint32_t>(value);
    return result;
}

inline Pairs interleave(const uint8_t* a, const uint8_t* b) { return {a, b}; }

inline Ints dot_add(Ints sum, Pairs pairs, int32_t weights) {
    const int16_t first = static_cast<int16_t>(weights), second = static_cast<int16_t>(weights >> 16);
    for (int i = 0; i < LANES; i++)
        sum.v[i] += static_cast<uint32_t>(int16_t{pairs.a[i]} * first + int16_t{pairs.b[i]} * second);
    return sum;
}

inline Ints shift_add(Ints sum, Ints low, int by) {
    for (int i = 0; i < LANES; i++) low.v[i] += sum.v[i] << by;
    return low;
}

inline void narrow(Ints sum, int shift, uint8_t* to) {
    for (int i = 0; i < LANES; i++) {
        const int32_t value = static_cast<int32_t>(sum.v[i]) >> shift;
        to[i] = static_cast<uint8_t>(value < 0 ? 0 : value > 255 ? 255 : value);
    }
}

inline void transpose(const uint8_t* const from[4], uint8_t* const to[4]) {
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) std::memcpy(to[j] + i * 3, from[i] + j * 3, 3);
}

struct Pixel {
    int v[4];

    static Pixel read(const uint8_t* from) { return {{from[0], from[1], from[2], from[3]}}; }

    void write(uint8_t* to) const {
        for (int i = 0; i < 4; i++) to[i] = static_cast<uint8_t>(v[i]);
    }

    Pixel plus(Pixel other) const {
        for (int i = 0; i < 4; i++) other.v[i] = (v[i] + other.v[i]) & 255;
        return other;
    }

    static Pixel paeth(Pixel left, Pixel up, Pixel corner) {
        Pixel guess;
        for (int i = 0; i < 4; i++) guess.v[i] = mm::paeth(left.v[i], up.v[i], corner.v[i]);
        return guess;
    }
};

#include "level.inc"

}  // namespace level_plain

const Level plain = {"plain", level_plain::ROWS, level_plain::resize_and_patchify, level_plain::unfilter};

}  // namespace mm
