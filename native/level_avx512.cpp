// The kernels for x86-64 CPUs with AVX-512 as of Ice Lake and Zen 4.

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "levels.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"))), apply_to = function)
#else
#pragma GCC target("avx2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#endif

namespace mm {
namespace level_avx512 {

constexpr int LANES = 16, VECTORS = 3;
typedef __m512i Ints, Pairs;

inline Ints all(int32_t value) { return _mm512_set1_epi32(value); }

inline Pairs zip(const uint8_t* a, const uint8_t* b) {
    const __m512i low = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a)));
    const __m512i high = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b)));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

inline Ints dot(Ints sum, Pairs pairs, int32_t weights) { return _mm512_dpwssd_epi32(sum, pairs, all(weights)); }

inline Ints shifted(Ints sum, Ints low, int by) { return _mm512_add_epi32(_mm512_slli_epi32(sum, by), low); }

inline void narrow(Ints sum, int shift, uint8_t* to) {
    sum = _mm512_max_epi32(_mm512_srai_epi32(sum, shift), _mm512_setzero_si512());
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtusepi32_epi8(sum));
}

inline void turn(const uint8_t* const from[4], uint8_t* const to[4]) {
    const __m128i loose = _mm_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1);
    const __m128i tight = _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
    __m128i rows[4];
    for (int i = 0; i < 4; i++)
        rows[i] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from[i])), loose);
    const __m128i a = _mm_unpacklo_epi32(rows[0], rows[1]), b = _mm_unpackhi_epi32(rows[0], rows[1]);
    const __m128i c = _mm_unpacklo_epi32(rows[2], rows[3]), d = _mm_unpackhi_epi32(rows[2], rows[3]);
    const __m128i columns[4] = {_mm_unpacklo_epi64(a, c), _mm_unpackhi_epi64(a, c), _mm_unpacklo_epi64(b, d),
                                _mm_unpackhi_epi64(b, d)};
    for (int i = 0; i < 4; i++)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to[i]), _mm_shuffle_epi8(columns[i], tight));
}

#include "level.inc"

}  // namespace level_avx512

const Level avx512 = {"avx512", level_avx512::ROWS, level_avx512::cut, level_avx512::unfilter};

}  // namespace mm

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
