// The kernels for x86-64 CPUs with AVX2.

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "levels.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC target("avx2")
#endif

namespace mm {
namespace level_avx2 {

constexpr int LANES = 8, VECTORS = 6;
typedef __m256i Ints, Pairs;

#include "x86.h"

inline Ints broadcast(int32_t value) { return _mm256_set1_epi32(value); }

inline Pairs interleave(const uint8_t* a, const uint8_t* b) {
    return _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(a)),
                                                  _mm_loadl_epi64(reinterpret_cast<const __m128i*>(b))));
}

inline Ints dot_add(Ints sum, Pairs pairs, int32_t weights) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, broadcast(weights)));
}

inline Ints shift_add(Ints sum, Ints low, int by) { return _mm256_add_epi32(_mm256_slli_epi32(sum, by), low); }

inline void narrow(Ints sum, int shift, uint8_t* to) {
    sum = _mm256_srai_epi32(sum, shift);
    const __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(half, half));
}

#include "level.inc"

}  // namespace level_avx2

const Level avx2 = {"avx2", level_avx2::ROWS, level_avx2::resize_and_patchify, level_avx2::unfilter};

}  // namespace mm

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
