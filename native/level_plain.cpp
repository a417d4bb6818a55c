// The kernels for any CPU that the library is compiled for.

#include <cstdint>
#include <cstring>

#include "levels.h"

namespace mm {
namespace level_plain {

constexpr int LANES = 4, VECTORS = 12;
typedef int32_t Ints __attribute__((vector_size(16)));
struct Pairs {
    Ints a, b;
};

inline Ints all(int32_t value) { return Ints{} + value; }

inline Pairs zip(const uint8_t* a, const uint8_t* b) {
    return {Ints{a[0], a[1], a[2], a[3]}, Ints{b[0], b[1], b[2], b[3]}};
}

inline Ints dot(Ints sum, Pairs pairs, int32_t weights) {
    return sum + pairs.a * static_cast<int16_t>(weights) + pairs.b * (weights >> 16);
}

inline Ints shifted(Ints sum, Ints low, int by) { return sum * (1 << by) + low; }

inline void narrow(Ints sum, int shift, uint8_t* to) {
    sum >>= shift;
    for (int i = 0; i < LANES; i++) to[i] = static_cast<uint8_t>(sum[i] < 0 ? 0 : sum[i] > 255 ? 255 : sum[i]);
}

inline void turn(const uint8_t* const from[4], uint8_t* const to[4]) {
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

const Level plain = {"plain", level_plain::ROWS, level_plain::cut, level_plain::unfilter};

}  // namespace mm
